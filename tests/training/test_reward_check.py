"""Rewards that are broken from the start, break later, or change between two starts of a run."""

import contextlib
import dataclasses

import numpy as np
import pytest

from reinforce_ada_jax import cli, train
from reinforce_ada_jax.evaluation import response_store
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import resume, reward_check
from reinforce_ada_jax.types import Prompt, Verdict
from tests.running import tiny

PROMPT = Prompt("p-1", "2 + 2?", "4", np.zeros(1, np.int32), columns={"level": 3, "answer": "so it is 4"})


def configured(file, function, **changes):
    path = f"{file}:{function}"
    return tiny(**{"reward.path": path, "reward.workers": 1, "reward.time_limit_s": 5.0} | changes)


def checked(config):
    return reward_check.check_reward(config, components_lib.verifier_pool(config), [PROMPT])


BROKEN = """
def grade(response, answer, level):
    return {0: 0.0, 1: 1 / 0, 2: None}[level]
def nothing(response, answer): pass
def text(response, answer): return "1.0"
def entries(response, answer): return [0.0]
def nan(response, answer): return float("nan")
def late(response, answer):
    while True: pass
def dies(response, answer):
    import os
    os._exit(7)
def zero(response, answer, level): return 0 * level
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("grade", r"ZeroDivisionError: division by zero \(.*mine.py, line 3\)\. Fix the function"),
        ("nothing", r"not None \(.*mine.py, line 4\)\. Fix the function"),
        ("text", r"not '1.0' \(.*mine.py, line 5\)"),
        ("entries", r"not \[0.0\] \(.*mine.py, line 6\)"),
        ("nan", r"a reward must be finite, not nan \(.*mine.py, line 7\)"),
        ("late", r"took more than 0.5 s \(reward.time_limit_s\)"),
        ("dies", r"ended its process with exit code 7"),
    ],
)
def test_a_broken_reward_is_refused_with_its_place(function, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    limit = {"reward.time_limit_s": 0.5} if function == "late" else {}
    with pytest.raises(
        ValueError, match=rf"cannot grade the reference answer '4' of problem 'p-1': .*{message}"
    ) as error:
        checked(configured(file, function, **limit))
    assert "\n" not in str(error.value)


def test_a_reward_of_0_is_fine_and_shown(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    config = configured(file, "zero")
    assert checked(config) == f"{file}:zero gives 0 to the reference answer '4' of problem 'p-1'"
    assert reward_check.check_reward(tiny(), components_lib.verifier_pool(tiny()), [PROMPT]) == ""


@pytest.mark.parametrize(
    ("template", "completions", "messages", "given"),
    [
        ("plain", "auto", (), "2 + 2?"),
        ("qwen_math", "auto", (), "2 + 2?"),
        ("chat", "auto", (), [("system", "Be short."), ("user", "2 + 2? Think.")]),
        ("chat", "text", (), "2 + 2?"),
        ("plain", "chat", (), [("user", "2 + 2?")]),
        ("qwen_math", "auto", ({"role": "user", "content": "own"},), [("user", "own")]),
        ("qwen_math", "text", ({"role": "user", "content": "own"},), "2 + 2?"),
    ],
)
def test_a_prompt_is_text_or_messages(template, completions, messages, given):
    texts = {"data.system": "Be short.", "data.instruction": "Think."} if template == "chat" else {}
    config = tiny(**{"data.template": template, "reward.completions": completions} | texts)
    columns = reward_check.reward_columns(config, dataclasses.replace(PROMPT, messages=messages))
    assert {name: columns[name] for name in ("id", "problem", "answer", "level")} == {
        "id": "p-1", "problem": "2 + 2?", "answer": "so it is 4", "level": 3  # the row's own column comes first
    }  # fmt: skip
    prompt = columns["prompt"]
    assert (prompt if isinstance(prompt, str) else [(each["role"], each["content"]) for each in prompt]) == given


def test_a_batch_that_failed_as_a_whole_is_said_with_the_first_traceback():
    pool = VerifierPool(str.__eq__, workers=0, time_limit_s=1.0)
    pool.failure = "KeyError: 'x' (mine.py, line 3)\n  File mine.py, line 3, in grade"
    failed, wrong = Verdict(False, 0.0, "error"), Verdict(False, 0.0, "no_answer")
    config = tiny(**{"reward.path": "mine.py:grade"})

    def said(*verdicts):
        return reward_check.too_many_failed(config, pool, "iteration 3", verdicts, "Fix it.")

    assert said() == said(failed, wrong) == said(wrong) == ""
    assert said(failed, Verdict(False, 0.0, "timeout"), Verdict(False, 0.0, "crash")) == (
        f"mine.py:grade could grade none of the 3 responses of iteration 3. The first failure:\n{pool.failure}\nFix it."
    )
    assert said(failed, wrong, failed) == (
        "mine.py:grade could not grade 2 of the 3 responses of iteration 3, more than the share of 0.5 "
        f"(reward.max_failed). The first failure:\n{pool.failure}\nFix it."
    )


def test_programs_are_checked_with_an_empty_one_and_their_isolation_is_said():
    config = tiny(**{"reward.kind": "code", "reward.workers": 1, "reward.time_limit_s": 20.0})
    prompt = dataclasses.replace(PROMPT, columns={"test_list": ["assert True", "assert f(1) == 1"]})
    text = reward_check.check_reward(config, components_lib.verifier_pool(config), [prompt])
    assert text.startswith("reward.kind=code gives 0.5 to an empty program for problem 'p-1'. Programs run ")


def test_a_problem_without_tests_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"problem": "Square it.", "tests": [{"input": "2", "output": "4"}]}\n{"problem": "Add."}\n')
    config = tiny(**{"reward.kind": "code", "reward.workers": 1, "data.prompts": str(file)})
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no tests: none of .* among its columns problem"):
        components_lib.load_problems(str(file), config)


def test_a_grader_that_compares_with_answers_needs_them(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"problem": "1 + 1?"}\n')
    settings = {"reward.kind": "math", "data.answer_column": "none"}
    with pytest.raises(ValueError, match="'none', but reward.kind=math compares responses with answers. Name the col"):
        components_lib.load_problems(str(file), tiny(**settings | {"data.prompts": str(file)}))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: no answer"):  # as a benchmark
        components_lib.load_problems(str(file), tiny(**settings))
    judged = tiny(**settings | {"reward.path": "mine.py:grade", "reward.workers": 1, "data.prompts": str(file)})
    assert components_lib.load_problems(str(file), judged)[0]["answer"] == ""


@pytest.mark.parametrize(("threshold", "which"), [(5.0, "none"), (1.0, "none"), (-0.1, "each")])
def test_a_threshold_that_tells_no_built_in_rewards_apart(threshold, which):
    config = tiny(**{"reward.positive_threshold": threshold})
    pool = components_lib.verifier_pool(config)
    with pytest.raises(
        ValueError, match=f"positive_threshold is {threshold:g}, and .* are 0 to 1: {which} would count"
    ):
        reward_check.check_reward(config, pool, [])
    assert reward_check.check_reward(config, pool, [], "reward") == ""  # a function's rewards may have any size


def test_rewards_that_are_all_below_the_threshold_are_said():
    config = tiny(**{"reward.positive_threshold": 5.0})

    def said(*rewards):
        return reward_check.none_above_threshold(config, [Verdict(reward > 5, float(reward)) for reward in rewards])

    assert said(0, 0) == said(0, 6) == said() == ""
    assert said(0, 1, 4).startswith("none of 3 responses counts as correct: rewards are 0 to 4, and ")


def test_a_grader_that_finds_no_answer_is_said():
    verdicts = [Verdict(False, 0.0, "no_answer")] * 9 + [Verdict(True, 1.0)]
    assert reward_check.share_without_answer(verdicts) == 0.9 and reward_check.share_without_answer([]) == 0.0
    said = reward_check.without_answer("math", 0.9, " to gsm20", "--flag")
    assert said.startswith(r"90% of the responses to gsm20 have no \boxed{}, and the grader 'math' reads nothing else.")
    assert said.endswith("choose another grader: --flag takes the last number.")
    assert reward_check.without_answer("math", 0.89, "", "") == ""
    assert reward_check.without_answer("gsm8k", 1.0, "", "") == ""  # it reads any number
    assert reward_check.without_answer("mine.py:grade", 1.0, "", "") == ""


def test_another_reward_file_is_refused_unless_it_is_accepted(tmp_path):
    ours = {"config": "c", "architecture": {}, "prompts": "a", "reward": "1", "base": None, "reference": None}
    ours |= {"code": ""}
    resume.check(tmp_path, tmp_path, ours, ours)
    with pytest.raises(ValueError, match=r"the reward \(.* is not the one .*checkpoint.accept_changed_reward"):
        resume.check(tmp_path, tmp_path, ours, ours | {"reward": "2"})
    resume.check(tmp_path, tmp_path, ours, ours | {"reward": "2"}, accept_reward=True)


def test_programs_that_must_pass_another_test_have_another_reward():
    config = tiny(**{"reward.kind": "code", "reward.workers": 1})

    def rewards(config, source, test):
        prompt = dataclasses.replace(PROMPT, columns={"source_of_row": source, "test_list": [test]})
        graded = response_store.graded_by(config, "", [prompt])
        return resume.reward_hash(config, [prompt]), graded

    before = rewards(config, "a", "assert f(1) == 1")
    assert rewards(config, "b", "assert f(1) == 1") == before, "no test reads this column"
    changed = rewards(config, "a", "assert f(1) == 2")
    assert changed[0] != before[0] and changed[1] != before[1]
    math = tiny(**{"reward.kind": "math"})
    assert rewards(math, "a", "assert f(1) == 1") == rewards(math, "a", "assert f(1) == 2")


def test_columns_are_part_of_a_reward_or_an_environment_that_gets_them(tmp_path):
    (tmp_path / "mine.py").write_text("def grade(response, hint):\n    return hint\n")
    prompts = [dataclasses.replace(PROMPT, columns={"hint": hint}) for hint in (0.5, 1.0)]
    for path, changes in (("reward.path", {}), ("environment.path", {"data.template": "chat"})):
        config = tiny(**{path: f"{tmp_path}/mine.py:grade", "reward.workers": 1} | changes)
        first, second = (resume.reward_hash(config, [prompt]) for prompt in prompts)
        assert first != second and first == resume.reward_hash(config, prompts[:1])
        first, second = (
            response_store.drawn_with(config, "", config.evaluation, 1, [prompt])
            | response_store.graded_by(config, "", [prompt])
            for prompt in prompts
        )
        assert first["columns"] != second["columns"]
    assert len({resume.reward_hash(tiny(), [prompt]) for prompt in prompts}) == 1, "built-in rewards get no columns"


# ---- whole runs ----------------------------------------------------------------------------------------------------

# As users of TRL and verl write them. One problem breaks the second, and every call but the first breaks the last.
REWARDS = """
def correct(completions, answer, **kwargs):
    print(completions[0])
    return [float(text == right) for text, right in zip(completions, answer)]

async def short(prompts, completions, id, **kwargs):
    if id == ["train-0084"]:
        raise LookupError("this one is not known")
    return [1.0 / (1 + len(completions[0]))]

def once(data_source, solution_str, ground_truth, extra_info=None):
    open(__file__ + ".graded", "x")
    return {"score": 1.0}
"""
SMALL = {
    "iterations": 1, "evaluation.every": 0, "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4,
    "sampling.slots": 32, "reward.workers": 1,
}  # fmt: skip


@pytest.fixture
def trained(capsys):
    """trained(workdir, path, exit code, more settings) -> what the command said at both outputs."""

    def trained(workdir, path, code=0, **more):
        ends = pytest.raises(SystemExit, match=str(code)) if code else contextlib.nullcontext()
        with ends:
            train.main(tiny(**SMALL | {"reward.path": path} | more), workdir)
        return capsys.readouterr()

    return trained


def test_rewards_of_other_programs_train_and_are_part_of_the_run(trained, tmp_path):
    file, workdir = tmp_path / "theirs.py", tmp_path / "run"
    file.write_text(REWARDS)
    both = {"path": f"{file}:correct,{file}:short=0.25", "reward.positive_threshold": 0.9}
    out, err = trained(workdir, **both)
    assert f"reward      {file}:correct,{file}:short=0.25 gives " in out and "first response, to problem 'train-" in err
    (metrics,) = writers.read_metrics(workdir)
    failed = metrics["collection/verifier_failures"] / metrics["collection/responses"]
    assert 0.0 < failed < 1.0 and f"not graded {failed:.1%}" in err and f"could not be graded ({failed:.1%})" in out
    graded = metrics["rewards/correct/mean"] + 0.25 * metrics["rewards/short/mean"]
    np.testing.assert_allclose(metrics["reward/pool"], (1.0 - failed) * graded, rtol=1e-6)
    printed = (workdir / "reward_output.log").read_text()
    assert printed.count("\n") >= metrics["collection/responses"] and "LookupError: this one is not known" in printed
    assert "LookupError" not in err

    file.write_text(REWARDS.replace("1.0 /", "2.0 /"))
    _, err = trained(workdir, code=cli.BAD_INPUT, **both | {"iterations": 2})
    assert "the reward (reward.path, environment.path, train(..., reward=), the columns" in err
    assert "Traceback" not in err


def test_responses_drawn_before_the_reward_changed_are_graded_again(trained, tmp_path):
    file, workdir = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("def grade(response, answer):\n    return 0.25\n")
    settings = {"path": f"{file}:grade", "collection.overlap": "finish"}
    trained(workdir, **settings)
    file.write_text("def grade(response, answer):\n    return 0.5\n")
    trained(workdir, **settings, **{"iterations": 2, "checkpoint.accept_changed_reward": True})
    first, second = writers.read_metrics(workdir)
    assert first["reward/pool"] == 0.25 and second["collection/ahead"] > 0
    assert second["reward/pool"] == 0.5, "some responses have a reward of the old function"


def test_a_run_stops_at_the_first_iteration_without_a_graded_response(trained, tmp_path):
    (tmp_path / "theirs.py").write_text(REWARDS)
    _, err = trained(tmp_path / "run", f"{tmp_path}/theirs.py:once", code=cli.STOPPED)
    assert "theirs.py:once could grade none of the" in err and "accept_changed_reward=True" in err
    assert err.count("in once") == 1 and "FileExistsError" in err and "reinforce_ada_jax/rewards" not in err
    assert writers.read_metrics(tmp_path / "run") == []
