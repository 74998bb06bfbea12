"""The page: which responses are on it, and that whatever they hold stays text."""

import html.parser
import json
import math
import os
import re

import pytest

from reinforce_ada_jax.reporting import curves, samples
from reinforce_ada_jax.reporting import history as history_lib
from reinforce_ada_jax.reporting import page as page_lib
from reinforce_ada_jax.reporting.comparison import ComparedRun, Comparison
from tests.plotted import make_run, sample, write_samples

HOSTILE = (
    "</script><script>window.hacked = 1</script><!-- <script> ]]> & \" ' ` ${hacked} \\ \u2028 \u2029 \x00 \x7f "
    '<img src=x onerror="window.hacked = 1"> {{ 7 * 7 }} {% raw %} \u202edrawkcab 💥 \ud800 &lt;b&gt;'
)


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the content of script elements."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def page(workdirs):
    histories = history_lib.with_unique_names([history_lib.load(workdir) for workdir in workdirs])
    compared = [
        Comparison("heldout", HOSTILE, [2], ["tokens"], [ComparedRun(HOSTILE, {2: (0.5, 0.1)}, ["1"])], HOSTILE)
    ]
    return page_lib.render(page_lib.data(histories, compared, curves.figures(histories), samples.read_all(workdirs)))


def content(workdirs):
    """Data of the page, which its program reads."""
    return json.loads(Page(page(workdirs)).scripts[0])


def rows(workdirs):
    """Responses on the page, by name of column."""
    found = content(workdirs)["responses"]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


# ---- escaping --------------------------------------------------------------------------------------------------------


def test_embedded_json_is_the_same_value_and_ends_no_element():
    value = {HOSTILE: [HOSTILE, 1.5, None, True, "Ж"]}
    text = page_lib.embedded(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff\x00]", text)
    assert "Ж" in text  # three times as long as an escape


def test_hostile_text_is_text_everywhere(tmp_path):
    name = "<script>hacked=1<script>&'\"`"  # of a folder: no slash
    workdir = make_run(tmp_path / name, [100, 100], {2: 0.5}, config={"note": HOSTILE})
    line = sample(HOSTILE, HOSTILE, answer=HOSTILE, reason=HOSTILE)
    write_samples(workdir, 1, [line])
    made = Page(page([workdir]))
    names = [tag for tag, _ in made.tags]
    # The responses and the program, and no element or handler that was not in the template.
    assert names.count("script") == len(made.scripts) == 2
    assert "img" not in names and "object" not in names
    assert not [attribute for _, attributes in made.tags for attribute in attributes if attribute.startswith("on")]
    data = json.loads(made.scripts[0])
    (row,) = rows([workdir])
    assert data["responses"]["problems"] == [[HOSTILE, HOSTILE]] and row["response"] == row["reason"] == HOSTILE
    assert data["runs"][0]["name"] == name and json.loads(data["runs"][0]["config"]["note"]) == HOSTILE
    assert made.scripts[1] == "\n".join((page_lib.ASSETS / file).read_text() for file in page_lib.PROGRAM)


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    made = Page(page([make_run(tmp_path / "run", [100, 100], {2: 0.5})]))
    addresses = [
        attributes[key] for _, attributes in made.tags for key in ("src", "srcset", "href") if key in attributes
    ]
    assert [address for address in addresses if not address.startswith(("#", "data:,"))] == []
    (policy,) = [tag["content"] for _, tag in made.tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert "connect-src 'none'" in policy
    assert "http" not in (page_lib.ASSETS / "report.css").read_text()


def test_a_folder_whose_name_is_no_text_can_be_reported(tmp_path):
    # Only names are looked at: drawing has its own test.
    workdir = make_run(tmp_path / os.fsdecode(b"run-\xff"), [1, 1], {})
    history = history_lib.load(workdir)
    made = page_lib.render(page_lib.data([history], [], [], samples.read_all([workdir])))
    written = page_lib.write(tmp_path / "out", made)
    assert r'"name":"run-\udcff"' in written.read_text("utf-8")


def test_numbers_that_json_lacks_are_absent(tmp_path):
    workdir = make_run(tmp_path / "run", [1], {})
    write_samples(workdir, 1, [sample(reward=math.nan, advantage=-math.inf)])
    (row,) = rows([workdir])
    assert row["reward"] is None and row["advantage"] is None


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_rows_of_metrics_begin_with_the_evaluation_before_training(tmp_path):
    metrics = {"update/loss": [None, 1 / 3], "time/collect_s": [1.5, 2.0]}
    history = history_lib.load(make_run(tmp_path / "run", [100, 50], {0: 0.2, 2: 0.6}, 3, metrics=metrics))
    found = page_lib.metric_rows(history)
    lines = [dict(zip(("iteration", "updates", "tokens", "seconds", *found["keys"]), row)) for row in found["rows"]]  # noqa: B905
    assert [[line[key] for key in ("iteration", "updates", "tokens", "seconds")] for line in lines] == [
        [0, 0, 0, 0], [1, 3, 100, 1.5], [2, 6, 150, 3.5],
    ]  # fmt: skip
    assert [line["evaluation/heldout/avg"] for line in lines] == [0.2, None, 0.6]
    assert [line["update/loss"] for line in lines] == [None, None, 0.333333]
    # What a reader with two rows lacks.
    assert page_lib.metric_rows(history, 2)["rows"] == found["rows"][2:]
    assert page_lib.metric_rows(history, 3)["rows"] == []


def test_time_left_is_that_of_the_newest_iterations_without_the_first(tmp_path):
    # Ten iterations of 2 s, and an evaluation of 5 s in one of them: 2.5 s each, for 100 - 12.
    metrics = {"time/collect_s": [500.0, 9.0] + [2.0] * 10, "time/evaluate_s": [None] * 11 + [5.0]}
    workdir = make_run(tmp_path / "run", [1] * 12, {}, config={"iterations": 100}, metrics=metrics)
    assert page_lib.seconds_left(history_lib.load(workdir)) == 2.5 * 88
    assert page_lib.seconds_left(history_lib.load(make_run(tmp_path / "untimed", [1, 1], {}))) is None


def test_figures_leave_out_what_the_page_draws_from_the_metrics(tmp_path):
    metrics = {"collection/active_round_1": [4, 4], "update/entropy": [0.5, 0.4], "time/collect_s": [1.0, 1.0]}
    found = content([make_run(tmp_path / "run", [100, 100], {2: 0.5}, metrics=metrics)])["figures"]
    assert {figure["name"]: [panel["title"] for panel in figure["panels"]] for figure in found} == {
        "signal": ["Reward for entropy spent"],
        "sampling": ["Prompts that draw a round, early", "Prompts that draw a round, late"],
        "time": ["Where an iteration's time goes"],
    }


# ---- which responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(3, 5, [0, 1, 2]), (3, 3, [0, 1, 2]), (5, 3, [0, 2, 4]), (100, 2, [0, 99]), (100, 1, [99]), (1, 1, [0])],
)
def test_evenly_spaced(count, most, places):
    """Samples that are shown are as far apart as possible."""
    assert samples.evenly_spaced(count, most) == places


def samples_of(tmp_path, sizes):
    """A run with `sizes` samples in its iterations."""
    workdir = make_run(tmp_path / "run", [1], {})
    for iteration, size in enumerate(sizes, start=1):
        write_samples(workdir, iteration, [sample(draw=draw) for draw in range(size)])
    return workdir


def test_all_responses_where_there_is_room(tmp_path):
    found = samples.read(samples_of(tmp_path, [2, 0, 3]), 5, 10**6)
    assert [(row["iteration"], row["draw"]) for row in found.rows] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
    assert found.rows[0]["boxed"] == "2"
    assert samples.description("run", found) == "run: all 5 responses of 2 iterations in samples/."


def test_as_many_iterations_as_fit_evenly_spaced(tmp_path):
    found = samples.read(samples_of(tmp_path, [10] * 9), 35, 10**6)
    assert sorted({row["iteration"] for row in found.rows}) == [1, 5, 9]
    assert samples.description("run", found) == (
        "run: 30 of 90 responses in samples/, of 3 of 9 iterations (the newest, and others evenly spaced); 60 are not "
        "shown."
    )


def test_bytes_are_a_limit_too(tmp_path):
    workdir = samples_of(tmp_path, [10] * 9)
    size = (workdir / "samples" / "000001.jsonl").stat().st_size
    found = samples.read(workdir, 10**6, 2 * size + 1)
    assert sorted({row["iteration"] for row in found.rows}) == [1, 9]


def test_iterations_of_many_sizes_stay_within_the_limit_newest_first(tmp_path):
    # Twelve on average let two iterations in; the first one of 40 has no room beside the last.
    found = samples.read(samples_of(tmp_path, [40, 1, 1, 10, 8]), 24, 10**6)
    assert {row["iteration"] for row in found.rows} == {5}
    # One iteration beyond the limit is cut.
    found = samples.read(samples_of(tmp_path / "other", [40]), 24, 10**6)
    assert [row["draw"] for row in found.rows] == list(range(24))
    assert "24 of 40 responses" in samples.description("run", found)


def test_a_hundred_thousand_responses_make_a_page_of_bounded_size(tmp_path):
    long = sample(response="word " * 100)
    workdir = make_run(tmp_path / "run", [1], {})
    for iteration in range(1, 101):
        write_samples(workdir, iteration, [long] * 1000)
    text = page([workdir])
    data = json.loads(Page(text).scripts[0])
    assert len(data["responses"]["rows"]) == samples.MOST_ROWS and len(text) < 12_000_000
    assert "10,000 of 100,000 responses in samples/, of 10 of 100 iterations" in text
    assert "90,000 are not shown." in text


def test_a_file_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    workdir = samples_of(tmp_path, [2])
    with (workdir / "samples" / "000001.jsonl").open("a") as file:
        file.write('{"prompt": "p", "prob')
    assert len(samples.read(workdir, 10, 10**6).rows) == 2


def test_a_very_long_response_loses_its_middle(tmp_path):
    text = "a" * samples.LONGEST_TEXT + "middle" + "b" * samples.LONGEST_TEXT
    shown = samples.shortened(text)
    assert shown.startswith("aaa") and shown.endswith("bbb") and "middle" not in shown
    assert f"[... {samples.LONGEST_TEXT + 6:,} characters not shown ...]" in shown
    assert samples.shortened("short") == "short"


def test_a_run_without_samples_says_so(tmp_path):
    workdir = make_run(tmp_path / "run", [1], {})
    assert content([workdir])["shown"] == ["run has no sampled responses (logging.sampled_prompts)."]
