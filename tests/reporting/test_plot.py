"""The command: what it prints and writes, and what it refuses."""

import pytest

from reinforce_ada_jax import plot
from tests.plotted import make_run, sample, write_samples


@pytest.fixture
def runs(tmp_path):
    grpo = make_run(tmp_path / "grpo", tokens=[100, 100], averages={0: 0.2, 2: 0.6})
    balance = make_run(tmp_path / "balance", tokens=[400, 400], averages={0: 0.2, 2: 0.8})
    return [grpo, balance]


def test_table(tmp_path, runs):
    late = make_run(tmp_path / "late", tokens=[10_000, 20_000], averages={1: 0.3})
    assert plot.table([plot.load(workdir) for workdir in (*runs, late)], "heldout").splitlines() == [
        "heldout avg@16 after      0      1      2  updates  zero-signal 1-25  tokens  tokens/update",
        "grpo                  0.200         0.600                       0.38     200            100",
        "balance               0.200         0.800                       0.38     800            400",
        "late                         0.300                              0.38  30,000         15,000",
    ]


def test_what_was_spent(runs):
    # balance spent 800 / 200 = 4 times the tokens. With 200 tokens it had gone a quarter of its way: 0.2 + 0.6 / 4.
    assert plot.what_was_spent(*map(plot.load, runs), "heldout") == (
        "After 2 updates balance stands at 0.800 and grpo at 0.600, and balance generated 4.0 times the tokens to get "
        "there; when both have generated 200 tokens, balance stands at 0.350 and grpo at 0.600."
    )


def test_what_was_spent_compares_where_both_have_been(tmp_path, runs):
    # balance ended after 2 updates. By then the longer run was half way from 0.2 to 0.6 and had spent 200 tokens.
    longer = make_run(tmp_path / "longer", tokens=[100] * 4, averages={0: 0.2, 4: 0.6})
    sentence = plot.what_was_spent(plot.load(longer), plot.load(runs[1]), "heldout")
    assert sentence.startswith("After 2 updates balance stands at 0.800 and longer at 0.400, and balance generated 4.0")


def test_figures_and_page_are_written_and_the_page_is_named_last(tmp_path, runs, capsys):
    write_samples(runs[0], 1, [sample()])
    plot.main(runs, tmp_path / "figures")
    written = {file.name for file in (tmp_path / "figures").iterdir()}
    # pass_at_k: the evaluations have none; sampling, time and calibration: nor have the metrics.
    names = ("learning", "signal")
    assert written == {"index.html", *(name + end for name in names for end in (".png", ".svg", "-dark.svg"))}
    for name in names:
        drawn = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) > 20_000
    page = (tmp_path / "figures" / "index.html").read_text()
    assert 'src="learning.svg"' in page and 'srcset="learning-dark.svg"' in page and 'src="time.svg"' not in page
    shown = capsys.readouterr().out
    assert "zero-signal 1-25" in shown and "After 2 updates" in shown
    assert shown.splitlines()[-1] == f"open in a browser: {tmp_path / 'figures' / 'index.html'}"


def test_a_run_without_evaluations_has_figures_too(tmp_path, capsys):
    plot.main([make_run(tmp_path / "run", [100, 100], {})], tmp_path)
    assert (tmp_path / "learning.png").exists()
    assert "No run was evaluated." in (tmp_path / "index.html").read_text()
    assert "After" not in capsys.readouterr().out


def test_every_benchmark_has_its_summary(tmp_path, runs):
    file = runs[0] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"evaluation/heldout/avg', '"evaluation/other/avg'))
    summaries = plot.summaries([plot.load(workdir) for workdir in runs])
    assert [(summary.benchmark, len(summary.rows)) for summary in summaries] == [("heldout", 3), ("other", 2)]
    assert summaries[0].rows[0][:3] == ["heldout avg@16 after", "0 updates", "2 updates"]
    # A sentence needs both runs: here both were evaluated on one of them, grpo before it began.
    assert [bool(summary.sentence) for summary in summaries] == [True, False]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no metrics.jsonl with a finished iteration"),
        ("", "has no metrics.jsonl with a finished iteration"),
        ('{"iteration": 1, "rew', "has no metrics.jsonl with a finished iteration"),
        ('{"iteration": 1}\n', "config.json can't be read (No such file or directory)"),
        ("[1, 2]\n", "metrics.jsonl, line 1 is not an object with the metrics of an iteration"),
    ],
)
def test_a_folder_without_a_run_is_an_error(tmp_path, capsys, content, said):
    workdir = tmp_path / "empty"
    if content is not None:
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        plot.main([workdir], tmp_path / "figures")
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {workdir}") and said in shown and shown.count("\n") == 1
    assert not (tmp_path / "figures").exists()


def test_samples_that_are_none_are_an_error(tmp_path, runs, capsys):
    write_samples(runs[0], 3, [{"prompt": "p"}])
    with pytest.raises(SystemExit, match="2"):
        plot.main(runs, tmp_path / "figures")
    assert "000003.jsonl, line 1: no sampled response" in capsys.readouterr().err


def test_no_folder_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        plot.main([], tmp_path / "figures")
    assert "name at least one work directory" in capsys.readouterr().err
