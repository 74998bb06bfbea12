"""The evaluation command: kills and resumes, failed rewards, graders, and what it refuses before it draws."""

import json
import os
import shutil
import signal

import pytest

from reinforce_ada_jax import cli, evaluate
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.evaluation import stored_evaluation
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training import components as components_lib
from tests import standins
from tests.forked import Forked
from tests.running import cipher_file, environment, killed_after, refused, tiny

MODEL = "package:cipher"
ENGINE = {"sampling.slots": 4, "sampling.window": 4}  # of all commands here: they share its programs


def run(benchmark, output, *, samples=2, regrade=False, initial=None, **changes):
    options = evaluate.Options(
        model=MODEL, benchmarks=[benchmark], samples=samples, output=str(output), regrade=regrade, initial=initial
    )
    evaluate.main(tiny(**ENGINE | changes), options)


@pytest.fixture
def words(tmp_path):
    """32 problems: with 4 slots, kills are in time."""
    return cipher_file(tmp_path / "words.jsonl", 32)


@pytest.fixture
def start(words):
    """start(output) -> the running command, 8 samples each."""
    flags = ["--config=configs/tiny.py", f"--model={MODEL}", f"--benchmarks={words}", "--samples=8"]
    flags += [f"--config.{key}={value}" for key, value in ENGINE.items()]
    env = environment(os.environ["XLA_FLAGS"])  # with the devices of this process: as many threads round alike

    def start(output):
        return Forked(["-m", "reinforce_ada_jax.evaluate", *flags, f"--output={output}"], env)

    return start


def test_killed_twice_it_ends_with_the_same_table(start, words, tmp_path, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(words, whole, samples=8)
    stored = broken / "words.jsonl"
    killed_after(start(broken), stored, 40)
    first = stored.read_bytes().count(b"\n")
    process = start(broken)
    err = killed_after(process, stored, first + 60, signal.SIGINT)
    assert process.returncode == cli.INTERRUPTED and "Traceback" not in err
    last = err.splitlines()[-1]
    assert last == "error: interrupted. Graded responses are stored; the same command again goes on from there."
    assert 100 <= stored.read_bytes().count(b"\n") < 32 * 8
    with stored.open("ab") as file:
        file.write(b'{"prompt": "heldout-0031", "dr')  # as a kill in the middle of a line leaves it
    capsys.readouterr()
    run(words, broken, samples=8)
    assert "of them stored)" in capsys.readouterr().out
    for name in ("table.md", "results.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(stored.read_bytes().splitlines()) == sorted((whole / "words.jsonl").read_bytes().splitlines())


REWARD = """
import time

def grade(response, answer):
    if answer == "raises":
        raise RuntimeError(response)
    if answer == "hangs":
        time.sleep(1000)
    return {"not a number": float("nan"), "fine": 1.0}[answer]
"""


def four_answers(file):
    """A benchmark of four problems whose answers say what the reward function above does."""
    answers = ("fine", "raises", "not a number", "hangs")  # the first one is graded before anything is drawn
    problems = zip(cipher.problems("heldout"), answers, strict=False)
    lines = [json.dumps(problem | {"answer": answer, "level": len(answer)}) for problem, answer in problems]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def test_rewards_that_fail_are_counted_and_can_be_graded_again(tmp_path, monkeypatch, capsys):
    reward, output = tmp_path / "mine.py", tmp_path / "out"
    reward.write_text(REWARD)
    benchmark = four_answers(tmp_path / "four.jsonl")
    changes = {"reward.path": f"{reward}:grade", "reward.workers": 2, "reward.time_limit_s": 0.5}
    # There are more failures than allowed; the responses are stored.
    shown = refused(capsys, run, benchmark, output, **changes, code=cli.STOPPED)
    assert "could not grade 6 of the 8 responses" in shown.err
    changes["reward.max_failed"] = 0.75
    run(benchmark, output, **changes)
    rows = [json.loads(line) for line in (output / "four.jsonl").read_text("utf-8").splitlines()]
    reasons = {(row["prompt"][-1], row["reason"], row["correct"]) for row in rows}
    assert len(rows) == 8
    assert reasons == {("0", "", True), ("1", "error", False), ("2", "error", False), ("3", "timeout", False)}
    results = json.loads((output / "results.json").read_text())
    assert results["evaluation/four/avg"] == 0.25 and results["evaluation/four/failure_share"] == 0.75
    assert results["evaluation/four/problems"] == 4  # their hash has a key of its own
    shown = capsys.readouterr().out
    assert "| four, level | problems |   avg |" in shown and "| 4           |        1 | 1.000 |" in shown

    # Once more there is nothing to draw, and no weight is read.
    before = (output / "table.md").read_text("utf-8")
    with monkeypatch.context() as patched:
        standins.not_called(patched, huggingface, "load")
        run(benchmark, output, **changes)
    assert before.removeprefix("## four\n\n") in capsys.readouterr().out
    assert before == (output / "table.md").read_text("utf-8")

    # The function is fixed: the stored verdicts are not its own any more.
    reward.write_text("def grade(response, answer): return answer != 'fine'")
    message = refused(capsys, run, benchmark, output, **changes).err
    assert "graded differently" in message and "file: " in message and "--regrade" in message

    for module, name in ((components_lib, "build"), (huggingface, "load"), (stored_evaluation, "Rollouts")):
        standins.not_called(monkeypatch, module, name)
    run(benchmark, output, regrade=True, **changes)
    shown = capsys.readouterr().out
    assert "| four      |        4 | 0.750 ± 0.250 |" in shown and "four: graded by " in shown and ", again\n" in shown
    now = [json.loads(line) for line in (output / "four.jsonl").read_text("utf-8").splitlines()]
    assert [row["response"] for row in now] == [row["response"] for row in rows]
    assert [row["correct"] for row in now] == [row["prompt"][-1] != "0" for row in now]
    assert json.loads((output / "results.json").read_text())["evaluation/four/failure_share"] == 0.0

    before = (output / "four.jsonl").read_bytes()
    message = refused(capsys, run, benchmark, output, samples=4, regrade=True, **changes).err
    assert f"--samples is 4, and {output / 'four.jsonl'} has 2 responses of each problem" in message
    assert before == (output / "four.jsonl").read_bytes()

    # Half of it: no table of that.
    (output / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in now[:5]))
    shown = refused(capsys, run, benchmark, output, regrade=True, **changes, code=cli.STOPPED)
    assert "(four 2 of 4): the same command without --regrade draws them" in shown.err


def test_accuracy_by_initial_difficulty(tmp_path, monkeypatch, capsys):
    # No response is "none".
    benchmark = cipher_file(tmp_path / "words.jsonl", 4, pass_rate=0.125, answer="none")
    now, before = tmp_path / "now", tmp_path / "before"
    run(benchmark, now)
    # Without an earlier evaluation, ranges are of the pass rates in the file.
    line = "| 0 to 0.25                |        4 |   0.125 | 0.000 ± 0.000 | -0.125 |"
    shown = capsys.readouterr().out
    assert "| words, initial pass rate | problems | initial |         avg@2 | change |" in shown and line in shown
    results = json.loads((now / "results.json").read_text())
    found = {key: value for key, value in results.items() if "initial" in key}
    assert found == {"evaluation/words/avg_initial_0_0.25": 0, "evaluation/words/problems_initial_0_0.25": 4}

    # An earlier evaluation: none, one, two and two of two right, as if by another policy.
    shutil.copytree(now, before)
    rows = [json.loads(line) for line in (now / "words.jsonl").read_text("utf-8").splitlines()]
    right = {("0001", 1), ("0002", 0), ("0002", 1), ("0003", 0), ("0003", 1)}
    lines = [json.dumps(row | {"correct": (row["prompt"][-4:], row["draw"]) in right}) + "\n" for row in rows]
    (before / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    standins.not_called(monkeypatch, huggingface, "load")
    run(benchmark, now, initial=str(before))
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith(("| 0  ", "| 0.25 ", "| 1  "))] == [
        "| 0                        |        1 |   0.000 |         0.000 | +0.000 |",
        "| 0.25 to 0.5              |        1 |   0.500 |         0.000 | -0.500 |",
        "| 1                        |        2 |   1.000 | 0.000 ± 0.000 | -1.000 |",
    ]
    run(benchmark, now, regrade=True, initial=str(before))
    assert "| 0.25 to 0.5              |        1 |   0.500 |         0.000" in capsys.readouterr().out

    (before / "words.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    assert "all its responses for 3 of 4 problems" in refusal(capsys, benchmark, now, initial=str(before))
    assert "--initial names the folder" in refusal(capsys, benchmark, now, initial=str(tmp_path))
    (tmp_path / "other").mkdir()
    other = cipher_file(tmp_path / "other" / "words.jsonl", 3)
    assert "responses to other problems" in refusal(capsys, other, tmp_path / "new", initial=str(before))


def refusal(capsys, *arguments, **options) -> str:
    """Runs a command that must end with BAD_INPUT; returns its message."""
    err = refused(capsys, run, *arguments, **options).err
    assert err.startswith("error: ") and len(err.splitlines()) < 15 and "Traceback" not in err
    return err


def bad_files(folder):
    good = cipher.problems("heldout")[0]
    contents = {
        "malformed": [json.dumps(good), "{"],
        "twice": [json.dumps(good), json.dumps(good)],
        "unanswered": [json.dumps({"id": "a", "problem": "А="})],
        "empty": [],
        "long": [json.dumps(good | {"problem": "А" * 30})],
    }
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("malformed", "malformed.jsonl, line 2: not valid JSON"),
        ("twice", "twice.jsonl, lines 1 and 2: both have id 'heldout-0000'"),
        ("unanswered", "unanswered.jsonl, line 1: no answer: none of"),
        ("empty", "empty.jsonl is empty"),
        ("long", "1 prompts have 31 to 31 tokens, limit 8: raise data.max_prompt_tokens"),
    ],
)
def test_benchmarks_that_cannot_be_read(tmp_path, capsys, name, message):
    bad_files(tmp_path)
    assert message in refusal(capsys, str(tmp_path / f"{name}.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_else_is_refused(tmp_path, capsys):
    benchmark, output = cipher_file(tmp_path / "words.jsonl", 2), tmp_path / "out"
    unknown = refusal(capsys, benchmark, output, **{"data.template": "fancy"})
    assert "data.template is 'fancy'; it must be one of plain, qwen_math, chat" in unknown
    misspelt = refusal(capsys, benchmark, output, **{"evaluation.graders": ("wrods=math",)})
    assert "no benchmark is called 'wrods': did you mean 'words'?" in misspelt
    nothing = refusal(capsys, benchmark, output, regrade=True)
    assert f"there are no stored responses {output / 'words.jsonl'}: evaluate without --regrade first" in nothing
    folder = shutil.copytree(components_lib.ASSETS / "cipher", tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"]["€"] = 133
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    options = evaluate.Options(model=str(folder), benchmarks=[benchmark], samples=1, output=str(output))
    shown = refused(capsys, evaluate.main, tiny(), options)
    assert "has 134 tokens, the model's embedding only 133 rows" in shown.err
    assert not output.exists()


def test_benchmarks_with_equal_ids_are_averaged_only_if_their_noise_differs(tmp_path, capsys):
    names = ("first.jsonl", "second.jsonl")
    benchmarks = [cipher_file(tmp_path / name, 4) for name in names]

    def stored(output):
        return [(tmp_path / output / name).read_text() for name in names]

    def both(output):
        options = evaluate.Options(model=MODEL, benchmarks=benchmarks, samples=4, output=str(tmp_path / output))
        evaluate.main(tiny(**ENGINE), options)

    for benchmark in benchmarks:
        run(benchmark, tmp_path / "apart", samples=4)
    first, second = stored("apart")
    assert first == second
    error = refused(capsys, both, "apart").err
    assert "second.jsonl holds responses that were drawn with other settings" in error and " stream: 1 -> " in error
    both("together")
    assert stored("together")[0] == first and stored("together")[1] != first


def test_a_copy_of_a_folder_with_stored_responses_is_not_the_newest(tmp_path):
    source = stored_evaluation.PolicySource(tmp_path, tmp_path)
    for name in ("000040", "000060-old"):
        (tmp_path / "evaluations" / name).mkdir(parents=True)
    assert source.newest_output() == tmp_path / "evaluations" / "000040"


def test_a_graders_entry_of_a_benchmark_that_is_not_evaluated_now_is_fine(tmp_path):
    config = tiny(**{"evaluation.graders": ("heldout=gsm8k", "words=cipher")})
    config = evaluate.with_flags(config, [str(tmp_path / "words.jsonl")], 3)
    assert config.evaluation.graders == ("words=cipher",) and config.evaluation.samples == 3


@pytest.mark.slow  # test_prepare.py draws from a folder with such a configuration
def test_a_folder_has_no_adapters_whatever_the_configuration_trains(tmp_path, words):
    # In bfloat16 the engine of a training decodes from a base and adapters.
    run(words, tmp_path / "out", samples=1, **{"lora.rank": 4, "model.compute_dtype": "bfloat16"})
    rows = (tmp_path / "out" / "words.jsonl").read_bytes().splitlines()
    assert len(rows) == 32


def test_stored_responses_keep_their_precision(tmp_path, words):
    """On a busy machine a measurement may choose another one for the same command."""
    run(words, tmp_path / "out", samples=1, **{"model.compute_dtype": "bfloat16"})
    before = (tmp_path / "out" / "words.jsonl").read_bytes()
    run(words, tmp_path / "out", samples=1, **{"model.compute_dtype": "auto"})  # float32 for a small model
    assert (tmp_path / "out" / "words.jsonl").read_bytes() == before


def test_a_run_is_evaluated_with_its_own_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text(config_lib.to_json(tiny()))

    def said(regrade=False, **changes):
        options = evaluate.Options(workdir=str(tmp_path), regrade=regrade)
        return refused(capsys, evaluate.main, tiny(**changes), options).err

    different = said(**{"seed": 1, "data.template": "chat", "reward.kind": "math", "mesh.data": 2})
    assert "holds a run of another configuration (saved -> now):\n" in different
    assert [line.strip() for line in different.splitlines()[1:-1]] == [
        "data.template: plain -> chat",
        "reward.kind: cipher -> math",
        "seed: 0 -> 1",
    ]
    own = "--config.data.template=plain --config.reward.kind=cipher --config.seed=0."
    assert different.endswith(f"Evaluate it with its own --config and values: {own}\n")
    assert "model.path: package:cipher -> x" in said(**{"model.path": "x"})
    # Slots, mesh and whatever else only decides how fast: the next thing that is wrong is that nothing was saved.
    free = {"mesh.data": 2, "sampling.slots": 3, "learning.learning_rate": 1.0, "evaluation.temperature": 0.5}
    assert "holds no checkpoint" in said(**free)
    # Another reward is what --regrade is for.
    assert "holds no stored responses" in said(regrade=True, **{"reward.kind": "math"})
