"""The command: what it prints and writes, and what it refuses."""

import pytest

from reinforce_ada_jax import plot
from reinforce_ada_jax.reporting import live
from tests.plotted import make_run, sample, write_samples
from tests.running import refused


@pytest.fixture
def runs(tmp_path):
    grpo = make_run(tmp_path / "grpo", tokens=[100, 100], averages={0: 0.2, 2: 0.6})
    balance = make_run(tmp_path / "balance", tokens=[400, 400], averages={0: 0.2, 2: 0.8})
    return [grpo, balance]


def test_figures_and_page_are_written_and_the_page_is_named_last(tmp_path, runs, capsys):
    write_samples(runs[0], 1, [sample()])
    plot.main(runs, tmp_path / "figures")
    written = {file.name for file in (tmp_path / "figures").iterdir()}
    # pass_at_k and difficulty: the evaluations have none; sampling, time and calibration: nor have the metrics.
    names = ("learning", "signal")
    assert written == {"index.html", *(name + end for name in names for end in (".png", ".svg", "-dark.svg"))}
    for name in names:
        drawn = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) > 20_000
    page = (tmp_path / "figures" / "index.html").read_text()
    assert "reward/first_round" in page and ".svg" not in page  # it draws the curves itself
    shown = capsys.readouterr().out
    assert "zero-signal 1-25" in shown and "After 2 updates" in shown
    assert shown.splitlines()[-1] == f"open in a browser: {tmp_path / 'figures' / 'index.html'}"


def test_a_run_without_evaluations_has_figures_too(tmp_path, capsys):
    plot.main([make_run(tmp_path / "run", [100, 100], {})], tmp_path)
    assert (tmp_path / "learning.png").exists()
    assert "After" not in capsys.readouterr().out


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
    shown = refused(capsys, plot.main, [workdir], tmp_path / "figures").err
    assert shown.startswith(f"error: {workdir}") and said in shown and shown.count("\n") == 1
    assert not (tmp_path / "figures").exists()


def test_samples_that_are_none_are_an_error(tmp_path, runs, capsys):
    write_samples(runs[0], 3, [{"prompt": "p"}])
    shown = refused(capsys, plot.main, runs, tmp_path / "figures")
    assert "000003.jsonl, line 1 is not a sampled response" in shown.err


def test_watching_says_where_and_writes_nothing(tmp_path, runs, capsys, monkeypatch):
    served = []

    def serve(workdirs, listener):
        served.append((workdirs, listener.getsockname()))
        listener.close()
        raise KeyboardInterrupt  # Ctrl-C is how it ends

    monkeypatch.setattr(live, "serve", serve)
    before = sorted(tmp_path.rglob("*"))
    plot.watch(runs, "127.0.0.1", 0)
    ((workdirs, (host, port)),) = served
    assert workdirs == runs and host == "127.0.0.1"
    assert capsys.readouterr().out == f"open in a browser: http://127.0.0.1:{port}\n"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("names", "said"), [([], "name at least one work directory"), (["grpo", "gpro"], "gpro is not a folder: name the")]
)
def test_watching_what_is_not_there_is_an_error(tmp_path, runs, capsys, names, said):
    assert said in refused(capsys, plot.watch, [tmp_path / name for name in names], "127.0.0.1", 0).err


def test_no_folder_is_an_error(tmp_path, capsys):
    assert "name at least one work directory" in refused(capsys, plot.main, [], tmp_path / "figures").err
