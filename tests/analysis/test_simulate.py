"""The command `simulate`: its tables against closed forms, its files, and what it says of a user's mistakes."""

import dataclasses
import json
import types
import warnings

import numpy as np
import pytest
from absl import flags

from reinforce_ada_jax import cli, simulate
from reinforce_ada_jax.analysis.enumeration import expectations, progress
from reinforce_ada_jax.analysis.inputs import strategy_settings
from reinforce_ada_jax.config import CollectionConfig
from tests.running import refused, run_python


def run(*arguments: str, command: types.ModuleType = simulate) -> None:
    """The command in this process."""
    values = flags.FlagValues()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how ml_collections loads a file
        command.define_flags(values)
        values(["command", *arguments])
    command.main(values)


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
    """The table has the closed forms of fixed groups."""
    run("--strategy=grpo", "--group_size=8", "--pass_rates=0.1,0.5", "--tokens_per_response=500")
    shown = capsys.readouterr().out
    assert shown.startswith("grpo: groups of 8, at most 8 draws, objective identity\n")
    # 0.9^8 + 0.1^8 = 0.43046722, 2 / 2^8 = 0.0078; signal 1 - 1/8; tokens 8 * 500.
    first, second = lines_after(shown, "pass rate")
    assert first[:7] == ["0.1000", "8.00", "0.0000", "1.00", "0.0000", "0.4305", "0.4305"]
    assert second[5:11] == ["0.0078", "0.0078", "4.00", "4.00", "0.5000", "0.8750"]
    assert first[-1] == second[-1] == "4,000"


@pytest.mark.slow  # test_a_prompt_set has two strategies, with files
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


def test_estimate_shares_one_budget(capsys):
    flag = ("--strategy=estimate", "--objective=log", "--objective_epsilon=1e-9", "--samples_per_round=7")
    run(*flag, "--pass_rates=0.04,0.16,0.64")
    # 1 / sqrt(p) is 5, 2.5, 1.25.
    assert [row[1] for row in lines_after(capsys.readouterr().out, "pass rate")] == ["12.00", "6.00", "3.00"]


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
    shown = run_python("-m", "reinforce_ada_jax.simulate", *flag, "--pass_rates=0.5", "--k_pos=1")
    assert (shown.returncode, shown.stderr) == (0, "")
    first = "balance: groups of 4, at most 8 draws, objective identity; rounds of 4 until 1 correct and 2 wrong"
    assert shown.stdout.splitlines()[0] == first
    # A second round of 4 follows where the first has no correct one, or fewer than 2 wrong: 0, 3 or 4 correct.
    assert lines_after(shown.stdout, "pass rate")[0][1] == f"{4 + 4 * 6 / 16:.2f}"


def test_a_users_strategy(tmp_path, capsys):
    """A strategy from a file of the user has its row."""
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
    loaded = run_python("-c", code).stdout.split()
    assert "reinforce_ada_jax.simulate" in loaded and {"jax", "jaxlib", "flax"}.isdisjoint(loaded)


# ---- prompt sets -----------------------------------------------------------------------------------------------------


def test_a_prompt_set(prompt_file, tmp_path, capsys):
    """A file of prompts is a histogram, and each strategy has its draws over it."""
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
    # Relative to the first strategy, by the same formula.
    assert found["grpo"]["progress"] == found["grpo"]["progress_log"] == 1.0
    sections = [dataclasses.replace(CollectionConfig(), strategy=name) for name in ("positive", "grpo")]
    own, first = (progress(expectations(section, np.array([0.0, 0.05, 0.5, 1.0]))) for section in sections)
    assert [positive["progress"], positive["progress_log"]] == pytest.approx([own[0] / first[0], own[1] / first[1]])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["there is no file", "prompts.jsonl", "--histogram names a JSONL file"]),
        ('{"id": "a"}\n{"id": "b"}\n', ["none of the 2 lines", "has a pass_rate", "prepare"]),
        ('{"pass_rate": 0.5}\n{"pass_rate": 1.5}\n', ["line 2: pass_rate is 1.5", "[0, 1]"]),
        ('{"pass_rate": true}\n', ["line 1: pass_rate is True"]),
        ('{"pass_rate": 0.5}\n{"pass\n', ["line 2: not valid JSON"]),
        ('{"pass_rate": 0.5}\n' + "[" * 10**5 + "]" * 10**5 + "\n", ["line 2: not valid JSON"]),
    ],
    ids=["no file", "no rate", "out of range", "no number", "no JSON", "nested"],
)
def test_a_prompt_file_that_is_wrong(tmp_path, capsys, text, parts):
    file = tmp_path / "prompts.jsonl"
    if text:
        file.write_text(text)
    check_refusal(capsys, [f"--histogram={file}"], parts)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def check_refusal(capsys, arguments, parts) -> None:
    """One line that names rule, values and remedy, and nothing else."""
    shown = refused(capsys, run, *arguments)
    assert shown.out == "" and shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1
    for part in parts:
        assert part in shown.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--strategy=balnce"], ["'balnce'", "grpo, positive, balance", "file.py:function"]),
        (["--strategy=grpo@x"], ["'grpo@x' does not have the form NAME@n/MxN+WORD", "balance@4/8x4+log"]),
        (["--strategy=balance/8"], ["'balance/8' does not have the form"]),
        (["--strategy=grpo,balance@16"], ["group_size is 16", "samples_per_round is 8"]),
        (["--strategy=balance+logarithm"], ["objective is 'logarithm'", "identity, log, power"]),
        (["--strategy=none.py:f"], ["there is no file 'none.py'"]),
        (["--pass_rates=0:1"], ["'0:1'", "0 < LOW < HIGH < 1", "comma list"]),
        (["--pass_rates=0.1:0.9:1"], ["2 to 10,000 points"]),
        (["--pass_rates=0.1,1.1"], ["[0, 1]", "1.1"]),
        (["--pass_rates=many"], ["'many'", "LOW:HIGH:COUNT"]),
        (["--strategy=estimate", "--max_draws=6"], ["samples_per_round is 8", "at most 6"]),
        (["--strategy=ngu", "--max_draws=0", "--retry_probability=1"], ["retried forever", "set a limit"]),
        (["--objective=log", "--objective_epsilon=0"], ["objective_epsilon is 0", "above 0"]),
        (["--objective=power", "--objective_alpha=0"], ["objective_alpha is 0", "above 0"]),
        (["--strategy=balance+log+exact", "--keep=pools"], ["keep is 'pools'"]),
    ],
    ids=lambda value: " ".join(value[-1:]),
)
def test_mistakes(capsys, arguments, parts):
    """A wrong flag is named, with what is allowed."""
    check_refusal(capsys, arguments, parts)


def test_a_mistake_at_the_terminal():
    shown = run_python("-m", "reinforce_ada_jax.simulate", "--group_size=why")
    assert shown.returncode == cli.BAD_INPUT and shown.stdout == ""
    assert shown.stderr == "error: --group_size is 'why'; it must be a whole number.\n"


def test_the_relative_signal_has_the_slope_of_the_objective_with_its_constant():
    # Exact up to the most draws, which are more than the 4 of 1 - (1 - p)^4.
    settings = strategy_settings("positive+pass_at_k+exact", CollectionConfig(objective_k=4))
    np.testing.assert_allclose(expectations(settings, np.array([0.1, 0.6])).relative_signal, 1.0, rtol=1e-12)


def test_entries_name_sizes_objective_and_correction():
    section = strategy_settings("positive@6/1x32+log+exact", CollectionConfig())
    names = ("strategy", "group_size", "samples_per_round", "max_rounds", "objective", "correction")
    assert [getattr(section, name) for name in names] == ["positive", 6, 1, 32, "log", "exact"]
    section = strategy_settings("balance+none+log", CollectionConfig(max_rounds=7))
    assert [getattr(section, name) for name in names] == ["balance", 4, 8, 7, "log", "none"]
    assert strategy_settings("a/2x3/my+file.py:rounds@8", CollectionConfig()).strategy == "a/2x3/my+file.py:rounds"
