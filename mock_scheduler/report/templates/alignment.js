(function () {
  const all = () => Array.from(document.querySelectorAll("details.cand"));
  function show() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let item = target; item; item = item.parentElement) if (item.tagName === "DETAILS") item.open = true;
    target.scrollIntoView();
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
