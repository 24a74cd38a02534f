// Tables that sort by keyboard, filter, and leave the page as CSV or Markdown.
const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
const UNITS = { ...SIZES, "%": 0.01, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };
const FILTER_FROM = 8;

// '1,234', '29.5 ms', '1.44 ± 0.2 s', '46.7 (40–90) ms', '12 GiB/s', '+3.1 %': the first number, in its base unit; null for
// '–' and for words.
function amount(text) {
  const match = /^[~≥≤<>]?\s*([+\-−]?)(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?:±\s*[\d.,]+\s*|\([^)]*\)\s*)?\*?([^\s\d/*,;()]*)/i.exec(text);
  if (!match) return null;
  const size = Number(match[2].replaceAll(",", "")) * (UNITS[match[3]] ?? 1);
  return match[1] === "-" || match[1] === "−" ? -size : size;
}

const textOf = (cell) => (cell.dataset.value ?? cell.innerText ?? cell.textContent).trim().replace(/\s+/g, " ");

// Numbers before words; what is missing comes last, whichever way the table is sorted.
function inOrder(a, b, up) {
  const [left, right] = [amount(a), amount(b)];
  const missing = (text) => text === "" || text === "–" || text === "not reported";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const way = up ? 1 : -1;
  if (left !== null && right !== null) return way * (left - right) || way * a.localeCompare(b);
  if (left === null && right === null) return way * a.localeCompare(b, "en", { numeric: true });
  return left === null ? 1 : -1;
}

function sortBy(table, heading) {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map((row) => [textOf(row.cells[heading.cellIndex]), row]);
  rows.sort(([a], [b]) => inOrder(a, b, up));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function makeSortable(table) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...heading.childNodes);
    // The keyboard rests on the button: it carries the term's meaning, for screen readers as well.
    if (heading.title) {
      button.title = heading.title;
      heading.removeAttribute("title");
    }
    heading.append(button);
    button.addEventListener("click", () => sortBy(table, heading));
  }
}

const shownRows = (table) => [...table.tBodies[0].rows].filter((row) => !row.hidden);
const headings = (table) => [...table.tHead.rows[0].cells].map(textOf);
const lines = (table) => [headings(table), ...shownRows(table).map((row) => [...row.cells].map(textOf))];
const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csv = (table) => lines(table).map((line) => line.map(quoted).join(",")).join("\n") + "\n";

function markdown(table) {
  const [head, ...body] = lines(table).map((line) => `| ${line.map((text) => text.replaceAll("|", "\\|")).join(" | ")} |`);
  return [head, `|${"---|".repeat(headings(table).length)}`, ...body].join("\n") + "\n";
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from a file or over plain HTTP may not have the clipboard; the older way needs a selection.
    const box = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

function said(button, text) {
  const label = button.textContent;
  button.textContent = text;
  setTimeout(() => (button.textContent = label), 1500);
}

function tool(text, action) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => action(button));
  return button;
}

function addFilter(tools, table, name) {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "words to keep" });
  const count = Object.assign(document.createElement("span"), { className: "soft" });
  count.setAttribute("role", "status");
  label.append("filter ", input);
  input.setAttribute("aria-label", `filter the lines of ${name}`);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = words.length ? `${shownRows(table).length} of ${table.tBodies[0].rows.length} lines` : "";
  });
  tools.append(label, count);
}

for (const table of document.querySelectorAll("table[data-name]")) {
  const { name } = table.dataset;
  const tools = Object.assign(document.createElement("div"), { className: "tools" });
  if (table.tBodies[0].rows.length > 1) makeSortable(table);
  if (table.tBodies[0].rows.length >= FILTER_FROM) addFilter(tools, table, name);
  tools.append(
    tool("copy as Markdown", async (button) => {
      await copyText(markdown(table));
      said(button, "copied");
    }),
    tool("CSV", () => saveFile(`${runId}-${name}.csv`, new Blob([csv(table)], { type: "text/csv" }))),
  );
  table.closest(".scroll").before(tools);
}

for (const button of document.querySelectorAll("button[data-download]")) {
  button.addEventListener("click", async () => {
    saveFile(button.dataset.download, await unpacked(button.dataset.of, "blob"));
  });
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    await copyText(document.getElementById(button.dataset.copy).innerText);
    said(button, "copied");
  });
}
