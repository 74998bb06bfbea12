"""The page in a browser, opened from its file: figures load, the table sorts and filters, hostile text is text."""

import json

import pytest

from reinforce_ada_jax import plot
from tests.browser import browser, needs_browser
from tests.plotted import make_run, sample, write_samples
from tests.reporting.test_page import HOSTILE

pytestmark = [pytest.mark.browser, needs_browser]
NUM_PLAIN = 60
CHOOSE = """
    const control = document.getElementById(arguments[0]);
    control.value = arguments[1];
    control.dispatchEvent(new Event("input", {bubbles: true}));
"""
CELLS = "return [...document.querySelectorAll('#table tbody tr')].map(row => row.cells[arguments[0]].innerText)"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A browser with the page of two runs open: 60 plain responses and a hostile one."""
    folder = tmp_path_factory.mktemp("report")
    lines = [
        sample(f"problem {i}", f"answer {i}", tokens=i, correct=i % 2 == 0, reward=float(i % 2 == 0),
               reason="no_answer" if i == 7 else "", advantage=None if i == 3 else 0.25, truncated=i == 9)
        for i in range(NUM_PLAIN)
    ]  # fmt: skip
    hostile = make_run(folder / "<script>hacked=1<script>", [100, 100], {0: 0.2, 2: 0.5}, config={"note": HOSTILE})
    write_samples(hostile, 2, [sample(HOSTILE, HOSTILE, tokens=1000, answer=HOSTILE, reason=HOSTILE)])
    plain = make_run(folder / "plain", [100, 100], {0: 0.2, 2: 0.7})
    write_samples(plain, 1, lines)
    plot.main([plain, hostile], folder / "out")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(folder / "out" / "index.html")
        yield opened


@pytest.fixture(autouse=True)
def fresh(window):
    """Each test begins with the page as it is opened, and ends without a word on the console."""
    window.reload()
    yield
    assert window.console() == []
    assert window.run("return window.hacked === undefined")


def count(window):
    return window.run("return document.getElementById('count').innerText")


def test_figures_load(window):
    sizes = window.run(
        "return [...document.images].map(image => [image.currentSrc.split('/').pop(), image.naturalWidth])"
    )
    assert [name for name, _ in sizes] == ["learning.svg", "signal.svg"]
    assert all(width > 500 for _, width in sizes)


def test_a_click_on_a_header_sorts(window):
    headers = window.run("return [...document.querySelectorAll('#table thead th')].map(cell => cell.innerText)")
    tokens = headers.index("Tokens")
    header = f"#table thead th:nth-child({tokens + 1})"
    window.click(f"{header} button")
    assert window.run(CELLS, tokens)[:4] == ["0", "1", "2", "3"]
    assert window.run("return document.querySelector(arguments[0]).ariaSort", header) == "ascending"
    window.click(f"{header} button")
    assert window.run(CELLS, tokens)[:3] == ["1,000", "59", "58"]
    assert window.run("return document.querySelectorAll('#table [aria-sort=descending]').length") == 1


def test_filters(window):
    assert count(window) == "1 to 25 of 61 responses"
    window.type("#filter-text", "ANSWER 1")
    assert count(window) == "1 to 11 of 11 that match, of 61 responses"  # 1 and 10 to 19
    window.click("button[type=reset]")
    for control, value, matching in (
        ("filter-verdict", "right", 31), ("filter-verdict", "reason:no_answer", 1), ("filter-verdict", "truncated", 1),
        ("filter-verdict", "", 61), ("filter-kept", "left", 1), ("filter-kept", "", 61),
        ("filter-iteration", "1", 60), ("filter-run", "1", 0),
    ):  # fmt: skip
        window.run(CHOOSE, control, value)
        if matching:
            assert f" of {matching} " in count(window), (control, value)
    assert count(window) == "No response matches; there are 61 on this page."


def test_pages(window):
    window.click("#next")
    assert count(window) == "26 to 50 of 61 responses"
    window.click("#next")
    assert window.run("return document.getElementById('next').disabled") is True
    assert window.run("return document.getElementById('page').innerText") == "Page 3 of 3"


def test_hostile_text_is_shown_as_it_was_written(window):
    window.click("#table .read")  # of the newest iteration: the hostile one stands first
    # Compared there: on its way here half a character would be lost.
    same = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent === JSON.parse(arguments[1]))"
    assert window.run(same, "#table .whole pre", json.dumps(HOSTILE)) == [True] * 3  # problem, answer, response
    assert window.run(same, "#table tbody tr:first-child .note", json.dumps(HOSTILE)) == [True]  # the reason
    assert window.run("return document.scripts.length") == 2
    assert window.run("return document.querySelector('h1').textContent") == "plain, <script>hacked=1<script>"
    cells = "return [...document.querySelectorAll('.configuration tr')].map(row => row.cells[0].textContent)"
    place = window.run(cells).index("note")
    value = "return document.querySelectorAll('.configuration tr')[arguments[0]].cells[2].textContent.slice(0, 90)"
    assert window.run(value, place) == json.dumps(HOSTILE, ensure_ascii=False)[:90]


def test_the_page_fits_wide_and_narrow_screens(window):
    fits = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    try:
        for width in (1920, 1280, 1000, 390):
            screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
            window.devtools("Emulation.setDeviceMetricsOverride", screen)
            assert window.run(fits), width
        labels = window.run(
            "return [...document.querySelector('#table tbody tr').cells].map(cell => cell.dataset.label)"
        )
        assert {"Problem", "Boxed", "Verdict", "Advantage"} <= set(labels)
    finally:
        window.devtools("Emulation.clearDeviceMetricsOverride", {})
