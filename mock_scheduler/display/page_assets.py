"""The style and the script of report pages: light and dark, on paper, and without a network.

Contract: figures lie in the page as one JSON list in ``#figures``; a colour in them is the name of a colour of the
style sheet, such as ``theme:ink``, which the script looks up whenever the page turns light or dark or is printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mock_scheduler.support.digests import JSON

#: Readable on light and dark, and apart for colour-blind eyes (Okabe and Ito, 2008, lightened for dark pages).
_LIGHT = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1c2430",
    "soft": "#5b6675",
    "line": "#dde2e9",
    "band": "#f1f3f7",
    "identical": "#7d9a8c",
    "equal-cell": "#e4eee8",
    "ulp": "#56a3d9",
    "tolerance": "#0072b2",
    "diverged": "#d1440c",
    "missing": "#8a3ffc",
    "warn": "#a86500",
    "undecided": "#c98a00",
    "low": "#dcecf7",
    "mid": "#f5c86b",
    "high": "#d1440c",
    "top": "#7a1206",
    "base": "#5b6675",
    "candidate": "#d1440c",
    "good": "#1a7f4b",
}
_DARK = {
    "page": "#12161c",
    "card": "#1a2029",
    "ink": "#e4e9f0",
    "soft": "#98a4b3",
    "line": "#2f3845",
    "band": "#202732",
    "identical": "#6f8f80",
    "equal-cell": "#22332b",
    "ulp": "#7cc0ee",
    "tolerance": "#4aa3df",
    "diverged": "#ff7a45",
    "missing": "#b28dff",
    "warn": "#e0a030",
    "undecided": "#e0b040",
    "low": "#1f3a50",
    "mid": "#b98a2d",
    "high": "#e8601f",
    "top": "#ff9d7a",
    "base": "#98a4b3",
    "candidate": "#ff7a45",
    "good": "#4fc487",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}\n"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:22px 20px 60px}
h1{font-size:15px;font-weight:600;color:var(--soft);margin:0 0 12px}
h2{font-size:16px;margin:0 0 2px}
h3{font-size:13px;margin:14px 0 4px;color:var(--soft);font-weight:600}
p{margin:4px 0}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:0 0 14px}
.note{color:var(--soft);font-size:12.5px;margin:0 0 8px;max-width:110ch}
.verdict{border-left:8px solid var(--soft);padding:18px 22px}
.verdict .word{font-size:30px;font-weight:700;letter-spacing:-.01em;line-height:1.15}
.verdict .sentence{font-size:17px;margin:8px 0 10px;max-width:95ch;overflow-wrap:anywhere}
.good{border-left-color:var(--good)}.good .word{color:var(--good)}
.bad{border-left-color:var(--diverged)}.bad .word{color:var(--diverged)}
.warn{border-left-color:var(--warn)}.warn .word{color:var(--warn)}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:8px 0 0;font-size:13.5px}
dl.facts dt{color:var(--soft)}dl.facts dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:12.5px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600;text-align:left;border-bottom:1px solid var(--line);padding:4px 8px;
  vertical-align:bottom}
td{padding:4px 8px;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}
td.name{overflow-wrap:anywhere;font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:12px}
tr.first td{background:var(--band)}
tr:last-child td{border-bottom:0}
.words{color:var(--soft);font-size:12px;font-family:system-ui,sans-serif;display:block;margin-top:2px}
.tag{font-size:11px;font-weight:600;border-radius:4px;padding:0 6px;border:1px solid currentColor;white-space:nowrap}
.t-identical{color:var(--identical)}.t-ulp{color:var(--ulp)}.t-tolerance{color:var(--tolerance)}
.t-diverged{color:var(--diverged)}.t-undecided{color:var(--undecided)}.t-missing,.t-unobserved{color:var(--missing)}
.dim{color:var(--soft)}
.stack{display:flex;height:11px;min-width:120px;border-radius:3px;overflow:hidden;background:var(--band)}
.stack i{display:block;background:currentColor;min-width:3px}
ul{margin:4px 0;padding-left:20px}li{overflow-wrap:anywhere}
.plot{width:100%}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:8px 18px}
details>summary{cursor:pointer;color:var(--soft);font:12px system-ui,sans-serif}
footer{color:var(--soft);font-size:12px}
@media print{@page{size:350mm 247mm;margin:8mm}body{background:#fff}main{max-width:none;padding:0}
  section{break-inside:avoid;border-color:#ccc}section.long{break-inside:auto}.scroll{overflow:visible}
  tr{break-inside:avoid}.modebar{display:none!important}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
)

SCRIPT = """
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const light = %LIGHT%, dark = %DARK%;
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  function paint(value, theme) {
    if (typeof value === "string")
      return value.startsWith("theme:") && value.slice(6) in theme ? theme[value.slice(6)] : value;
    if (Array.isArray(value)) return value.map(item => paint(item, theme));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, paint(item, theme)]));
    return value;
  }
  function draw(theme) {
    for (const figure of figures) {
      const painted = paint(figure, theme);
      Plotly.react(figure.id, painted.data, painted.layout,
        {responsive: true, displaylogo: false, displayModeBar: figure.id === "path" ? "hover" : false,
         modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"]});
    }
  }
  const drawOwn = () => draw(query.matches ? dark : light);
  query.addEventListener("change", drawOwn);
  window.addEventListener("beforeprint", () => draw(light));
  window.addEventListener("afterprint", drawOwn);
  drawOwn();
})();
""".replace("%LIGHT%", json.dumps(_LIGHT)).replace("%DARK%", json.dumps(_DARK))


def embed_json(value: Sequence[JSON]) -> str:
    """JSON that is safe within a ``script`` element: no text of it can end the element or begin a comment."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
