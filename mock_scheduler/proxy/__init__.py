"""Stands between the pipeline and the real rollout scheduler: runs it, records it, answers in its place, or compares.

Contract: ``build_scheduler`` and ``build_async_scheduler`` are the only ways in, and the schedulers they return
have one interface in every mode. Every rank builds one and calls it in the same order; nothing here communicates.
"""
