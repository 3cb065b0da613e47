"""What a report page holds, as its script and its reader see it."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any


def figures_of(page: str) -> dict[str, Any]:
    """The page's figures by element, read as its script reads them."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return {figure["id"]: figure for figure in json.loads(found[1], parse_constant=refuse)}


def text_of(page: str) -> str:
    """What a reader sees of it, without figures."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL).replace("<wbr>", "")
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
