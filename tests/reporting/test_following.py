"""Runs that go on: what a live page gets, once, whatever the files hold."""

import json

import pytest

from reinforce_ada_jax.reporting.following import NOTHING, FollowedRuns
from tests.plotted import make_run, sample, write_samples


def line(iteration, **metrics):
    needed = {"collection/tokens": 10, "collection/zero_signal_share": 0.5}
    return json.dumps({"iteration": iteration, **needed, **metrics}) + "\n"


class Reader:
    """A page: what it knows, and what it was told."""

    def __init__(self, followed):
        self.followed, self.known, self.version = followed, [NOTHING] * len(followed.runs), -1

    def ask(self):
        news = self.followed.news(self.known, self.version)
        self.version = news["version"]
        self.known = [(run["generation"], run["begin"] + len(run["rows"]), run.get("seen", 0)) for run in news["runs"]]
        return news

    def iterations(self):
        """Iterations that are new in the first run."""
        return [row[0] for row in self.ask()["runs"][0]["rows"]]


@pytest.fixture
def workdir(tmp_path):
    return make_run(tmp_path / "run", [100, 100], {0: 0.2, 2: 0.6}, config={"iterations": 10})


def test_only_what_is_new_is_told(workdir):
    page = Reader(FollowedRuns([workdir], 0))
    first = page.ask()
    assert [row[0] for row in first["runs"][0]["rows"]] == [0, 1, 2] and first["runs"][0]["iterations"] == 10
    assert [found["benchmark"] for found in first["comparisons"]] == ["heldout"]
    again = page.ask()
    assert again["runs"][0]["rows"] == [] and "comparisons" not in again and "config" not in again["runs"][0]
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(line(3, **{"update/new": 0.25}))
    news = page.ask()
    assert [row[:3] for row in news["runs"][0]["rows"]] == [[3, 3, 210]]
    assert news["runs"][0]["rows"][0][4 + news["runs"][0]["keys"].index("update/new")] == 0.25
    assert "comparisons" in news


def test_two_pages_are_told_the_same(workdir):
    followed = FollowedRuns([workdir], 0)
    assert Reader(followed).ask()["runs"][0]["rows"] == Reader(followed).ask()["runs"][0]["rows"] != []


def test_the_file_is_read_from_where_the_last_reading_ended(workdir):
    page = Reader(FollowedRuns([workdir], 0))
    page.ask()
    file = workdir / "metrics.jsonl"
    # The same length, in place: were it read again, it would be seen.
    with file.open("r+") as stream:
        stream.write("x" * 20)
    with file.open("a") as stream:
        stream.write(line(3))
    assert page.iterations() == [3]


def test_damaged_and_half_written_lines_break_nothing(workdir):
    page = Reader(FollowedRuns([workdir], 0))
    page.ask()
    damaged = ["{", "null", "[1]", '"x"', '{"iteration": "4"}', '{"iteration": 4}', "\x00\xff", line(2), "[" * 100_000]
    damaged += [line(4, huge=10**400).strip()[:-20], '{"iteration": NaN}', '{"iteration": true}', ""]
    with (workdir / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write("\n".join(damaged) + "\n" + line(5, large=10**400, text="<b>", nan=float("nan")) + line(6)[:-9])
    news = page.ask()["runs"][0]
    assert [row[0] for row in news["rows"]] == [5] and news["problem"] == ""
    assert not {"large", "text"} & set(news["keys"]) and "NaN" not in json.dumps(news)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(line(6)[-9:])
    assert page.iterations() == [6]


def test_a_resume_replaces_the_lines_of_a_killed_run(workdir):
    page = Reader(FollowedRuns([workdir], 0))
    page.ask()
    replacement = workdir / "metrics.jsonl.partial"
    replacement.write_text(line(1) + line(2, **{"update/loss": 7}) + line(3))
    replacement.replace(workdir / "metrics.jsonl")
    news = page.ask()["runs"][0]
    assert news["generation"] == 1 and news["begin"] == 0 and [row[0] for row in news["rows"]] == [0, 1, 2, 3]
    # A page that was away for two resumes gets everything, too.
    (workdir / "metrics.jsonl").write_text(line(1))
    assert page.iterations() == [0, 1]


def test_a_run_that_has_not_begun(tmp_path):
    page = Reader(FollowedRuns([tmp_path / "run"], 0))
    assert page.ask()["runs"][0]["rows"] == []
    make_run(tmp_path / "run", [], {}, config={"iterations": 7})
    (tmp_path / "run" / "started.json").write_text('{"device": "8 x TPU"}')
    run = page.ask()["runs"][0]
    assert (run["rows"], run["iterations"], run["started"]["device"]) == ([[0, 0, 0, 0]], 7, "8 x TPU")
    assert run["config"]["collection.prompts_per_iteration"] == "8" and run["log"] == ""
    # The evaluation before the first iteration and the log are there as soon as they are written.
    evaluation = {"iteration": 0, "evaluation/heldout/avg": 0.2}
    (tmp_path / "run" / "evaluations" / "000000.json").write_text(json.dumps(evaluation))
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "host-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    run = page.ask()["runs"][0]
    assert dict(zip(run["keys"], run["rows"][0][4:], strict=True)) == {"evaluation/heldout/avg": 0.2}
    assert run["log"].splitlines() == [f"line {i}" for i in range(88, 100)]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line(1))
    assert page.iterations() == [0, 1]


def test_figures_of_runs_that_began_keep_their_places(tmp_path):
    metrics = {"collection/active_round_1": [4]}
    begun = make_run(tmp_path / "b", [5], {}, metrics=metrics)
    news = Reader(FollowedRuns([tmp_path / "a", begun], 0)).ask()
    assert {one["run"] for figure in news["figures"] for panel in figure["panels"] for one in panel["series"]} == {1}


def test_a_folder_of_another_program_is_said(workdir):
    (workdir / "config.json").write_text("[]")
    news = Reader(FollowedRuns([workdir], 0)).ask()["runs"][0]
    assert news["rows"] == [] and "config.json holds a list, not an object" in news["problem"]


def test_a_run_of_supervised_training_is_said(workdir):
    (workdir / "metrics.jsonl").write_text('{"iteration": 1, "update/loss": 0.5}\n')
    news = Reader(FollowedRuns([workdir], 0)).ask()["runs"][0]
    assert len(news["rows"]) == 1 and "is no run of train: its metrics.jsonl has no iteration" in news["problem"]


def test_a_file_that_can_be_read_again_is_shown_without_a_new_iteration(workdir):
    page, file = Reader(FollowedRuns([workdir], 0)), workdir / "config.json"
    text = file.read_text()
    file.write_text("[]")
    assert page.ask()["runs"][0]["rows"] == []
    file.write_text(text)
    news = page.ask()["runs"][0]
    assert [row[0] for row in news["rows"]] == [0, 1, 2] and news["problem"] == ""


def test_responses_come_once_with_the_iteration_that_they_belong_to(workdir):
    write_samples(workdir, 2, [sample()])
    write_samples(workdir, 3, [sample(), sample(draw=1)])  # of an iteration without a line: still being written
    page = Reader(FollowedRuns([workdir], 0))
    assert len(page.ask()["responses"]["rows"]) == 1
    assert "responses" not in page.ask()
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(line(3))
    rows = page.ask()["responses"]["rows"]
    assert [row[1] for row in rows] == [3, 3]
    write_samples(workdir, 4, [{"prompt": "p"}])
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(line(4))
    assert "000004.jsonl, line 1 is not a sampled response" in page.ask()["runs"][0]["problem"]


def test_benchmarks_of_one_name_and_other_problems_are_not_compared(tmp_path):
    first = make_run(tmp_path / "first", [100], {}, problems="aaa")
    second = make_run(tmp_path / "second", [100], {0: 0.2, 1: 0.9}, problems="bbb")
    page = Reader(FollowedRuns([first, second], 0))

    def charts(run):
        return [key for key in run["keys"] if key.endswith("/avg")]

    assert [charts(run) for run in page.ask()["runs"]] == [[], ["evaluation/heldout/avg"]]
    # The first run is evaluated on other problems: from now on the page has another name for those of the second.
    result = {"evaluation/heldout/avg": 0.4}
    saved = {"iteration": 2, **result, "evaluation/heldout/problems_hash": "aaa"}
    (first / "evaluations" / "000002.json").write_text(json.dumps(saved))
    with (first / "metrics.jsonl").open("a") as file:
        file.write(line(2, **result))
    news = page.ask()
    assert [charts(run) for run in news["runs"]] == [["evaluation/heldout/avg"], ["evaluation/heldout of second/avg"]]
    assert [row[0] for row in news["runs"][1]["rows"]] == [0, 1]  # all of them again
    compared = {found["benchmark"]: [run["name"] for run in found["runs"]] for found in news["comparisons"]}
    assert compared == {"heldout": ["first"], "heldout of second": ["second"]}
    assert [run["rows"] for run in page.ask()["runs"]] == [[], []]
