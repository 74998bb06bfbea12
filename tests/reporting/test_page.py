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
from reinforce_ada_jax.reporting.comparison import Comparison
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
    compared = [Comparison("heldout", HOSTILE, [2], ["tokens"], [(HOSTILE, ["0.5"], ["1"])], HOSTILE)]
    return page_lib.render(histories, compared, curves.figures(histories), samples.read_all(workdirs))


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
    assert names.count("img") == names.count("source") == 2  # the figures on learning and signal
    assert not [attribute for _, attributes in made.tags for attribute in attributes if attribute.startswith("on")]
    data = json.loads(made.scripts[0])
    row = dict(zip(data["columns"], data["rows"][0], strict=True))
    assert data["problems"] == [[HOSTILE, HOSTILE]] and row["response"] == row["reason"] == HOSTILE
    assert made.scripts[1] == (page_lib.ASSETS / "report.js").read_text()


def test_the_page_asks_for_nothing_but_the_figures_beside_it(tmp_path):
    made = Page(page([make_run(tmp_path / "run", [100, 100], {2: 0.5})]))
    addresses = [
        attributes[key] for _, attributes in made.tags for key in ("src", "srcset", "href") if key in attributes
    ]
    assert {address for address in addresses if not address.startswith(("#", "data:,"))} == {
        f"{name}{end}" for name in ("learning", "signal") for end in (".svg", "-dark.svg", ".png")
    }
    (policy,) = [tag["content"] for _, tag in made.tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert "http" not in (page_lib.ASSETS / "report.css").read_text()


def test_a_folder_whose_name_is_no_text_can_be_reported(tmp_path):
    # Only names are looked at: drawing has its own test.
    workdir = make_run(tmp_path / os.fsdecode(b"run-\xff"), [1, 1], {})
    history = history_lib.load(workdir)
    written = page_lib.write(tmp_path / "out", page_lib.render([history], [], [], samples.read_all([workdir])))
    assert "run-?" in written.read_text("utf-8")


def test_numbers_that_json_lacks_are_absent(tmp_path):
    workdir = make_run(tmp_path / "run", [1], {})
    write_samples(workdir, 1, [sample(reward=math.nan, advantage=-math.inf)])
    data = json.loads(Page(page([workdir])).scripts[0])
    row = dict(zip(data["columns"], data["rows"][0], strict=True))
    assert row["reward"] is None and row["advantage"] is None


def test_configurations_side_by_side(tmp_path):
    runs = [
        make_run(tmp_path / name, [1], {}, config={"collection": {"prompts_per_iteration": 8, **own}, "seed": 0})
        for name, own in (("grpo", {"strategy": "grpo"}), ("balance", {"strategy": "balance", "k_pos": None}))
    ]
    different, same = page_lib.configuration_rows([history_lib.load(workdir) for workdir in runs])
    assert different == [["collection.k_pos", "absent", "null"], ["collection.strategy", '"grpo"', '"balance"']]
    assert ["seed", "0", "0"] in same and ["collection.prompts_per_iteration", "8", "8"] in same


# ---- which responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(3, 5, [0, 1, 2]), (3, 3, [0, 1, 2]), (5, 3, [0, 2, 4]), (100, 2, [0, 99]), (100, 1, [99]), (1, 1, [0])],
)
def test_evenly_spaced(count, most, places):
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
    assert len(data["rows"]) == samples.MOST_ROWS and len(text) < 12_000_000
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
    assert "run has no sampled responses (logging.sampled_prompts)." in page([workdir])
    assert 'id="table"' not in page([workdir])
