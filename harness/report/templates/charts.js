// Unpacks the chart library, and draws the figures from the JSON beside them in the page's colours: light, dark, print.
const figures = {};
const page = document.documentElement;
const runId = page.dataset.run;
// The chart library would offer to upload a figure's data; nothing leaves this page. The buttons above each figure
// take the place of its tool bar, whose buttons the keyboard would have to pass.
const settings = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: false };
const ON_PAPER = { ink: "#1c2126", line: "#d6dce2", page: "#ffffff" };
const LOG_STEPS = [1, 2, 5];
const axesOf = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));

async function unpacked(id, read = "text") {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")))[read]();
}

function saveFile(name, content) {
  const link = document.createElement("a");
  const url = typeof content === "string" ? content : URL.createObjectURL(content);
  Object.assign(link, { download: name, href: url });
  link.click();
  if (typeof content !== "string") setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function themed() {
  const style = getComputedStyle(page);
  const named = (name) => style.getPropertyValue(name).trim();
  return { ink: named("--ink"), line: named("--line"), page: named("--page") };
}

function colours(layout, { ink, line, page: ground } = themed()) {
  const change = { "font.color": ink, "hoverlabel.bgcolor": ground, "hoverlabel.font.color": ink };
  for (const axis of axesOf(layout)) {
    for (const part of ["gridcolor", "zerolinecolor", "linecolor"]) change[`${axis}.${part}`] = line;
    change[`${axis}.color`] = ink;
  }
  return change;
}

// Whole numbers at 1, 2 and 5 of every decade in sight: the library's own labels are a bare "2" or "5" in between.
function logTicks([low, high]) {
  const decades = high - low;
  const steps = decades > 6 ? [1] : decades > 2.5 ? [1, 3] : decades > 0.7 ? LOG_STEPS : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const step of steps) found.push(Number((step * 10 ** power).toPrecision(3)));
  }
  return found.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
}

function ticksOf(plot) {
  const change = {};
  for (const name of axesOf(plot.layout)) {
    const axis = plot._fullLayout[name];
    if (!axis || axis.type !== "log" || plot.ownTicks.includes(name)) continue;
    const values = logTicks(axis.range);
    if (values.length < 2) {
      if (plot.layout[name].tickmode === "array") change[`${name}.tickmode`] = "auto";
      continue;
    }
    if (String(plot.layout[name].tickvals) === String(values)) continue;
    change[`${name}.tickmode`] = "array";
    change[`${name}.tickvals`] = values;
    change[`${name}.ticktext`] = values.map((value) => value.toLocaleString("en-US", { maximumSignificantDigits: 3 }));
  }
  if (Object.keys(change).length) Plotly.relayout(plot, change);
}

async function draw(source) {
  const { data, layout } = JSON.parse(source.textContent);
  const plot = document.getElementById(source.dataset.figure);
  figures[plot.id] = plot;
  // Axes whose labels the figure sets itself, and those that its switch turns: its first vertical one, and all that
  // begin as logarithms.
  plot.ownTicks = axesOf(layout).filter((name) => layout[name].tickmode === "array");
  plot.scales = axesOf(layout).filter((name) => layout[name].type === "log");
  if (!plot.scales.some((name) => name.startsWith("y"))) plot.scales.push("yaxis");
  await Plotly.newPlot(plot, data, layout, settings);
  await Plotly.relayout(plot, colours(plot.layout));
  ticksOf(plot);
  plot.on("plotly_relayout", () => ticksOf(plot));
  plot.on("plotly_click", ({ points: [point] }) => point && showRequest(point.customdata));
  plot.dataset.drawn = "yes";
}

// A dot of one of the slowest requests carries that request's place in their table.
function showRequest(place) {
  const row = document.getElementById(`slow-${Array.isArray(place) ? place[0] : place}`);
  if (!row) return;
  for (let box = row.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  for (const marked of document.querySelectorAll("tr.marked")) marked.classList.remove("marked");
  row.classList.add("marked");
  row.scrollIntoView({ block: "center" });
  row.focus({ preventScroll: true });
}

const isClosed = (element) => Boolean(element.closest("details:not([open])"));

async function drawAll(sources) {
  for (const source of sources) {
    const plot = document.getElementById(source.dataset.figure);
    if (plot.dataset.drawn || isClosed(plot)) continue;
    plot.dataset.drawn = "begun";
    await draw(source);
    // The page shows one figure before the next is computed.
    await new Promise((done) => setTimeout(done));
  }
}

function setScale(plot, type) {
  const change = {};
  for (const axis of plot.scales) {
    change[`${axis}.type`] = type;
    change[`${axis}.autorange`] = true;
    // Values of a sweep that stand apart as logarithms overlap on a linear axis.
    const own = plot.ownTicks.includes(axis) && type === "log";
    change[`${axis}.tickmode`] = own ? "array" : "auto";
    if (!plot.ownTicks.includes(axis)) change[`${axis}.tickvals`] = change[`${axis}.ticktext`] = null;
  }
  // Panels share their first axis' scale.
  for (const axis of axesOf(plot.layout)) {
    const first = plot.layout[axis].matches;
    if (first && plot.scales.includes(first.replace(/^([xy])/, "$1axis"))) {
      change[`${axis}.type`] = type;
      change[`${axis}.autorange`] = true;
    }
  }
  return Plotly.relayout(plot, change);
}

for (const group of document.querySelectorAll("[data-scales]")) {
  const buttons = group.querySelectorAll("button");
  const press = (type) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.scale === type)));
  press(group.dataset.scales);
  for (const button of buttons) {
    button.addEventListener("click", async () => {
      press(button.dataset.scale);
      await setScale(figures[group.dataset.of], button.dataset.scale);
    });
  }
}

// A picture that leaves the page stands alone: on white, with its title, its caption and the run that it is of.
async function exported(plot, format) {
  const box = plot.closest("figure");
  const words = (name) => box.querySelector(name).textContent.trim().replace(/\s+/g, " ");
  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const short = (text, limit) => (text.length > limit ? `${text.slice(0, limit - 1)}…` : text);
  const height = plot._fullLayout.height + 70;
  const layout = structuredClone(plot.layout);
  const set = (path, value) => {
    const [last, ...parts] = path.split(".").reverse();
    parts.reverse().reduce((at, part) => (at[part] ??= {}), layout)[last] = value;
  };
  for (const [path, value] of Object.entries(colours(layout, ON_PAPER))) set(path, value);
  const title = `<b>${escape(words("h2"))}</b><br><sub>${escape(short(words(".caption"), 150))}</sub>`;
  const below = `<br><sub>${escape(runId)}</sub>`;
  Object.assign(layout, { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", height, width: 1100, autosize: false });
  layout.margin = { ...layout.margin, t: (layout.margin?.t ?? 56) + 70 };
  layout.title = { text: title + below, x: 0.01, xanchor: "left", yref: "container", y: 0.99, yanchor: "top",
    font: { size: 16, color: ON_PAPER.ink } };
  if (layout.legend) layout.legend.y = 1 - 75 / height;
  return Plotly.toImage({ data: plot.data, layout, config: settings }, { format, width: 1100, height, scale: 2 });
}

for (const button of document.querySelectorAll("button[data-export]")) {
  button.addEventListener("click", async () => {
    const plot = figures[button.dataset.of];
    saveFile(`${runId}-${plot.id}.${button.dataset.export}`, await exported(plot, button.dataset.export));
  });
}

function recolour() {
  for (const plot of Object.values(figures)) if (plot.data) Plotly.relayout(plot, colours(plot.layout));
}

async function begin() {
  const sources = [...document.querySelectorAll("script[data-figure]")];
  if (typeof DecompressionStream === "undefined") {
    const text = "This browser is too old to unpack the charts (it needs one of 2023 or later); the tables hold their numbers.";
    for (const box of document.querySelectorAll(".plot")) box.textContent = text;
    return;
  }
  const script = document.createElement("script");
  script.textContent = await unpacked("chart-library");
  document.head.append(script);
  for (const box of document.querySelectorAll("details")) box.addEventListener("toggle", () => drawAll(sources));
  addEventListener("beforeprint", () => {
    for (const box of document.querySelectorAll("details")) box.open = true;
    drawAll(sources);
  });
  await drawAll(sources);
  page.dataset.charts = "drawn";
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
matchMedia("print").addEventListener("change", recolour);
begin();
