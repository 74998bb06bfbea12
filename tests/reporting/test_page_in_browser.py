"""The page in a browser, opened from its file: curves, pools of responses, links to them; hostile text is text."""

import json

import pytest

from reinforce_ada_jax import plot
from tests.browser import browser, needs_browser
from tests.plotted import make_run, sample, write_samples
from tests.reporting.test_page import HOSTILE

# test_live.py has a page in the browser that is fast, test_page.py what is in it.
pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_browser]
NUM_PROMPTS = 30
GRAD_NORM = '[data-metric="update/grad_norm"]'
SIZES = ((1400, 900), (400, 800))
CHOOSE = """
    const control = document.getElementById(arguments[0]);
    control.value = arguments[1];
    control.dispatchEvent(new Event("input", {bubbles: true}));
"""
# Brings an element into sight; then it is drawn.
SEE = """
    document.querySelector(arguments[0]).scrollIntoView({block: "center"});
    return new Promise(done => setTimeout(done, 150));
"""
# The mouse at a share of the width of a metric's chart.
POINT = """
    const chart = document.querySelector(`[data-metric="${arguments[0]}"] .plot`);
    const box = chart.getBoundingClientRect(), x = box.left + arguments[1] * box.width;
    const at = {clientX: x, clientY: box.top + 50, bubbles: true, pointerType: "mouse"};
    chart.dispatchEvent(new PointerEvent("pointermove", at));
"""
LEGEND = """
    return [...document.querySelectorAll(`[data-metric="${arguments[0]}"] .legend li`)].map(entry => entry.innerText);
"""


# Elements beyond the right edge.
OVER = """
    return [...document.querySelectorAll("body *")].filter(e => !e.closest(".wide"))
      .filter(e => e.getBoundingClientRect().right > innerWidth)
      .map(e => e.tagName + "#" + e.id + "." + e.className).slice(0, 10);
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A browser with the page of two runs open: 30 prompts with two responses each, and a hostile one."""
    folder = tmp_path_factory.mktemp("report")
    lines = [
        sample(f"problem {i}", f"answer {i}" if draw else "the same", prompt=f"p{i}", draw=draw, tokens=i + 1,
               correct=(i + draw) % 2 == 0, reward=float((i + draw) % 2 == 0), reason="no_answer" if i == 7 else "",
               advantage=0.25 if draw else None, truncated=i == 9)
        for i in range(NUM_PROMPTS) for draw in range(2)
    ]  # fmt: skip
    metrics = {
        "update/grad_norm": [1.0, 10.0],
        "update/skipped": [0, 0],
        "time/collect_s": [2.0, 2.0],
        "update/own": [1, 2],
    }
    hostile = make_run(
        folder / "<script>hacked=1<script>", [100, 100], {0: 0.2, 2: 0.5}, config={"note": HOSTILE}, metrics=metrics
    )
    write_samples(hostile, 2, [sample(HOSTILE, HOSTILE, tokens=1000, answer=HOSTILE, reason=HOSTILE)])
    plain = make_run(folder / "plain", [100, 100], {0: 0.2, 2: 0.7}, metrics=metrics)
    write_samples(plain, 1, lines)
    verdicts = [{"draw": draw, "correct": draw < 3, "reward": float(draw < 3)} for draw in range(4)]
    write_samples(plain, 2, [sample("problem 3", "the same", prompt="p3", **verdict) for verdict in verdicts])
    plot.main([plain, hostile], folder / "out")
    moved = folder / "alone.html"
    (folder / "out" / "index.html").rename(moved)  # nothing beside it is needed
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.file = moved
        yield opened


def resize(window, width, height):
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    window.devtools("Emulation.setDeviceMetricsOverride", screen)


@pytest.fixture(autouse=True)
def fresh(window):
    """Each test begins with the page as it is opened, and ends without a word on the console."""
    resize(window, *SIZES[0])
    window.go("about:blank")
    window.open(window.file)
    yield
    assert window.console() == []
    assert window.run("return window.hacked === undefined")


def count(window):
    return window.run("return document.getElementById('count').innerText")


def texts(window, selector):
    return window.run("return [...document.querySelectorAll(arguments[0])].map(found => found.innerText)", selector)


# ---- curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_crosshair_shows_values_in_all_charts(window, size):
    resize(window, *size)
    window.run(SEE, GRAD_NORM)
    window.run(POINT, "update/grad_norm", 0.99)
    assert texts(window, '[data-metric="update/grad_norm"] .at') == ["updates 2"]
    assert window.run(LEGEND, "update/grad_norm") == ["plain\n5.5", "<script>hacked=1<script>\n5.5"]  # of 1 and 10
    window.run(POINT, "update/grad_norm", 0.6)
    assert window.run(LEGEND, "update/grad_norm")[0] == "plain\n1"
    # The chart beside it shows the same place: both are in sight on a wide screen.
    if size == SIZES[0]:
        assert texts(window, '[data-metric="reward/first_round"] .at') == ["updates 1"]
    window.run("document.querySelector('[data-metric=\"update/grad_norm\"] .plot').dispatchEvent(new Event('blur'))")
    assert window.run(LEGEND, "update/grad_norm")[0] == "plain\n5.5"


# A drag of the mouse over a part of the first chart.
DRAG = """
    const plot = document.querySelector("#overview .plot"), box = plot.getBoundingClientRect();
    const at = (type, share) => plot.dispatchEvent(new PointerEvent(type, {
      clientX: box.left + 46 + share * (box.width - 56), clientY: box.top + 50, bubbles: true, pointerType: "mouse"}));
    at("pointerdown", arguments[0]);
    at("pointermove", arguments[1]);
    const selected = document.querySelectorAll("#overview .selected").length;
    at("pointerup", arguments[1]);
    return selected;
"""
TICKS = (
    "return [...document.querySelectorAll(`#overview .below, #overview .end`)].map(text => Number(text.textContent))"
)


def test_a_drag_zooms_all_charts_and_a_double_click_shows_all(window):
    window.run(SEE, "#overview")
    assert max(window.run(TICKS)) == 2
    assert window.run(DRAG, 0.0, 0.01) == 0  # a click: 3 pixels
    assert max(window.run(TICKS)) == 2
    assert window.run(DRAG, 0.6, 0.1) == 1  # to the left, too
    ticks = window.run(TICKS)
    assert 0 < min(ticks) and max(ticks) <= 1.2
    window.run("document.querySelector('#overview .plot').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert max(window.run(TICKS)) == 2


def test_ticks_of_a_narrow_range_have_labels_that_differ(window):
    script = "return [labels([0.98912, 0.98914, 0.98916]), labels([0, 0.5, 1]), labels([12341, 12342])]"
    assert window.run(script) == [["0.98912", "0.98914", "0.98916"], ["0", "0.5", "1"], ["12.341k", "12.342k"]]


def test_a_phone_has_all_charts_on_a_page_of_few_screens(window, tmp_path):
    metrics = {f"{group}/metric_{i}": [i, i + 1] for group in ("update", "collection", "time") for i in range(25)}
    run = make_run(tmp_path / "run", [100, 100], {0: 0.2, 2: 0.7}, metrics=metrics)
    write_samples(run, 2, [sample(f"problem {i}", f"answer {i}", prompt=f"p{i}", tokens=9) for i in range(NUM_PROMPTS)])
    plot.main([run], tmp_path / "out")
    resize(window, 400, 800)
    window.open(tmp_path / "out" / "index.html")
    assert window.run("return document.documentElement.scrollHeight") < 10_000  # with all groups open: 25,000
    assert window.run("return document.querySelectorAll('#groups details:not([open])').length") == 3
    window.type("#find-metric", "update/metric_7")
    assert window.run("return document.querySelectorAll('#groups details[open]').length") == 1


def test_runs_are_switched_off_and_on(window):
    window.run(SEE, GRAD_NORM)
    window.click("#runs .chip[data-run='0']")
    assert window.run(LEGEND, "update/grad_norm") == ["<script>hacked=1<script>\n5.5"]
    assert window.run("return document.querySelector('.chip').ariaPressed") == "false"
    window.click("#runs .chip[data-run='0']")
    assert len(window.run(LEGEND, "update/grad_norm")) == 2


def test_scale_axis_and_smoothing(window):
    labels = '[data-metric="update/grad_norm"] .axis .left'
    window.run(SEE, GRAD_NORM)
    window.run(CHOOSE, "smoothing", "0")
    assert window.run(LEGEND, "update/grad_norm")[0] == "plain\n10"
    window.click("#scale [data-value=log]")
    shown = window.run("return [...document.querySelectorAll(arguments[0])].map(text => text.textContent)", labels)
    assert shown == ["1", "10"]
    window.click("#against [data-value=tokens]")
    window.run(POINT, "update/grad_norm", 0.99)
    assert texts(window, '[data-metric="update/grad_norm"] .at') == ["generated tokens 200"]
    window.click("#against [data-value=seconds]")
    window.run(POINT, "update/grad_norm", 0.99)
    assert texts(window, '[data-metric="update/grad_norm"] .at') == ["seconds 4"]


def test_all_metrics_and_search_among_them(window):
    shown = window.run("return [...document.querySelectorAll('figure.chart')].map(box => box.dataset.metric)")
    assert {"evaluation/heldout/avg", "reward/first_round", "update/grad_norm", "collection/zero_signal_share"} <= set(
        shown
    )
    # Two iterations have three rows at most: what never changed is in a table.
    window.run("document.querySelector('#constant').open = true")
    assert "update/skipped" in window.run("return document.querySelector('#constant').innerText")
    groups = "return [...document.querySelectorAll('#groups figure')].filter(box => !box.hidden).length"
    assert window.run(groups) == 1  # update/own
    window.type("#find-metric", "no such metric")
    assert window.run(groups) == 0


def test_the_summary_has_errors_and_the_best_in_bold(window):
    assert texts(window, "#comparisons tbody tr:first-child td")[:2] == ["0.200 ± 0.010", "0.700 ± 0.010"]
    assert texts(window, "#comparisons strong") == ["0.700"]  # 0.200 of both is no best


# ---- responses -------------------------------------------------------------------------------------------------------


def test_pools_open_and_equal_responses_are_one(window):
    window.type("#filter-text", "the same")
    window.run(CHOOSE, "filter-iteration", "2")
    assert count(window) == "4 of 65 responses to 1 prompt"
    window.click("#table .pool .open")
    found = texts(window, "#table .response")
    # Three right ones, kept, and a wrong one.
    assert len(found) == 2 and "3 equal draws: 0, 1, 2" in found[0] and "kept" in found[0] and "✗ wrong" in found[1]
    assert "plain, iteration 1 (1 of 2)" in texts(window, "#table .history")[0]
    assert "Share correct of this prompt" in texts(window, "#table .history")[0]
    window.click("#table .pool .open")
    assert texts(window, "#table .response") == []


def test_a_click_on_a_header_sorts(window):
    cells = "return [...document.querySelectorAll('#table td[data-label=Tokens]')].map(cell => cell.innerText)"
    window.click("#table button[data-key=tokens]")
    assert window.run(cells)[:3] == ["1", "2", "3"]
    window.click("#table button[data-key=tokens]")
    assert window.run(cells)[:3] == ["1000", "30", "29"]
    assert window.run("return document.querySelectorAll('#table [aria-sort=descending]').length") == 1


def test_empty_columns_are_hidden(window):
    headers = texts(window, "#table thead th")
    assert "Cut off" in headers and "Kept" in headers and "Reward" not in headers  # the reward is the share correct
    assert "started, UTC" not in texts(window, "#runs-table th")


def test_filters(window):
    assert count(window) == "65 responses to 32 prompts"
    for control, value, responses in (
        ("verdict", "right", 34), ("verdict", "reason:no_answer", 2), ("verdict", "truncated", 2), ("verdict", "", 65),
        ("kept", "left", 30), ("kept", "", 65), ("iteration", "1", 60), ("run", "1", 0),
    ):  # fmt: skip
        window.run(CHOOSE, f"filter-{control}", value)
        if responses:
            assert count(window).startswith(f"{responses} "), (control, value)
    assert count(window) == "No response matches; there are 65 on this page."
    window.click("button[type=reset]")
    window.type("#filter-text", "ANSWER 29")
    assert count(window) == "1 of 65 responses to 1 prompt"


def test_pages(window):
    window.click("#next")
    assert texts(window, "#page") == ["Page 2 of 2"]
    assert window.run("return document.getElementById('next').disabled") is True


@pytest.mark.parametrize("size", SIZES)
def test_a_link_opens_its_response(window, size):
    resize(window, *size)
    window.run(CHOOSE, "filter-iteration", "1")
    window.run("document.querySelector('#table .pool .open').click()")
    address = window.run("return document.querySelector('#table .response a').href")
    assert address.endswith("#pool/plain/1/p0/0")
    window.go("about:blank")
    window.go(address.replace("/p0/0", "/p29/1"))  # on the second page of the table
    (named,) = texts(window, ".named")
    assert "draw 1" in named and "answer 29" in named
    box = "const box = document.querySelector('.named').getBoundingClientRect(); return [box.top, innerHeight]"
    top, height = window.run(box)
    assert 0 < top < height
    window.go(address.replace("/p0/0", "/nobody"))
    assert count(window) == "The response of this link is not on this page."


def test_hostile_text_is_shown_as_it_was_written(window):
    window.run(CHOOSE, "filter-run", "1")
    window.click("#table .open")
    # Compared there: on its way here half a character would be lost.
    same = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent === JSON.parse(arguments[1]))"
    assert window.run(same, "#table .whole pre", json.dumps(HOSTILE)) == [True] * 3  # problem, answer, response
    assert True in window.run(same, "#table .response .facts span", json.dumps(HOSTILE))  # the reason
    assert window.run("return document.scripts.length") == 2
    assert window.run("return document.querySelector('h1').textContent") == "plain, <script>hacked=1<script>"
    cells = "return [...document.querySelectorAll('.configuration tr')].map(row => row.cells[0].textContent)"
    place = window.run(cells).index("note")
    value = "return document.querySelectorAll('.configuration tr')[arguments[0]].cells[2].textContent.slice(0, 90)"
    assert window.run(value, place) == json.dumps(HOSTILE, ensure_ascii=False)[:90]


# ---- layout ----------------------------------------------------------------------------------------------------------


def test_the_page_fits_wide_and_narrow_screens(window):
    fits = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    for width in (1920, 1400, 1000, 400):
        resize(window, width, 800)
        assert window.run(fits), (width, window.run(OVER))
    # On a phone panels are below each other, and the menu stays where it is.
    columns = "return getComputedStyle(document.getElementById('overview')).gridTemplateColumns.split(' ').length"
    assert window.run(columns) == 1
    window.run("document.getElementById('configuration').scrollIntoView()")
    assert window.run("return document.querySelector('.top').getBoundingClientRect().top") == 0
    labels = window.run("return [...document.querySelector('#table .pool').cells].map(cell => cell.dataset.label)")
    assert {"Problem", "Answer", "Correct"} <= set(labels)


def test_nothing_is_drawn_over_a_line(window):
    # Texts of a chart are outside of the rectangle of its lines.
    window.run(SEE, "#overview")
    inside = """
        return [...document.querySelectorAll("#overview .plot")].flatMap(plot => [...plot.querySelectorAll("text")])
          .filter(text => { const box = text.getBBox(); return box.x + box.width > 46 && box.y < 176 - 24; }).length;
    """
    assert window.run(inside) == 0


def test_colours_are_those_of_runs(window):
    window.run(SEE, "#overview")
    script = """
        const grey = color => {
          const parts = color.match(/[\\d.]+/g).slice(0, 3).map(Number);
          return Math.max(...parts) - Math.min(...parts) < 24;
        };
        const runs = new Set(["--run-0", "--run-1"].map(name => {
          const probe = document.body.appendChild(document.createElement("i"));
          probe.style.color = `var(${name})`;
          return getComputedStyle(probe).color;
        }));
        const found = [...document.body.querySelectorAll("*")].flatMap(e => {
          const style = getComputedStyle(e); return [style.color, style.backgroundColor, style.fill, style.stroke];
        }).filter(color => color.startsWith("rgb") && !grey(color) && !runs.has(color));
        return [runs.size, [...new Set(found)]];
    """
    assert window.run(script) == [2, []]
