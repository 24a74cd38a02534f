"""What a reader meets: each kind of page in headless Chromium, wide and narrow, light and dark.

`pytest -s tests/browser`, or `-rA`, prints each page's size and the time until its first chart.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.report.glossary import meaning_of
from harness.report.live import LivePage
from harness.report.words import UNKNOWN
from tests.browser.conftest import MAKERS, Folders

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAWN_MS = 60_000
# The default asks with each frame, so that a core draws nothing but frames.
POLL_MS = 100
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


# Charts follow the window's width a moment later; one that is wider than its window scrolls inside its box.
FITTED = """() => [...document.querySelectorAll(".plot[data-drawn=yes]")].every((plot) =>
  [...plot.querySelectorAll("svg.main-svg")].every(
    (svg) => svg.getBoundingClientRect().width <= plot.getBoundingClientRect().width + 1))"""
WIDE, NARROW = 1120, 400


class Visit:
    """The one page of this module, and what its console says. Each test opens a report in it anew."""

    def __init__(self, browser: Browser) -> None:
        self.context = browser.new_context()
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.first_chart_s = 0.0
        self._home = "file:"
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda r: None if self._own(r.url) else self.said.append(r.url))

    def _own(self, url: str) -> bool:
        return url.startswith((self._home, "data:", "blob:"))

    def open(self, target: Path | str, width: int = WIDE, scheme: Any = "light") -> None:
        """A file, or an address that only this page itself may be fetched from."""
        url = target if isinstance(target, str) else target.as_uri()
        self._home = url if isinstance(target, str) else "file:"
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme, media="screen")
        self.said.clear()
        began = time.perf_counter()
        self.page.goto(url)
        if self.page.locator(".plot").count():
            self.page.wait_for_selector(
                ".plot[data-drawn=yes], details:not([open]) .plot", state="attached", timeout=DRAWN_MS
            )
        self.first_chart_s = time.perf_counter() - began
        self.page.wait_for_selector("html[data-charts=drawn]", state="attached", timeout=DRAWN_MS)

    def narrow(self) -> None:
        """The same page on a telephone, in the dark."""
        self.page.emulate_media(color_scheme="dark")
        self.page.set_viewport_size({"width": NARROW, "height": 900})
        self.page.wait_for_function(FITTED, polling=POLL_MS, timeout=DRAWN_MS)

    def open_all(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach((box) => (box.open = true))")
        self.page.wait_for_function(
            "[...document.querySelectorAll('.plot')].every((plot) => plot.dataset.drawn === 'yes')",
            polling=POLL_MS,
            timeout=DRAWN_MS,
        )


@pytest.fixture(scope="module")
def only_visit(browser: Browser) -> Iterator[Visit]:
    visit = Visit(browser)
    yield visit
    visit.context.close()


@pytest.fixture
def visit(only_visit: Visit, folders: Folders) -> Callable[..., Visit]:
    """Opens a kind's page."""

    def go(kind: str, *how: Any) -> Visit:
        only_visit.open(folders.page(kind), *how)
        return only_visit

    return go


@pytest.mark.parametrize("kind", MAKERS)
def test_a_page_is_quiet_small_accessible_and_fits(kind: str, folders: Folders, visit: Callable[..., Visit]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    here = visit(kind)
    here.open_all()
    size = folders.page(kind).stat().st_size
    print(f"\n{kind}: {size / 1e6:.2f} MB, first chart after {here.first_chart_s:.1f} s")
    assert size <= (LARGEST_OF_100_000_ROWS if kind == "cluster" else LARGEST_BYTES)
    assert here.page.evaluate(OVERLAPS) == []
    serious = [
        (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in Axe().run(here.page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    here.narrow()
    _fits_a_telephone(here)


def _fits_a_telephone(here: Visit) -> None:
    assert here.page.evaluate("document.documentElement.scrollWidth") <= NARROW
    # A word of a table of facts has room: no column of single letters.
    widths = here.page.evaluate("[...document.querySelectorAll('table.pairs td')].map((cell) => cell.offsetWidth)")
    assert min(widths) > 120
    assert here.said == []


def test_the_last_state_of_a_live_page_is_the_finished_report(folders: Folders, only_visit: Visit) -> None:
    live = LivePage(folders.of("demo"), 0)
    again = only_visit.page.locator("meta[http-equiv=refresh]")
    with ThreadPoolExecutor(1) as pool:
        live.__enter__()
        try:
            only_visit.open(live.url, NARROW, "dark")
            assert again.count() == 1, "a growing page reloads itself"
        finally:
            # The run ends: its process waits until a browser that looks on has the finished page.
            ended = pool.submit(live.__exit__, None, None, None)
        while again.count():
            only_visit.open(live.url, NARROW, "dark")
        ended.result()
    only_visit.open_all()
    _fits_a_telephone(only_visit)


def test_a_table_sorts_by_keyboard_and_knows_its_numbers(visit: Callable[..., Visit]) -> None:
    page = visit("two axes").page
    heading = page.locator("table[data-name=ttft] th", has_text="mean")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    read = "[...document.querySelectorAll('table[data-name=ttft] tbody tr')].map((row) => row.cells[3].textContent)"
    means = [_seconds(text) for text in page.evaluate(read)]
    assert len(means) == 150 and means == sorted(means) and means[0] < 0.1 < 1 < means[-1]
    assert heading.locator("button").get_attribute("title") == meaning_of("mean ± 95 %")
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert [_seconds(text) for text in page.evaluate(read)] == sorted(means, reverse=True)


def _seconds(text: str) -> float:
    number, unit = text.split()[0], text.split()[-1]
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_what_is_missing_sorts_last_and_thousands_are_numbers(visit: Callable[..., Visit]) -> None:
    page = visit("demo").page
    sort = "(texts) => [true, false].map((up) => [...texts].sort((a, b) => inOrder(a, b, up)))"
    texts = [UNKNOWN, "1,234", "99 ms", f"46 (40{UNKNOWN}90) ms", "word", "5", "2.5 ± 9 s", "not reported"]
    up, down = page.evaluate(sort, texts)
    numbers = [f"46 (40{UNKNOWN}90) ms", "99 ms", "2.5 ± 9 s", "5", "1,234"]
    assert up == [*numbers, "word", UNKNOWN, "not reported"]
    assert down == [*reversed(numbers), "word", UNKNOWN, "not reported"]


def test_a_table_filters_and_leaves_as_csv_and_markdown(visit: Callable[..., Visit]) -> None:
    here = visit("two axes")
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


def test_every_request_leaves_as_csv(visit: Callable[..., Visit]) -> None:
    page = visit("demo").page
    with page.expect_download() as saved:
        page.get_by_role("button", name="requests as CSV").click()
    lines = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    run_id = page.evaluate("document.documentElement.dataset.run")
    assert saved.value.suggested_filename == f"{run_id}-requests.csv"
    assert {line["expected_tier"] for line in lines} >= {"recompute", "gpu"}
    assert all(float(line["ttft_s"]) > 0 for line in lines)


def test_a_chart_leaves_as_a_picture_on_white_with_its_title_and_run(visit: Callable[..., Visit]) -> None:
    page = visit("demo", WIDE, "dark").page
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


def test_the_scale_s_button_says_which_is_on_and_turns_both_axes(visit: Callable[..., Visit]) -> None:
    page = visit("one axis").page
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


def test_a_slow_dot_leads_to_its_line(visit: Callable[..., Visit]) -> None:
    here = visit("one axis")
    here.open_all()
    here.page.evaluate("document.getElementById('slowest').open = false")
    here.page.evaluate("figures.timeline.emit('plotly_click', { points: [{ customdata: 0 }] })")
    row = here.page.locator("tr.marked")
    assert row.count() == 1 and row.is_visible()
    assert row.locator("th").text_content() == here.page.locator("#slow-0 th").text_content()
    assert here.page.evaluate("document.activeElement.id") == "slow-0"


def test_print_opens_what_is_collapsed(visit: Callable[..., Visit]) -> None:
    page = visit("demo").page
    assert page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.locator(".tools:visible").count() == 0
    assert page.locator(".dot").first.evaluate("(dot) => getComputedStyle(dot).printColorAdjust") == "exact"


def test_all_cells_share_the_charts_by_round(visit: Callable[..., Visit]) -> None:
    page = visit("rounds").page
    names = ["cache=gpu only", "cache=GPU and CPU RAM", "cache=a pool of SSDs with a rather long…"]
    for chart in ("ttft-by-turn", "hits-by-turn"):
        page.locator(f"#{chart}[data-drawn=yes]").wait_for(timeout=DRAWN_MS)
        assert page.locator(f"#{chart} .legendtext").all_text_contents() == names
        assert page.locator(f"#{chart} .scatterlayer .trace").count() == 3
        assert page.locator(f"#{chart} .scatterlayer .trace").first.locator(".point").count() == 6
    bars = page.locator("#over-all .bartext").all_text_contents()
    # 1 + 2.5 turns + 4.5 / 20 sessions + the trials' 0, 2 and 3 / 50, on average; times 1, 0.7 and 0.4.
    assert bars[:3] == ["3.76 s", "2.63 s", "1.50 s"] and len(bars) == 6
    shown = page.locator("#against tbody tr").all_inner_texts()
    assert len(shown) == 2 and all("\N{MINUS SIGN}" in line and "3 and 3 trials" in line for line in shown)
