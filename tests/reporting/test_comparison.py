"""The comparison of two runs: its table and sentences, only where both have numbers."""

import json

import pytest

from reinforce_ada_jax.reporting.comparison import compare, compare_all
from reinforce_ada_jax.reporting.history import load, with_distinct_benchmarks
from tests.plotted import make_run


@pytest.fixture
def runs(tmp_path):
    grpo = make_run(tmp_path / "grpo", tokens=[100, 100], averages={0: 0.2, 2: 0.6})
    balance = make_run(tmp_path / "balance", tokens=[400, 400], averages={0: 0.2, 2: 0.8})
    return [grpo, balance]


def test_table(tmp_path, runs):
    """The table compares averages, updates and tokens of runs."""
    late = make_run(tmp_path / "late", tokens=[10_000, 20_000], averages={1: 0.3})
    assert compare([load(workdir) for workdir in (*runs, late)], "heldout").text().splitlines() == [
        "heldout avg@16 after      0      1      2  updates  zero-signal 1-25  tokens  tokens/update",
        "grpo                  0.200         0.600                       0.38     200            100",
        "balance               0.200         0.800                       0.38     800            400",
        "late                         0.300                              0.38  30,000         15,000",
    ]


def test_title_names_the_samples_of_the_evaluated_runs(tmp_path, runs):
    few = make_run(tmp_path / "few", [100], {1: 0.3}, config={"evaluation": {"samples": 4}})
    never = make_run(tmp_path / "never", [100], {}, config={"evaluation": {"samples": 32}})
    assert compare([load(never), load(few)], "heldout").title == "heldout avg@4 after"
    assert compare([load(workdir) for workdir in (*runs, few)], "heldout").title == "heldout avg@4/16 after"


def test_sentence_on_two_runs(runs):
    # balance spent 800 / 200 = 4 times the tokens. With 200 tokens it had gone a quarter of its way: 0.2 + 0.6 / 4.
    assert compare(list(map(load, runs)), "heldout").sentence == (
        "After 2 updates balance reaches 0.800 and grpo 0.600, and balance generated 4.0 times the tokens for it; when "
        "both have generated 200 tokens, balance reaches 0.350 (between two evaluations) and grpo 0.600."
    )


def test_sentence_on_a_run_that_generates_little(tmp_path):
    """A ratio of tokens below 1 has two digits that count: 0.031 is not 0.0."""
    many = make_run(tmp_path / "many", tokens=[6400], averages={1: 0.5})
    few = make_run(tmp_path / "few", tokens=[200], averages={1: 0.4})
    sentence = compare([load(many), load(few)], "heldout").sentence
    assert "few generated 0.031 times the tokens for it" in sentence


def test_sentence_on_the_last_of_three_runs(runs):
    histories = list(map(load, runs))
    three = compare([histories[0], histories[0], histories[1]], "heldout")
    assert three.sentence == compare(histories, "heldout").sentence


def test_sentence_compares_only_where_both_runs_were_evaluated(tmp_path, runs):
    # balance was evaluated after 2 updates, the longer run half way there: nothing is made up for it.
    longer = make_run(tmp_path / "longer", tokens=[100] * 4, averages={0: 0.2, 4: 0.6})
    assert compare([load(longer), load(runs[1])], "heldout").sentence == ""
    both = make_run(tmp_path / "both", tokens=[100] * 4, averages={0: 0.2, 2: 0.3, 4: 0.6})
    sentence = compare([load(both), load(runs[1])], "heldout").sentence
    assert sentence.startswith("After 2 updates balance reaches 0.800 and both 0.300, and balance generated 4.0")


def test_sentence_has_no_average_from_before_the_first_evaluation(tmp_path):
    # With 200 tokens, `early` was evaluated. `late` was evaluated for the first time with 2,000: nothing is known.
    late = make_run(tmp_path / "late", tokens=[1000, 1000], averages={2: 0.5})
    early = make_run(tmp_path / "early", tokens=[100, 100], averages={0: 0.2, 2: 0.6})
    assert compare([load(late), load(early)], "heldout").sentence == (
        "After 2 updates early reaches 0.600 and late 0.500, and early generated 0.1 times the tokens for it."
    )


def test_benchmarks_of_one_name_and_other_problems_are_not_compared(tmp_path):
    cipher = make_run(tmp_path / "cipher", tokens=[100], averages={1: 0.2}, problems="aaa")
    again = make_run(tmp_path / "again", tokens=[100], averages={1: 0.3}, problems="aaa")
    words = make_run(tmp_path / "words", tokens=[100], averages={1: 0.9}, problems="bbb")
    histories = with_distinct_benchmarks([load(run) for run in (cipher, words, again)])
    compared = {found.benchmark: [run.name for run in found.runs] for found in compare_all(histories)}
    assert compared == {"heldout": ["cipher", "again"], "heldout of words": ["words"]}
    assert [found.sentence for found in compare_all(histories)] == ["", ""]
    # Without other problems nothing is renamed.
    assert [list(run.evaluations) for run in with_distinct_benchmarks(histories[:1])] == [["heldout"]]


def test_charts_and_curves_of_one_name_and_other_problems_are_apart_too(tmp_path):
    runs = [
        make_run(tmp_path / name, tokens=[100], averages={0: 0.2, 1: 0.4}, problems=problems)
        for name, problems in (("cipher", "aaa"), ("words", "bbb"))
    ]
    # Only the command evaluated these, so metrics.jsonl lacks them.
    for run, problems in zip(runs, ("ccc", "ddd"), strict=True):
        later = {"iteration": 1, "evaluation/test/pass_at_1": 0.5, "evaluation/test/problems_hash": problems}
        (run / "evaluations" / "000002.json").write_text(json.dumps(later))
    first, second = with_distinct_benchmarks([load(run) for run in runs])
    assert [list(first.curves), list(second.curves)] == [["test"], ["test of words"]]
    charts = [{key for key in run.metrics if key.endswith("/avg")} for run in (first, second)]
    assert charts == [{"evaluation/heldout/avg"}, {"evaluation/heldout of words/avg"}]
    assert second.before["evaluation/heldout of words/avg"] == 0.2 and second.before["iteration"] == 0


def test_tokens_are_counted_from_the_beginning_of_a_run(tmp_path, runs):
    # Both have 100 tokens an update; the first one writes a line every two updates.
    every_two = make_run(tmp_path / "two", tokens=[200], averages={0: 0.2, 1: 0.6}, updates_per_iteration=2)
    every = make_run(tmp_path / "one", tokens=[100, 100], averages={0: 0.2, 2: 0.4})
    sentence = compare([load(every_two), load(every)], "heldout").sentence
    assert sentence.startswith("After 2 updates one reaches 0.400 and two 0.600, and one generated 1.0 times")


def test_a_run_without_its_first_lines_is_compared_after_equal_updates_alone(tmp_path):
    """Its tokens until then are lost: it has not "generated 0.5 times the tokens" of a run that is equal."""
    whole, cut = (make_run(tmp_path / name, [100] * 4, {2: 0.4, 4: 0.8}) for name in ("whole", "cut"))
    file = cut / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[2:]))
    found = compare([load(whole), load(cut)], "heldout")
    assert found.sentence == "After 4 updates cut reaches 0.800 and whole 0.800."
    assert [run.costs[1:] for run in found.runs] == [["400", "100"], ["", ""]]


def test_every_benchmark_has_its_comparison(tmp_path, runs):
    file = runs[0] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"evaluation/heldout/avg', '"evaluation/other/avg'))
    compared = compare_all([load(workdir) for workdir in runs])
    assert [(found.benchmark, len(found.runs)) for found in compared] == [("heldout", 2), ("other", 1)]
    assert compared[0].runs[1].averages == {0: (0.2, 0.01), 2: (0.8, 0.01)}
    # A sentence needs both runs: here both were evaluated on one of them, but grpo only before it began.
    assert [found.sentence for found in compared] == ["", ""]
