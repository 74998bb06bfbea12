"""The command `simulate`: its tables against closed forms, its files, and what it says of a user's mistakes."""

import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from absl import flags

from reinforce_ada_jax import cli, simulate
from reinforce_ada_jax.analysis import objective_studies, studies
from reinforce_ada_jax.analysis.enumeration import expectations
from reinforce_ada_jax.analysis.inputs import strategy_settings
from reinforce_ada_jax.config import CollectionConfig
from tests.running import ROOT, environment


def run(*arguments: str) -> None:
    """The command in this process."""
    values = flags.FlagValues()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how ml_collections loads a file
        simulate.define_flags(values)
        values(["simulate", *arguments])
    simulate.main(values)


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "reinforce_ada_jax.simulate", *arguments], cwd=ROOT, env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def lines_after(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose header begins with `title`, line by line."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().startswith(title))
    table = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        table.append(line.split())
    return table


def result(folder, name: str = "simulate") -> dict:
    """name.json, beside which there are three figures."""
    files = [f"{name}-dark.svg", f"{name}.json", f"{name}.png", f"{name}.svg"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / f"{name}.svg").read_text()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture
def prompt_file(tmp_path):
    """Four prompts with pass rates, a blank line, and two without."""
    rates = [0.0, 0.05, 0.5, 1.0, None]
    lines = [json.dumps({"id": str(i), "pass_rate": rate}) for i, rate in enumerate(rates)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*lines[:2], "", *lines[2:], '{"id": "x"}']) + "\n")
    return file


# ---- the table -------------------------------------------------------------------------------------------------------


def test_grpo(capsys):
    run("--strategy=grpo", "--group_size=8", "--pass_rates=0.1,0.5", "--tokens_per_response=500")
    shown = capsys.readouterr().out
    assert shown.startswith("grpo: groups of 8, at most 8 draws, objective identity\n")
    # 0.9^8 + 0.1^8 = 0.43046722, 2 / 2^8 = 0.0078; signal 1 - 1/8; tokens 8 * 500.
    first, second = lines_after(shown, "pass rate")
    assert first[:7] == ["0.1000", "8.00", "0.0000", "1.00", "0.0000", "0.4305", "0.4305"]
    assert second[5:11] == ["0.0078", "0.0078", "4.00", "4.00", "0.5000", "0.8750"]
    assert first[-1] == second[-1] == "4,000"


def test_strategies_side_by_side_with_files(tmp_path, capsys):
    folder = tmp_path / "figures"
    run("--strategy=grpo@8,positive,balance+log", "--pass_rates=0.02:0.98:5", f"--output={folder}")
    shown = capsys.readouterr().out
    found = result(folder)
    assert list(found["exact"]) == ["grpo@8", "positive", "balance+log"]
    assert found["settings"]["grpo@8"]["group_size"] == 8 and found["settings"]["positive"]["group_size"] == 4
    assert found["settings"]["balance+log"]["objective"] == "log"
    positive = found["exact"]["positive"]
    # Evenly spaced in logits: odds of 49, 7, 1, 1/7, 1/49.
    np.testing.assert_allclose(positive["pass_rates"], [1 / 50, 1 / 8, 1 / 2, 7 / 8, 49 / 50], rtol=1e-12)
    # A round of 8 follows while all are wrong, up to four of them.
    draws = [8 * sum((1 - p) ** (8 * j) for j in range(4)) for p in positive["pass_rates"]]
    np.testing.assert_allclose(positive["draws"], draws, rtol=1e-12)
    # Below the title the header, then pass rate, grpo@8, positive, balance+log.
    column = [float(row[2]) for row in lines_after(shown, "draws")[1:]]
    np.testing.assert_allclose(column, draws, atol=0.005)


def test_estimate_shares_one_budget(tmp_path):
    folder = tmp_path / "out"
    flag = ("--strategy=estimate", "--objective=log", "--objective_epsilon=1e-9", "--budget=7")
    run(*flag, "--pass_rates=0.04,0.16,0.64", f"--output={folder}")
    # 1 / sqrt(p) is 5, 2.5, 1.25.
    assert result(folder)["exact"]["estimate"]["draws"] == [12, 6, 3]


def test_certain_prompts_and_what_is_not_finite(tmp_path, capsys):
    folder = tmp_path / "out"
    run("--strategy=balance", "--pass_rates=0,0.5,1", f"--output={folder}")
    exact = result(folder)["exact"]["balance"]
    assert exact["signal"][0] is None and exact["zero_signal"] == [1.0, pytest.approx(0, abs=1e-8), 1.0]
    assert lines_after(capsys.readouterr().out, "pass rate")[0][1] == "32.00"


def test_a_config_file_and_flags_over_it():
    flag = (
        "--config=configs/tiny.py",
        "--config.collection.max_rounds=2",
        "--samples_per_round=4",
        "--strategy=balance",
    )
    shown = run_command(*flag, "--pass_rates=0.5", "--k_pos=1")
    assert (shown.returncode, shown.stderr) == (0, "")
    first = "balance: groups of 4, at most 8 draws, objective identity; rounds of 4 until 1 correct and 2 wrong"
    assert shown.stdout.splitlines()[0] == first
    # A second round of 4 follows where the first has no correct one, or fewer than 2 wrong: 0, 3 or 4 correct.
    assert lines_after(shown.stdout, "pass rate")[0][1] == f"{4 + 4 * 6 / 16:.2f}"


def test_a_users_strategy(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from reinforce_ada_jax.collection import strategies\n"
        "def pairs(config):\n    return strategies.fixed(2 * config.group_size)\n"
    )
    run(f"--strategy={file}:pairs", "--pass_rates=0.5")
    shown = capsys.readouterr().out
    assert lines_after(shown, "pass rate")[0][1] == "8.00"
    assert "pairs: groups of 4, at most 8 draws" in shown  # not the 32 of the settings, which it does not use


def test_the_command_loads_no_jax():
    code = "import sys, reinforce_ada_jax.simulate; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {"jax", "jaxlib", "flax"}.isdisjoint(loaded.split())


# ---- prompt sets -----------------------------------------------------------------------------------------------------


def test_a_prompt_set(prompt_file, tmp_path, capsys):
    folder = tmp_path / "out"
    flag = (f"--histogram={prompt_file}", "--pass_rates=0.5", "--tokens_per_response=10")
    run("--strategy=grpo,positive", *flag, f"--output={folder}")
    shown = capsys.readouterr().out
    assert "4 prompts of mean pass rate 0.388" in shown
    assert "2 lines without a pass_rate are left out: 6, 7\n" in shown
    found = result(folder)["prompt_set"]
    assert found["prompts"] == 4 and found["bins"] == [2, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    draws = [32, 8 * sum(0.95 ** (8 * j) for j in range(4)), 8 * (1 + 2**-8 + 2**-16 + 2**-24), 8]
    positive = found["positive"]
    assert positive["draws"] == pytest.approx(sum(draws)) and positive["draws_per_prompt"] == pytest.approx(
        sum(draws) / 4
    )
    assert positive["tokens"] == pytest.approx(10 * sum(draws))
    assert positive["unmet"] == pytest.approx((1 + 0.95**32 + 0.5**32) / 4)
    assert positive["rows"] == pytest.approx(16) and positive["draws_per_row"] == pytest.approx(sum(draws) / 16)
    assert (
        positive["draws_by_bin"][0] == pytest.approx((draws[0] + draws[1]) / 2) and positive["draws_by_bin"][1] is None
    )
    assert found["grpo"]["zero_signal"] == pytest.approx((1 + 0.95**4 + 0.05**4 + 2 / 16 + 1) / 4)
    assert lines_after(shown, "all prompts")[0][:3] == ["grpo", "16.00", "4.00"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["there is no file", "prompts.jsonl", "--histogram names a JSONL file"]),
        ('{"id": "a"}\n{"id": "b"}\n', ["none of the 2 lines", "has a pass_rate", "prepare"]),
        ('{"pass_rate": 0.5}\n{"pass_rate": 1.5}\n', ["line 2: pass_rate is 1.5", "[0, 1]"]),
        ('{"pass_rate": true}\n', ["line 1: pass_rate is True"]),
        ('{"pass_rate": 0.5}\n{"pass\n', ["line 2: not valid JSON"]),
    ],
    ids=["no file", "no rate", "out of range", "no number", "no JSON"],
)
def test_a_prompt_file_that_is_wrong(tmp_path, capsys, text, parts):
    file = tmp_path / "prompts.jsonl"
    if text:
        file.write_text(text)
    refused(capsys, [f"--histogram={file}"], parts)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def refused(capsys, arguments, parts) -> None:
    """One line that names rule, values and remedy, and nothing else."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    shown = capsys.readouterr()
    assert ended.value.code == cli.BAD_INPUT and shown.out == ""
    assert shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1
    for part in parts:
        assert part in shown.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--strategy=balnce"], ["'balnce'", "grpo, positive, balance", "file.py:function"]),
        (["--strategy=grpo,balance@16"], ["group_size is 16", "samples_per_round is 8"]),
        (["--strategy=balance+logarithm"], ["objective is 'logarithm'", "identity, log, power"]),
        (["--strategy=none.py:f"], ["there is no file 'none.py'"]),
        (["--pass_rates=0:1"], ["'0:1'", "0 < LOW < HIGH < 1", "comma list"]),
        (["--pass_rates=0.1:0.9:1"], ["at least 2 points"]),
        (["--pass_rates=0.1,1.1"], ["[0, 1]", "1.1"]),
        (["--pass_rates=many"], ["'many'", "LOW:HIGH:COUNT"]),
        (["--strategy=estimate", "--budget=40"], ["budget is 40", "at most 32"]),
        (["--strategy=ngu", "--max_draws=0", "--retry_probability=1"], ["retried forever", "set a limit"]),
        (["--objective=log", "--objective_epsilon=0"], ["objective_epsilon is 0", "above 0"]),
        (["--objective=power", "--objective_alpha=0"], ["objective_alpha is 0", "above 0"]),
        (["--study=objectives", "--strategy=balance"], ["balance plans none", "estimate+log"]),
        (["--study=objectives", "--strategy=estimate+log", "--pass_rates=0,0.5"], ["above 0 and below 1"]),
        (["--study=signal", "--pass_rates=0.5,1"], ["above 0 and below 1"]),
        (["--strategy=balance+log+exact", "--keep=pools"], ["keep is 'pools'"]),
        (["--study=epsilon", "--pass_rates=0,0.5"], ["--study=epsilon", "above 0 and below 1"]),
    ],
    ids=lambda value: " ".join(value[-1:]),
)
def test_mistakes(capsys, arguments, parts):
    refused(capsys, arguments, parts)


def test_a_mistake_at_the_terminal():
    shown = run_command("--study=why")
    assert shown.returncode == cli.BAD_INPUT and shown.stdout == ""
    assert shown.stderr == f"error: flag --study=why: value should be one of <{'|'.join(studies.STUDIES)}>\n"


# ---- studies ---------------------------------------------------------------------------------------------------------


def test_zero_variance(prompt_file, tmp_path, capsys):
    folder = tmp_path / "out"
    flag = ("--pass_rates=0.1,0.5", f"--histogram={prompt_file}", f"--output={folder}")
    run("--study=zero_variance", "--strategy=positive", *flag)
    shown = capsys.readouterr().out
    found = result(folder, "zero_variance")
    groups = [[p**n + (1 - p) ** n for p in (0.1, 0.5)] for n in found["group_sizes"]]
    np.testing.assert_allclose(found["groups"], groups, rtol=1e-12)
    first = lines_after(shown, "pass rate")[0]
    # n = 8 is the third of the sizes; `positive` stops at the first correct one, or after 32 wrong ones.
    assert first[3] == "0.4305" and first[-2] == f"{0.9**32 + 0.1**8:.4f}"
    assert "groups of one size that lose no more have n = 32, everywhere" in shown
    mean = [np.mean([1, 0.95**n + 0.05**n, 2 * 0.5**n, 1]) for n in found["group_sizes"]]
    np.testing.assert_allclose(found["prompt_set"], mean, rtol=1e-12)


def test_epsilon(tmp_path, capsys):
    folder = tmp_path / "out"
    run("--study=epsilon", "--pass_rates=0.02,0.1,0.5", f"--output={folder}")
    shown = capsys.readouterr().out
    found = result(folder, "epsilon")
    assert list(found["balance"]["bias"]) == [f"eps={eps:g}" for eps in (0, 1e-4, 1e-3, 1e-2, 3e-2, 0.1)]
    # 32 draws of which one is correct: no pool's pass rate is below 0.031 unless it is 0.
    np.testing.assert_allclose(found["balance"]["bias"]["eps=0.03"], found["balance"]["bias"]["eps=0"], rtol=1e-12)
    assert "balance, eps = 0.03: moves the gradient by more than a tenth nowhere" in shown
    assert "balance, eps = 0.1: moves the gradient by more than a tenth at p = 0.0200, 0.1000" in shown
    assert shown.count("shares of a budget are whole draws") == 1
    # `estimate` adds it to every pass rate: p / (p + eps) = 1/6 at 0.02, and a little more because 1 / sqrt(k/N + eps)
    # is drawn as well as N.
    ratio = found["estimate"]["bias"]["eps=0.1"][0] / found["estimate"]["bias"]["eps=0"][0]
    assert 1 / 6 < ratio < 0.3


def test_objectives_and_their_allocations(tmp_path, capsys):
    folder = tmp_path / "out"
    flag = ("--objective_epsilon=1e-9", "--budget=7", "--pass_rates=0.04,0.16,0.64", "--objective_k=2")
    run("--study=objectives", "--strategy=estimate+log", *flag, f"--output={folder}")
    found = result(folder, "objectives")
    p = np.array(found["pass_rates"])
    expected = {"identity": p, "log": np.log(p), "power(0.5)": [0.2, 0.4, 0.8], "pass_at_k(2)": 2 * p - p**2}
    assert list(found["f"]) == list(found["weight"]) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found["f"][name], values, rtol=1e-12)
    np.testing.assert_allclose(found["weight"]["log"], 1 / p, rtol=1e-12)
    np.testing.assert_allclose(found["weight"]["pass_at_k(2)"], 2 - 2 * p, rtol=1e-12)
    # 21 draws. 1 / sqrt(p) is 5, 2.5, 1.25. 1 / p is 25, 6.25 and (at its bound of 2) 1.6: 19 are left, 15.2 and 3.8.
    # sqrt((1 - p) / p) is 4.9, 2.3 and 0.75: at its bound again, and of 19 12.95 and 6.05.
    draws = found["draws"]["estimate+log"]
    assert draws == {"hybrid": [12, 6, 3], "sampling": [15, 4, 2], "variance": [13, 6, 2]}
    assert lines_after(capsys.readouterr().out, "pass rate")[0][:3] == ["0.0400", "0.0400", "-3.22"]


def markdown_tables(text: str) -> list[dict[str, list[str]]]:
    """The Markdown tables in a text: cells by the first one of their row."""
    tables = []
    for block in text.split("\n\n"):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
        tables += [{first: others for first, *others in rows}] if rows else []
    return tables


def test_what_strategies_climb(tmp_path, capsys):
    folder = tmp_path / "out"
    flag = ("--pass_rates=0.1,0.5", f"--output={folder}")
    run("--study=signal", "--strategy=grpo@4,balance,balance+log+exact,positive/1x32+log", *flag)
    shown = capsys.readouterr().out
    signals, draws, noise, _ = markdown_tables(shown)
    # log p cut at 32 draws: (1 - 0.9^32) / 0.1 = 9.66, (1 - 2^-32) / 0.5.
    assert signals == {
        "signal(p)": ["p = 0.1", "p = 0.5"], "---:": ["---:"] * 2,
        "**f' of identity**": ["1", "1"], "`grpo@4`": ["0.75", "0.75"],
        "`balance`": ["3.95", "1"], "balance, many draws": ["4.56", "1"],
        "**f' of log**": ["10", "2"], "`balance+log+exact`": ["9.66", "2"], "`positive/1x32+log`": ["9.66", "2"],
    }  # fmt: skip
    # Single draws until the first success are as many as the signal: the sum over j < 32 of (1 - p)^j.
    assert draws["`positive/1x32+log`"] == ["9.66", "2"] and draws["`grpo@4`"] == ["4", "4"]
    # n = 4, p = 1/2: the sum of A_i (r_i - p) is 4 times the variance of the group, of mean 3/4. It is 0 in 2 of 16
    # outcomes, 3/4 in 8, 1 in 6: (8 * 9/16 + 6) / 16 = 21/32, minus 9/16 is 3/32; times 4 over 9/16 is 2/3.
    assert noise["`grpo@4`"][1] == "0.667"
    assert "climbs: log(p / (1 - p)) / 2 - p" in shown
    found = result(folder, "signal")["exact"]["positive/1x32+log"]
    np.testing.assert_allclose(found["signal"], [(1 - 0.9**32) / 0.1, (1 - 2**-32) / 0.5], rtol=1e-12)


def test_balance_climbs_another_objective_than_the_pass_rate():
    p = np.array([0.05, 0.2, 0.5, 0.7, 0.95])
    limit = objective_studies.balance_limit(p)
    # The slope of log(p / (1 - p)) / 2 - p.
    step = 1e-6
    f = [np.log(x / (1 - x)) / 2 - x for x in (p - step, p + step)]
    np.testing.assert_allclose(limit, (f[1] - f[0]) / (2 * step), rtol=1e-6)
    # One round of 600 meets the rule, and its mean is not biased.
    settings = strategy_settings("balance/600x1", CollectionConfig())
    np.testing.assert_allclose(expectations(settings, p).signal, limit, rtol=1e-9)


def test_the_relative_signal_has_the_slope_of_the_objective_with_its_constant():
    # Exact up to the most draws, which are more than the 4 of 1 - (1 - p)^4.
    settings = strategy_settings("positive+pass_at_k+exact", CollectionConfig(objective_k=4))
    np.testing.assert_allclose(expectations(settings, np.array([0.1, 0.6])).relative_signal, 1.0, rtol=1e-12)


def test_the_strategies_that_the_study_shows_are_allowed():
    for entry in studies.STRATEGIES["signal"]:
        assert entry.startswith(strategy_settings(entry, CollectionConfig()).strategy)


def test_entries_name_sizes_objective_and_correction():
    section = strategy_settings("positive@6/1x32+log+exact", CollectionConfig())
    names = ("strategy", "group_size", "samples_per_round", "max_rounds", "objective", "correction")
    assert [getattr(section, name) for name in names] == ["positive", 6, 1, 32, "log", "exact"]
    section = strategy_settings("balance+none+log", CollectionConfig(max_rounds=7))
    assert [getattr(section, name) for name in names] == ["balance", 4, 8, 7, "log", "none"]
    assert strategy_settings("a/2x3/my+file.py:rounds@8", CollectionConfig()).strategy == "a/2x3/my+file.py:rounds"


def test_learning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(studies, "UPDATES", (1, 4))
    monkeypatch.setattr(studies, "DRAWS", (1000, 4000))
    monkeypatch.setattr(studies, "POPULATION", 64)
    folder = tmp_path / "out"
    run("--study=learning", f"--output={folder}")
    shown = capsys.readouterr().out
    found = result(folder, "learning")
    assert len(found["start"]) == 64 and np.mean(found["start"]) == pytest.approx(1 / 3, abs=1e-3)
    for title in ("gradients as they are", "gradients of equal lengths, as Adam makes them"):
        assert list(found[title]) == list(studies.STRATEGIES["learning"])
        assert all(1 / 3 < entry["by_update"][0] < entry["by_update"][1] < 1 for entry in found[title].values())
    # Draws are 8 a prompt on average with either strategy; 64 prompts an update.
    cells = {row[0]: row for row in lines_after(shown, "1 up.")}
    assert cells["grpo@8"][-2] == cells["estimate+log"][-2] == "8.0" and cells["grpo@4"][-2] == "4.0"
    assert shown.count("Farthest after 4 updates: ") == 2
    assert math.isclose(
        float(cells["grpo@4"][1]), found["gradients as they are"]["grpo@4"]["by_update"][0], abs_tol=5e-4
    )
