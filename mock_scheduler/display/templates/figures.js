// Draws the figures of the page and paints them anew whenever it turns light or dark, or is printed.
//
// Figures are plotly's JSON in #figures, without HTML: a colour is the name of one of the palette's ("theme:ink"),
// and a text may have several lines, of which the first is bold. Texts are escaped already.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const palette = JSON.parse(document.getElementById("palette").textContent);
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  function paintText(text, theme) {
    if (text.startsWith("theme:") && text.slice(6) in theme) return theme[text.slice(6)];
    const lines = text.split("\n");
    return lines.length === 1 ? text : [`<b>${lines[0]}</b>`, ...lines.slice(1)].join("<br>");
  }
  function paint(value, theme) {
    if (typeof value === "string") return paintText(value, theme);
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
  const drawOwn = () => draw(query.matches ? palette.dark : palette.light);
  query.addEventListener("change", drawOwn);
  window.addEventListener("beforeprint", () => draw(palette.light));
  window.addEventListener("afterprint", drawOwn);
  drawOwn();
})();
