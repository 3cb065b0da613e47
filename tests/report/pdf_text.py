"""The text of a PDF that Chromium printed, page after page; enough to find words in it, and no more.

Skia writes each font with a map from glyphs to Unicode, names a font in a page by its object (``/F12``), and shows text
as hexadecimal glyphs (PDF 32000-1:2008, 9.4.3 and 9.10.3).
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from pathlib import Path

_OBJECT = re.compile(rb"(?<!\d)(\d+) 0 obj\b(.*?)endobj", re.DOTALL)
_LENGTH = re.compile(rb"/Length (\d+)")
_STREAM = re.compile(rb"stream\r?\n")
_SHOWN = re.compile(rb"/F(\d+) [\d.]+ Tf|<([0-9A-Fa-f]+)> Tj|\[((?:<[0-9A-Fa-f]+>|[-\d. ]|\s)*)\] TJ")


def read_pdf_text(path: Path) -> str:
    """All text in the order in which it is drawn, without spaces, which a PDF need not have, and ligatures."""
    objects = {int(number): body for number, body in _OBJECT.findall(path.read_bytes())}
    fonts = {}
    for number, body in objects.items():
        mapped = re.search(rb"/ToUnicode (\d+) 0 R", body)
        if mapped is not None:
            fonts[number] = _read_map(_content(objects[int(mapped[1])]))
    pieces = []
    for body in objects.values():
        content = _content(body)
        if b" Tf" in content:
            pieces.append(_shown(content, fonts))
    return unicodedata.normalize("NFKC", "".join(pieces))


def _content(body: bytes) -> bytes:
    begin, length = _STREAM.search(body), _LENGTH.search(body)
    if begin is None or length is None:
        return b""
    # By its length: the last byte of what was compressed may be the \r that another writer puts before "endstream".
    content = body[begin.end() : begin.end() + int(length[1])]
    return zlib.decompress(content) if b"/FlateDecode" in body[: begin.start()] else content


def _read_map(content: bytes) -> dict[int, str]:
    glyphs = {}
    for block in re.findall(rb"beginbfchar(.*?)endbfchar", content, re.DOTALL):
        for glyph, text in re.findall(rb"<([0-9A-Fa-f]+)> <([0-9A-Fa-f]+)>", block):
            glyphs[int(glyph, 16)] = _text(text)
    for block in re.findall(rb"beginbfrange(.*?)endbfrange", content, re.DOTALL):
        for first, last, text in re.findall(rb"<([0-9A-Fa-f]+)> <([0-9A-Fa-f]+)> <([0-9A-Fa-f]+)>", block):
            for offset in range(int(last, 16) - int(first, 16) + 1):
                glyphs[int(first, 16) + offset] = chr(int(text, 16) + offset)
    return glyphs


def _text(digits: bytes) -> str:
    return bytes.fromhex(digits.decode()).decode("utf-16-be")


def _shown(content: bytes, fonts: dict[int, dict[int, str]]) -> str:
    glyphs: dict[int, str] = {}
    shown = ""
    for font, single, several in _SHOWN.findall(content):
        if font:
            glyphs = fonts.get(int(font), {})
            continue
        for digits in [single] if single else re.findall(rb"<([0-9A-Fa-f]+)>", several):
            text = digits.decode()
            shown += "".join(glyphs.get(int(text[start : start + 4], 16), "") for start in range(0, len(text), 4))
    return "".join(shown.split())
