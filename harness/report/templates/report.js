// Draws the figures from the JSON beside them, in the page's colours: light, dark or print.
const figures = {};
// The chart library would offer to upload a figure's data; nothing leaves this page.
const settings = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

function themed() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  return { ink, line, page: style.getPropertyValue("--page").trim() };
}

function colours(layout) {
  const { ink, line, page } = themed();
  const change = { "font.color": ink, "hoverlabel.bgcolor": page, "hoverlabel.font.color": ink };
  for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    change[axis + ".gridcolor"] = line;
    change[axis + ".zerolinecolor"] = line;
    change[axis + ".linecolor"] = line;
    change[axis + ".color"] = ink;
  }
  return change;
}

for (const source of document.querySelectorAll("script[data-figure]")) {
  const { data, layout } = JSON.parse(source.textContent);
  const plot = document.getElementById(source.dataset.figure);
  figures[source.dataset.figure] = plot;
  Plotly.newPlot(plot, data, layout, settings)
    .then(() => Plotly.relayout(plot, colours(plot.layout)));
}

for (const button of document.querySelectorAll("button[data-toggle]")) {
  button.addEventListener("click", () => {
    const plot = figures[button.dataset.toggle];
    const type = plot.layout.yaxis.type === "log" ? "linear" : "log";
    const change = {};
    // Panels share the first axis; one that does not match it, as that of requests in flight, stays as it is.
    for (const axis of Object.keys(plot.layout).filter((key) => /^yaxis/.test(key))) {
      if (axis !== "yaxis" && plot.layout[axis].matches !== "y") continue;
      change[axis + ".type"] = type;
      change[axis + ".autorange"] = true;
    }
    Plotly.relayout(plot, change);
  });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const [head] = table.tHead.rows;
  for (const heading of head.cells) {
    heading.addEventListener("click", () => {
      const up = heading.dataset.sorted !== "up";
      for (const other of head.cells) delete other.dataset.sorted;
      heading.dataset.sorted = up ? "up" : "down";
      const text = (row) => row.cells[heading.cellIndex].textContent;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (up ? 1 : -1) * (text(a) - text(b) || text(a).localeCompare(text(b))));
      table.tBodies[0].append(...rows);
    });
  }
}

function recolour() {
  for (const plot of Object.values(figures)) Plotly.relayout(plot, colours(plot.layout));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
matchMedia("print").addEventListener("change", recolour);
