"""The ``training_service`` section: training in another process, behind HTTP; importing this imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from mock_scheduler.config.base import ConfigSection, Decides


class TrainingServiceConfig(ConfigSection):
    """Who trains. ``url`` is the client's key, the others are the service's own.

    ``url``: where a service listens, as ``http://127.0.0.1:8300``; ``null``: this run trains itself.
    ``host``, ``port``: where a service that runs this configuration listens; port 0 takes a free one, which
    ``{output_dir}/service.json`` then has. ``timeout_s``: how long a client waits for one answer, and a service for
    the client's next request before it ends.
    """

    decides: ClassVar = Decides.NOTHING

    # The service trains, in a layout of its own; client and service compare their contracts when they meet.
    url: Annotated[str | None, Decides.OUTSIDE] = None
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    timeout_s: float = Field(default=600.0, gt=0.0)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^\s/]+(/[^\s]*)?", url):
            raise ValueError(f"is {url!r}, expected http://HOST:PORT as the service prints it; null trains in this run")
        return None if url is None else url.rstrip("/")
