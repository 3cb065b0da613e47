"""Stands between the pipeline and the real rollout scheduler: runs it, records it, answers in its place, or compares.

Contract: ``build_scheduler`` and ``build_async_scheduler`` are the only ways in, and the schedulers they return
have one interface in every mode. Every rank builds one and calls it in the same order; nothing here communicates.
"""

from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.proxy.settings import BuildOptions
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler

__all__ = ["AsyncProxyScheduler", "BuildOptions", "ProxyScheduler", "build_async_scheduler", "build_scheduler"]
