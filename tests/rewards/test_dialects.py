"""Reward functions as users of TRL, verl, tunix and OpenAI write them (tests/rewards/dialects), unchanged."""

import pathlib
import re
from typing import Any

import pytest

from reinforce_ada_jax import user_code
from reinforce_ada_jax.rewards import dialects, grading, loading
from reinforce_ada_jax.rewards.dialects import InvalidReward
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.types import Verdict

FOLDER = pathlib.Path(__file__).parent / "dialects"
MESSAGES = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "36 times 2?"}]
# The columns of one row, under the names that these files expect.
ROW = {
    "question": "36 times 2?", "answer": "72", "solution": "72", "ground_truth": "72", "final": 72, "level": 3,
    "task": "math", "reference_answer": "72", "data_source": "openai/gsm8k", "extra_info": {"split": "test"},
    "reward_model": {"style": "rule", "ground_truth": "72"}, "prompt": "36 times 2?",
}  # fmt: skip
RESPONSES = {"so it is\n#### 72": 1.0, "so it is\n#### 71": 0.0, "72": 0.0, "": 0.0, "#### 72": 1.0}
FUNCTIONS = [
    "own.py:grade", "own_with_columns.py:grade", "trl_accuracy.py:accuracy_reward", "trl_chat.py:accuracy_reward",
    "trl_async.py:async_reward_func", "trl_multi_task.py:math_reward_func", "tunix_gsm8k.py:check_numbers",
    "verl_gsm8k.py:compute_score", "verl_custom.py:compute_score", "openai_grader.py:grade",
]  # fmt: skip


def function(reference):
    name, _, qualname = reference.partition(":")
    return getattr(user_code.run(FOLDER / name), qualname)


def reward(value):
    return value.reward if isinstance(value, Verdict) else value


@pytest.mark.parametrize("reference", FUNCTIONS)
def test_every_convention_gives_the_same_rewards(reference):
    call = dialects.adapt(function(reference))
    row = ROW | ({"prompt": MESSAGES} if reference.startswith("trl_chat") else {})
    assert {response: reward(call(response, "72", row)) for response in RESPONSES} == RESPONSES


def test_a_chat_has_messages_in_both_directions():
    call = dialects.adapt(function("trl_chat.py:format_reward_func"))
    tagged = "<think>2 * 36</think><answer>72</answer>"
    assert [call(text, "72", {"prompt": MESSAGES}) for text in (tagged, "72")] == [1.0, 0.0]


def test_columns_go_to_the_parameters_that_have_their_names():
    def own(response, answer, level, *, subject="none", **others):
        assert others == {"prompt": "?"}
        return {("3", "none"): 0.25, ("3", "algebra"): 0.5}[str(level), subject]

    def trl(completions, **columns):
        assert columns == {"answer": ["a"], "prompts": ["?"], "level": [3]}
        return [0.75]

    def verl(solution_str, ground_truth, extra_info, data_source, unknown=None):
        assert (ground_truth, extra_info, data_source, unknown) == (["a", "b"], {}, "", None)
        return True

    call = dialects.adapt(own)
    assert call("r", "a", {"level": 3, "prompt": "?"}) == 0.25
    assert call("r", "a", {"level": 3, "prompt": "?", "subject": "algebra", "answer": "ignored"}) == 0.5
    assert dialects.adapt(trl)("r", "a", {"level": 3, "prompt": "?"}) == 0.75
    assert dialects.adapt(verl)("r", "a", {"reward_model": {"ground_truth": ["a", "b"]}}) == 1.0
    assert dialects.adapt(str.__eq__)("r", "r", {}) == 1.0  # C code
    assert dialects.adapt(lambda *texts: len(texts))("r", "a", {"level": 3}) == 2.0


def unchecked(**fields: Any) -> Verdict:
    """A verdict with fields of other types, which the type checks of the tests would refuse."""
    verdict = Verdict(True, 1.0)
    for name, value in fields.items():
        object.__setattr__(verdict, name, value)
    return verdict


@pytest.mark.parametrize(
    ("defined", "columns", "message"),
    [
        (lambda response, answer: None, {}, "must return a Verdict, a number or a bool, not None"),
        (lambda response, answer: "1.0", {}, "not '1.0'"),
        (lambda response, answer: [1.0], {}, r"not \[1.0\]"),
        (lambda response, answer: float("nan"), {}, "must be finite, not nan"),
        (lambda response, answer: Verdict(True, float("inf")), {}, "must be finite, not inf"),
        (lambda response, answer: unchecked(reward="1.0"), {}, "reward of a Verdict must be a number, not '1.0'"),
        (lambda response, answer: unchecked(correct="no"), {}, "correct of a Verdict must be True or False, not 'no'"),
        (lambda response, answer: "x" * 1000, {}, r"not 'x{79}\.\.\."),
        (lambda response, answer, level: 1, {"type": 1}, "it needs level, and the problem has only type"),
        (lambda completions: 1.0, {}, "must return a list of one reward for each, not 1.0"),
        (lambda completions: None, {}, "a list of one reward for each, not None"),
        (lambda completions: [1.0, 0.0], {}, r"a list of one reward for each, not \[1.0, 0.0\]"),
        (lambda completions: ["1"], {}, "not '1'"),
        (lambda completions, solution: [1.0], {}, "it needs solution, and the problem has only answer, completions"),
        (lambda solution_str, ground_truth: {"acc": 1}, {}, r"must have 'score', not only \['acc'\]"),
        (lambda solution_str, ground_truth: {"score": None}, {}, "not None"),
        (lambda sample, item: None, {}, "not None"),
    ],
)
def test_what_is_no_reward_names_the_function(defined, columns, message):
    with pytest.raises(InvalidReward, match=rf"(?s){message}.*\({re.escape(__file__)}, line \d+\)"):
        dialects.adapt(defined)("r", "a", columns)


def test_a_function_of_one_text_is_refused():
    with pytest.raises(TypeError, match=r"takes \(response\), and is called with \(response, answer\)"):
        dialects.adapt(lambda response: 1.0)


@pytest.mark.parametrize("names", ["prompt, response, answer", "answer, response", "response, question, answer"])
def test_texts_in_another_order_are_refused(names):
    """By position the response would be the prompt, and the answer would be compared with itself."""
    defined = {}
    exec(f"def grade({names}): return 1.0", defined)
    with pytest.raises(TypeError, match="by position: let it take these two first"):
        dialects.adapt(defined["grade"])


def test_a_sum_leaves_out_what_does_not_apply():
    calls = [dialects.adapt(function(f"trl_multi_task.py:{name}_reward_func")) for name in ("math", "coding")]
    grade = grading.weighted(("math", "coding"), calls, (2.0, 0.5))

    def graded(task):
        verdict = grade("def f(): #### 72", "72", {"task": task, "final": "72"})
        return verdict, dict(verdict.rewards)

    assert graded("math") == (Verdict(True, 2.0), {"math": 1.0})
    assert graded("coding") == (Verdict(False, 0.5), {"coding": 1.0})
    assert graded("chess") == (Verdict(False, 0.0, "not_applicable"), {})  # 0, as in TRL, but with a reason


def test_spaces_around_a_weight_do_not_count():
    assert loading.split("own.py:grade = 0.5, b.py:f") == [("own.py:grade", 0.5), ("b.py:f", 1.0)]


def test_a_sum_that_is_not_finite_is_no_reward():
    grade = grading.weighted(("a", "b"), [lambda *_: 1e308, lambda *_: 1e308], (1.0, 1.0))
    with pytest.raises(dialects.InvalidReward, match="a reward must be finite, not inf"):
        grade("x", "y", {})


def test_a_pool_adds_the_functions_of_several_files(tmp_path):
    # The functions of four conventions and a print, in one worker.
    (tmp_path / "printing.py").write_text(
        "def length(response, answer):\n    print(response)\n    return len(response)\n"
    )
    path = ",".join(
        [f"{FOLDER}/tunix_gsm8k.py:check_numbers", f"{FOLDER}/verl_custom.py:compute_score=0.5",
         f"{FOLDER}/trl_async.py:async_reward_func=-0.25", f"{tmp_path}/printing.py:length=6.25e-2"]
    )  # fmt: skip
    output = tmp_path / "reward_output.log"
    with VerifierPool(path, 1, 10.0, output=output) as pool:
        right, wrong = pool.grade_all([("#### 72", "72", ROW), ("#### 71!", "72", ROW)])
    assert (right, wrong) == (Verdict(True, 1.0 + 0.5 - 0.25 + 7 / 16), Verdict(False, 0.5))
    names = ("check_numbers", "compute_score", "async_reward_func", "length")
    assert right.rewards == dict(zip(names, (1.0, 1.0, 1.0, 7.0), strict=True))
    assert output.read_text() == "#### 72\n#### 71!\n"
    # In the pool's own process, without columns.
    with VerifierPool(function("trl_async.py:async_reward_func"), workers=0, time_limit_s=1.0) as here:
        assert here.grade_all([("#### 72", "72")]) == [Verdict(True, 1.0)]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own.py:grade,openai_grader.py:grade=0.5", "names two functions 'grade'"),
        ("own.py:grade,absent.py:f", "there is no file .*absent.py"),
        ("own.py:grade=half", "reward.path has the weight 'half' in 'own.py:grade=half': it must be a finite number"),
        ("own.py:grade=nan", "the weight 'nan'"),
    ],
)
def test_several_functions_are_checked_without_running_them(path, message, monkeypatch):
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ValueError, match=message):
        VerifierPool(path, 1, 1.0)


def test_the_hash_of_files_is_of_their_text(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"def {name}(response, answer): return 1\n")
    one, both = f"{tmp_path}/a.py:a", f"{tmp_path}/a.py:a, {tmp_path}/b.py:b"
    before = [loading.files_hash(path) for path in (one, both, "")]
    assert len(set(before)) == 3 and before[2] == ""
    (tmp_path / "b.py").write_text("def b(response, answer): return 0\n")
    after = [loading.files_hash(path) for path in (one, both, "")]
    assert [then == now for then, now in zip(before, after, strict=True)] == [True, False, True]
