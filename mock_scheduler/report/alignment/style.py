"""What an alignment's page has beside the style of all pages: shades, chips, turns; and its script.

Contract: figures are drawn with the page's own colours and need no script, so that paper, light and dark look alike.
The script opens what an address points at, and every candidate where the page is printed.
"""

from __future__ import annotations

#: Shades within and beyond a bound; dark pages have their own.
_LIGHT = (
    "--in1:#eaf3fa;--in2:#cfe4f3;--in3:#9fcbe8;--in4:#5aa5d6;--out1:#f5c86b;--out2:#e07b39;--out3:#a11d0c;"
    "--on-dark:#ffffff;--on-light:#1c2430;--mark1:#fdf0d0;--mark2:#f8dc98;--mark3:#f0b35c;--mark4:#e58146;"
)
_DARK = (
    "--in1:#1b2c3a;--in2:#20405a;--in3:#285b85;--in4:#2f7ab5;--out1:#b98a2d;--out2:#c8571f;--out3:#ff8f6a;"
    "--on-dark:#f3f6fa;--on-light:#12161c;--mark1:#3a3220;--mark2:#5a4718;--mark3:#8a5f1a;--mark4:#b5571f;"
)

STYLE = (
    f":root{{{_LIGHT}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    """
.verdict .sentence{margin-bottom:6px}
.chips{display:flex;flex-wrap:wrap;gap:3px 4px}
.chip{font-size:11px;line-height:1.55;border-radius:9px;padding:0 7px;border:1px solid var(--line);white-space:nowrap}
.p-proved{border-color:var(--good);color:var(--good);font-weight:600}
.p-refuted{border-color:var(--diverged);color:var(--diverged);font-weight:600}
.p-open{border-color:var(--warn);color:var(--warn);font-weight:600}
.p-not,.p-weak{color:var(--soft)}.p-weak{border-color:var(--soft)}
.v{font-weight:700;white-space:nowrap}
.v-good{color:var(--good)}.v-bad{color:var(--diverged)}.v-warn{color:var(--warn)}
table.rows th[scope=row],table.matrix th[scope=row]{vertical-align:top;color:var(--ink)}
table.rows td{overflow-wrap:anywhere}table.rows td.tight{white-space:nowrap;overflow-wrap:normal}
a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:2px}
table.matrix{width:auto}
table.matrix th[scope=row]{border-bottom:1px solid var(--line);font-family:ui-monospace,monospace}
table.matrix td{padding:3px}
.cell{display:block;min-width:104px;padding:5px 9px;border-radius:6px;text-decoration:none;line-height:1.3;
  border-left:5px solid currentColor;background:var(--band)}
.cell small{display:block;color:var(--soft);font-size:11px}
details.cand{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 12px;
  border-left:6px solid var(--soft)}
details.cand.g-good{border-left-color:var(--good)}details.cand.g-bad{border-left-color:var(--diverged)}
details.cand.g-warn{border-left-color:var(--warn)}
details.cand>summary{padding:11px 16px;color:var(--ink);font-size:13.5px;list-style-position:inside}
details.cand>summary h3{display:inline;margin:0 8px 0 2px;font-size:15px;color:var(--ink)}
details.cand>.in{padding:0 18px 16px}
.in h4{font-size:13px;margin:16px 0 3px;color:var(--ink);font-weight:650}
.in h5 .note{font-weight:400}
.in h5{font-size:12px;margin:8px 0 2px;color:var(--soft);font-weight:600}
code{font:12px ui-monospace,"SF Mono",Menlo,Consolas,monospace;background:var(--band);border-radius:4px;padding:1px 5px;
  overflow-wrap:anywhere}
table.heat{width:auto;border-collapse:separate;border-spacing:1px;font-size:10.5px}
table.heat th{border:0;padding:1px 5px;font-weight:500}
table.heat th[scope=row]{font-family:ui-monospace,monospace;font-size:11px;color:var(--ink);white-space:nowrap}
table.heat th[scope=col]{text-align:center;white-space:nowrap}
table.heat td{border:0;padding:0 3px;min-width:32px;height:20px;text-align:center;vertical-align:middle;
  border-radius:3px;white-space:nowrap;color:var(--on-light)}
.dense td{min-width:15px!important;padding:0 1px!important}
.h-equal{background:var(--equal-cell);color:var(--soft)!important}.h-none{background:var(--missing);color:var(--card)!important}
.h-unjudged{background:var(--band);color:var(--soft)!important}
.h-in1,.h-in2{color:var(--ink)!important}.h-in1{background:var(--in1)}.h-in2{background:var(--in2)}
.h-in3{background:var(--in3)}.h-in4{background:var(--in4)}
.h-out1{background:var(--out1);font-weight:700}.h-out2{background:var(--out2);font-weight:700}
.h-out3{background:var(--out3);font-weight:700;color:var(--on-dark)!important}
@media screen and (prefers-color-scheme:dark){.h-in3,.h-in4{color:var(--on-dark)!important}
  .h-out3{color:var(--on-light)!important}}
.h-first{outline:2.5px solid var(--ink);outline-offset:-2px}
table.rows tr:last-child th{border-bottom:0}
.legend{display:flex;flex-wrap:wrap;gap:3px 14px;font-size:11.5px;color:var(--soft);margin:5px 0 2px}
.legend i{display:inline-block;width:22px;height:13px;border-radius:3px;vertical-align:-2px;margin-right:5px}
.maps{display:flex;flex-wrap:wrap;gap:2px 30px}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(370px,1fr));gap:6px 16px}
svg.curve{width:100%;height:auto;display:block}
.curve text{font:10px system-ui,sans-serif;fill:var(--soft)}.curve .name{font-size:12px;font-weight:600;fill:var(--ink)}
.curve .axis{stroke:var(--line)}.curve .a{stroke:var(--base);stroke-width:3;fill:none}
.curve .b{stroke:var(--candidate);stroke-width:1.7;stroke-dasharray:2 3;fill:none}
.curve .d{fill:var(--tolerance)}.curve .x{fill:var(--diverged)}
.curve .bound{stroke:var(--ink);stroke-dasharray:5 3}
.curve .fa{fill:var(--base)}.curve .fb{fill:var(--candidate)}
.bar{display:inline-block;height:11px;background:var(--tolerance);border-radius:2px;min-width:1px}
.turn{border-left:3px solid var(--line);padding:1px 0 1px 10px;margin:5px 0}
.turn.resp{border-left-color:var(--tolerance)}
.turn p{font:12px/1.75 ui-monospace,"SF Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere;margin:0;
  white-space:pre-wrap}
.sr{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}.chip{position:relative}
mark{color:inherit;border-radius:3px;padding:1px 2px}.m1{background:var(--mark1)}.m2{background:var(--mark2)}
.m3{background:var(--mark3)}.m4{background:var(--mark4)}
@media not print{.m3,.m4{color:var(--ink)}}
mark.worst{outline:2px solid var(--ink);font-weight:700}
@media print{details.cand{break-inside:auto}details.cand>summary{break-after:avoid}h4,h5{break-after:avoid}
  .turn,svg.curve{break-inside:avoid}
  details.cand::details-content{content-visibility:visible!important;display:block!important;height:auto!important}}
"""
)

SCRIPT = """
(function () {
  const all = () => Array.from(document.querySelectorAll("details.cand"));
  function show() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  }
  let closed = [];
  window.addEventListener("hashchange", show);
  window.addEventListener("beforeprint", () => {
    closed = all().filter(item => !item.open);
    closed.forEach(item => { item.open = true; });
  });
  window.addEventListener("afterprint", () => closed.forEach(item => { item.open = false; }));
  show();
})();
"""
