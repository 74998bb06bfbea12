"""`benchmark`: its figures, from the lines of two runs, and what it says where a run fails."""

import json
import pathlib
import sys

import pytest
from absl import flags

from reinforce_ada_jax import benchmark, cli
from tests import forked, standins
from tests.running import environment, refused

SMALL = ["--config=configs/tiny.py", "--config.sampling.slots=32", "--config.collection.prompts_per_iteration=8",
         "--config.learning.prompts_per_update=8"]  # fmt: skip


def line(tokens: float, collect_s: float, update_s: float) -> str:
    """A line of metrics.jsonl with what is read from it."""
    keys = {"collection/tokens": tokens, "time/collect_s": collect_s, "time/update_s": update_s}
    return json.dumps(keys | {"collection/slot_utilisation": 0.5, "memory/peak_bytes": 0}) + "\n"


def test_first_iterations_are_left_out(monkeypatch):
    # Seconds to the first token, and the metrics of three iterations: the first compiles.
    runs = iter([(9.0, [(100, 50, 20), (100, 2, 1), (100, 4, 1)]), (3.0, [(100, 40, 20), (100, 5, 2), (100, 10, 3)])])
    caches = []

    def seconds_until(sign, command, environment):
        assert sign == "first token" and "JAX_COMPILATION_CACHE_DIR" not in environment
        caches.append(next(argument for argument in command if "compilation_cache" in argument))
        workdir = pathlib.Path(next(word for word in command if word.startswith("--workdir=")).partition("=")[2])
        seconds, iterations = next(runs)
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text("".join(line(*one) for one in iterations))
        return seconds

    monkeypatch.setattr(benchmark, "seconds_until", seconds_until)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    found = benchmark.measure(SMALL, 3)
    assert (found["first_token_cold_s"], found["first_token_warm_s"]) == (9.0, 3.0)
    assert found["tokens_per_s"] == 22.5  # the median of 50, 25, 20 and 10
    assert (found["collect_s"], found["update_s"]) == (4.5, 1.5)
    assert "device_peak_bytes" not in found and caches[0] == caches[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how ml_collections loads a file
def test_settings_reach_the_runs_in_every_form_of_a_flag(monkeypatch):
    # The words that begin with "config" alone would lose the first two values, and the third setting.
    given = ["--config", "tiny", "--config.sampling.slots", "32", "--noconfig.collection.barrier", "--iterations=2"]
    values = flags.FlagValues()
    cli.config_flag(values, "")
    flags.DEFINE_integer("iterations", 3, "", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    values(sys.argv)
    expected = ["--config=tiny", "--config.collection.barrier=False", "--config.sampling.slots=32"]
    assert sorted(benchmark.settings_of(values)) == sorted(expected)


def test_a_run_that_fails_is_said(monkeypatch, capsys):
    error = RuntimeError("'train' ended with exit code 2 before 'first token': ")
    standins.failing(monkeypatch, benchmark, "seconds_until", error)
    assert "ended with exit code 2" in refused(capsys, benchmark.main, SMALL, 3, None, code=cli.STOPPED).err


@pytest.mark.slow
def test_the_figures_of_a_run(tmp_path):
    command = ["-m", "reinforce_ada_jax.benchmark", *SMALL, "--iterations=2", f"--json={tmp_path}/out.json"]
    done = forked.run(command, environment())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert 0 < found["first_token_warm_s"] < found["first_token_cold_s"]
    assert found["tokens_per_s"] > 0 and found["update_s"] > 0 and found["process_peak_bytes"] > 1e8
