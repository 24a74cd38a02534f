"""What a reader meets: each kind of page in headless Chromium, wide and narrow, light and dark.

`pytest -s tests/browser` prints each page's size and the time until its first chart.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.report.words import UNKNOWN
from tests.browser.conftest import MAKERS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PageOf = Callable[[str], Path]
DRAWN_MS = 60_000
LARGEST_BYTES, LARGEST_OF_100_000_ROWS = 1_500_000, 5_000_000

# Pairs of texts in one chart that lie on each other: labels of an axis, titles of panels, the legend.
OVERLAPS = """() => {
  const found = [];
  for (const plot of document.querySelectorAll(".plot[data-drawn=yes]")) {
    const boxes = (selector) => [...plot.querySelectorAll(selector)]
      .map((node) => [node.textContent, node.getBoundingClientRect()]).filter(([, box]) => box.width);
    const beside = (a, b) => a.right <= b.left + 2 || b.right <= a.left + 2;
    const apart = (a, b) => beside(a, b) || a.bottom <= b.top + 2 || b.bottom <= a.top + 2;
    const pair = ([text, box], [other, second]) => {
      if (!apart(box, second)) found.push(`${plot.id}: ${text} / ${other}`);
    };
    const among = (ones) => ones.forEach((one, n) => ones.slice(n + 1).forEach((other) => pair(one, other)));
    // Slanted labels have boxes that overlap where their letters do not.
    const flat = (selector) => boxes(selector).filter(([, box]) => box.height < 20);
    for (const selector of [".xtick text", ".ytick text"]) among(flat(selector));
    const titles = boxes(".annotation-text");
    among(titles);
    for (const title of titles) for (const legend of boxes("g.legend")) pair(title, legend);
  }
  return found;
}"""


class Visit:
    """A page that is open, and what the console said."""

    def __init__(self, browser: Browser, path: Path, width: int = 1120, scheme: Any = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.said.append(r.url)
        )
        began = time.perf_counter()
        self.page.goto(path.as_uri())
        if self.page.locator(".plot").count():
            self.page.wait_for_selector(
                ".plot[data-drawn=yes], details:not([open]) .plot", state="attached", timeout=DRAWN_MS
            )
        self.first_chart_s = time.perf_counter() - began
        self.page.wait_for_selector("html[data-charts=drawn]", state="attached", timeout=DRAWN_MS)

    def open_all(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach((box) => (box.open = true))")
        self.page.wait_for_function(
            "[...document.querySelectorAll('.plot')].every((plot) => plot.dataset.drawn === 'yes')", timeout=DRAWN_MS
        )


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    opened: list[Visit] = []

    def go(path: Path, *args: Any) -> Visit:
        opened.append(Visit(browser, path, *args))
        return opened[-1]

    yield go
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_page_is_quiet_small_and_accessible(kind: str, page_of: PageOf, visit: Callable[..., Visit]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    path = page_of(kind)
    wide = visit(path)
    wide.open_all()
    size = path.stat().st_size
    print(f"\n{kind}: {size / 1e6:.2f} MB, first chart after {wide.first_chart_s:.1f} s")
    assert size <= (LARGEST_OF_100_000_ROWS if kind == "cluster" else LARGEST_BYTES)
    assert wide.page.evaluate(OVERLAPS) == []
    serious = [
        (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in Axe().run(wide.page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert wide.said == []


@pytest.mark.parametrize("kind", MAKERS)
def test_a_page_fits_a_telephone_in_the_dark(kind: str, page_of: PageOf, visit: Callable[..., Visit]) -> None:
    narrow = visit(page_of(kind), 400, "dark")
    narrow.open_all()
    assert narrow.page.evaluate("document.documentElement.scrollWidth") <= 400
    # A word of a table of facts has room: no column of single letters.
    assert (
        narrow.page.evaluate(
            "Math.min(...[...document.querySelectorAll('table.pairs td')].map((cell) => cell.offsetWidth))"
        )
        > 120
    )
    assert narrow.said == []


def test_a_table_sorts_by_keyboard_and_knows_its_numbers(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    page = visit(page_of("two axes")).page
    heading = page.locator("table[data-name=ttft] th", has_text="mean")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    read = "[...document.querySelectorAll('table[data-name=ttft] tbody tr')].map((row) => row.cells[3].textContent)"
    means = [_seconds(text) for text in page.evaluate(read)]
    assert len(means) == 150 and means == sorted(means) and means[0] < 0.1 < 1 < means[-1]
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert [_seconds(text) for text in page.evaluate(read)] == sorted(means, reverse=True)


def _seconds(text: str) -> float:
    number, unit = text.split()[0], text.split()[-1]
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_what_is_missing_sorts_last_and_thousands_are_numbers(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    page = visit(page_of("demo")).page
    sort = "(texts) => [true, false].map((up) => [...texts].sort((a, b) => inOrder(a, b, up)))"
    texts = [UNKNOWN, "1,234", "99 ms", f"46 (40{UNKNOWN}90) ms", "word", "5", "2.5 ± 9 s", "not reported"]
    up, down = page.evaluate(sort, texts)
    numbers = [f"46 (40{UNKNOWN}90) ms", "99 ms", "2.5 ± 9 s", "5", "1,234"]
    assert up == [*numbers, "word", UNKNOWN, "not reported"]
    assert down == [*reversed(numbers), "word", UNKNOWN, "not reported"]


def test_a_table_filters_and_leaves_as_csv_and_markdown(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    here = visit(page_of("two axes"))
    here.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, section = here.page, here.page.locator("#figures")
    section.locator("input[type=search]").first.fill("hit_rate=0.5 disk")
    assert section.locator("[role=status]").first.text_content() == "10 of 150 lines"
    with page.expect_download() as saved:
        section.get_by_role("button", name="CSV").first.click()
    lines = list(csv.reader(Path(saved.value.path()).read_text().splitlines()))
    assert lines[0][:3] == ["cell", "tier", "n"] and len(lines) == 11
    assert all(line[1] == "disk" for line in lines[1:])
    section.get_by_role("button", name="copy as Markdown").first.click()
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0].startswith("| cell | tier | n |") and copied[1].startswith("|---|") and len(copied) == 12


def test_every_request_leaves_as_csv(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    page = visit(page_of("demo")).page
    with page.expect_download() as saved:
        page.get_by_role("button", name="requests as CSV").click()
    lines = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    run_id = page.evaluate("document.documentElement.dataset.run")
    assert saved.value.suggested_filename == f"{run_id}-requests.csv"
    assert {line["expected_tier"] for line in lines} >= {"recompute", "gpu"}
    assert all(float(line["ttft_s"]) > 0 for line in lines)


def test_a_chart_leaves_as_a_picture_on_white_with_its_title_and_run(
    page_of: PageOf, visit: Callable[..., Visit]
) -> None:
    page = visit(page_of("demo"), 1120, "dark").page
    run_id = page.evaluate("document.documentElement.dataset.run")
    with page.expect_download() as saved:
        page.locator("button[data-export=png]").first.click()
    assert saved.value.suggested_filename == f"{run_id}-ttft.png"
    picture = Path(saved.value.path()).read_bytes()
    assert picture.startswith(b"\x89PNG")
    corner = page.evaluate(
        """async (bytes) => {
          const picture = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
          const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
          canvas.drawImage(picture, 0, 0);
          return [...canvas.getImageData(2, 2, 1, 1).data];
        }""",
        list(picture),
    )
    assert corner == [255, 255, 255, 255]
    with page.expect_download() as saved:
        page.locator("button[data-export=svg]").first.click()
    text = Path(saved.value.path()).read_text()
    assert "TTFT by tier" in text and run_id in text


def test_the_scale_s_button_says_which_is_on_and_turns_both_axes(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    page = visit(page_of("one axis")).page
    group = page.locator("[data-of=ttft][data-scales]")
    pressed = "(group) => [...group.querySelectorAll('button')].map((button) => button.getAttribute('aria-pressed'))"
    types = "() => ['xaxis', 'yaxis'].map((name) => figures.ttft._fullLayout[name].type)"
    assert (group.evaluate(pressed), page.evaluate(types)) == (["true", "false"], ["log", "log"])
    group.get_by_role("button", name="linear").click()
    page.wait_for_function("figures.ttft._fullLayout.yaxis.type === 'linear'")
    assert (group.evaluate(pressed), page.evaluate(types)) == (["false", "true"], ["linear", "linear"])
    group.get_by_role("button", name="log").click()
    page.wait_for_function("figures.ttft._fullLayout.yaxis.type === 'log'")
    labels = page.locator("#ttft .ytick text").all_text_contents()
    assert all(float(label.replace(",", "")) >= 20 for label in labels) and len(labels) >= 4


def test_a_slow_dot_leads_to_its_line(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    here = visit(page_of("one axis"))
    here.open_all()
    here.page.evaluate("document.getElementById('slowest').open = false")
    here.page.evaluate("figures.timeline.emit('plotly_click', { points: [{ customdata: 0 }] })")
    row = here.page.locator("tr.marked")
    assert row.count() == 1 and row.is_visible()
    assert row.locator("th").text_content() == here.page.locator("#slow-0 th").text_content()
    assert here.page.evaluate("document.activeElement.id") == "slow-0"


def test_print_opens_what_is_collapsed(page_of: PageOf, visit: Callable[..., Visit]) -> None:
    page = visit(page_of("demo")).page
    assert page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.locator(".tools:visible").count() == 0
    assert page.locator(".dot").first.evaluate("(dot) => getComputedStyle(dot).printColorAdjust") == "exact"
