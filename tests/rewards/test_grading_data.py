r"""Grading against real data: `grading/` and `benchmarks/` of the folder that REINFORCE_ADA_DATA names.

`cases_dev.jsonl` holds pairs from the tests and outputs of other graders, with the verdict that each expects and the
one that Math-Verify 0.9.0 gives; `responses_dev.jsonl` ends of real responses with the score on record;
`hostile_dev.jsonl` responses that hang, abort or exhaust a grader.
"""

import itertools
import json
import os
import subprocess
import sys
import time

import pytest

from reinforce_ada_jax.rewards import gsm8k, math_answer, minerva
from reinforce_ada_jax.rewards.workers import VerifierPool
from tests.data.shared import FOLDER, MARKS
from tests.forked import children
from tests.running import ROOT

pytestmark = MARKS

LIMIT_S = 6.0


def rows(path):
    with open(FOLDER / path) as file:
        return [json.loads(line) for line in file]


def verdict(case):
    """Returns the verdict on a bare pair as a boxed response, or on two texts with the options in `config`."""
    if case["format"] == "bare":
        return math_answer.grade(rf"\boxed{{{case['pred']}}}", case["gold"])
    config = case["config"]
    kinds = ["latex", "expr"] if config["match_types"] == "default" else config["match_types"]
    names = [{"latex": "latex", "expr": "expression"}[kind] for kind in kinds]
    # Math-Verify's own cases, with its own rounding: what is put into other words first must not change them.
    pairs = itertools.product(*(math_answer.parse(math_answer.normalized(case[of]), names) for of in ("gold", "pred")))
    return math_answer.verdict(
        pairs,
        float_rounding=config.get("precision", math_answer.FLOAT_DECIMALS),
        strict=config.get("strict", True),
        allow_set_relation_comp=config.get("allow_set_relation_comp", False),
    )


def test_agreement_with_the_labels():
    cases = rows("grading/cases_dev.jsonl")
    wrong = {case["id"]: case for case in cases if verdict(case).correct != case["expected"]}
    lost = [case for case in wrong.values() if case["math_verify_0_9_0"] == case["expected"]]
    # Math-Verify drops an upright e, so that 1 - 1/e is 1 + 1/e to it; the file doubts this label.
    assert [case["gold"] for case in lost] == [r"$1 - \frac{1}{\mathrm{e}}$"]
    assert len(wrong) <= 0.02 * len(cases)
    # Four of these labels are doubted by the file itself; the fifth takes 0.29 for 0.29024.
    assert sorted(name.partition("-")[0] for name in wrong) == ["g0255", "g0292", "g0293", "g0296", "g0586"]


def test_agreement_with_scores_on_record():
    # Three responses run on long after their box, which the file has cut off: the answer that was read stands for them.
    responses = rows("grading/responses_dev.jsonl")
    texts = [
        row["tail"] if math_answer.last_boxed(row["tail"]) is not None else rf"\boxed{{{row['qwen_pred']}}}"
        for row in responses
    ]
    assert sum(text != row["tail"] for text, row in zip(texts, responses, strict=True)) == 3
    agree = [
        math_answer.grade(text, row["gt"]).correct == row["qwen_score"]
        for text, row in zip(texts, responses, strict=True)
    ]
    assert sum(agree) >= 399


def test_boxes_are_the_reference_programs_but_for_one():
    different = []
    for row in rows("grading/extraction_edge.jsonl"):
        boxed = math_answer.last_boxed(row["response"])
        boxed = None if boxed is None else boxed.strip()
        if boxed != row["train_extract"]:
            different.append((row["response"], row["train_extract"], boxed))
    # The last box that closes; its other extractor reads this one so, too.
    assert different == [(r"\boxed{1} then \boxed{2", None, "1")]


# The reference answers that equal nothing, not even themselves. minerva/72 has dollar signs in its middle.
UNREADABLE = {"minerva_math": ["minerva/72"]}


@pytest.mark.parametrize(
    ("benchmark", "grade"),
    [
        ("aime_like_160", math_answer.grade),
        ("math500", math_answer.grade),
        ("gsm8k_test", gsm8k.grade),
        pytest.param("olympiadbench", math_answer.grade, marks=pytest.mark.slow),
        pytest.param("minerva_math", math_answer.grade, marks=pytest.mark.slow),
        pytest.param("minerva_math", minerva.grade, marks=pytest.mark.slow),
        pytest.param("math_train", math_answer.grade, marks=pytest.mark.slow),
        pytest.param("gsm8k_train", gsm8k.grade, marks=pytest.mark.slow),
    ],
)
def test_every_reference_answer_equals_itself(benchmark, grade):
    failed = [
        row["id"]
        for row in rows(f"benchmarks/{benchmark}.jsonl")
        if not grade(rf"\boxed{{{row['answer']}}}", row["answer"]).correct
    ]
    assert failed == UNREADABLE.get(benchmark, [])


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("grade", [math_answer.grade, minerva.grade])
def test_hostile_responses_cost_only_themselves(grade):
    hostile = rows("grading/hostile_dev.jsonl")
    beside = (r"so it is \boxed{\frac{1}{2}}", "0.5")
    pairs = [pair for row in hostile for pair in ((row["response"], row["gold"]), beside)]
    before = children()
    with VerifierPool(grade, workers=2, time_limit_s=LIMIT_S) as pool:
        memory, start = resident_mib(), time.monotonic()
        verdicts = pool.grade_all(pairs)
        duration = time.monotonic() - start
        assert resident_mib() - memory < 20
        assert len(children()) <= len(before) + 2
    assert children() == before
    assert all(verdict.correct for verdict in verdicts[1::2])
    # Of two that wait for the limit at a time, each with a second for the worker that replaces the stuck one.
    stuck = sum(verdict.reason == "timeout" for verdict in verdicts)
    assert duration < (stuck / 2 + 1) * (LIMIT_S + 3.0) + 30.0
    judged = list(zip(hostile, verdicts[::2], strict=True))
    wider = [row["case"] for row, verdict in judged if verdict.correct and row["math_verify_0_9_0"]["score"] != "1.0"]
    # math_unicode.py reads a space without width, full-width digits, marks of direction, and a root.
    assert wider == ["unicode_zwsp", "unicode_fullwidth", "unicode_rtl", "unicode_sqrt"]
    for row, verdict in judged:
        # One sum of 5,000 ones is too long for us.
        assert verdict.correct or verdict.reason or row["math_verify_0_9_0"]["score"] == "0.0", row["case"]


@pytest.mark.slow
def test_an_iteration_is_graded_within_minutes():
    # 512 prompts of 32 responses: 12 s on two cores, 22 s on busy ones.
    pairs = [(row["tail"], row["gt"]) for row in rows("grading/responses_dev.jsonl")]
    pairs = (pairs * 41)[: 512 * 32]
    with VerifierPool(math_answer.grade, workers=2, time_limit_s=LIMIT_S) as pool:
        start = time.monotonic()
        pool.grade_all(pairs)
        assert time.monotonic() - start < 200.0


# In a process of its own: here the annotations of every function are executed, which takes longer than a grading.
ONE_BY_ONE = """
import json, statistics, sys, time
from reinforce_ada_jax.rewards import cipher
from reinforce_ada_jax.rewards.workers import VerifierPool

def median_s(pool, pairs):
    durations = []
    for pair in pairs:
        start = time.perf_counter()
        pool.grade_all([pair])
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)

pairs = [tuple(pair) for pair in json.load(sys.stdin)]
with VerifierPool(cipher.grade, workers=1, time_limit_s=6.0) as pool:
    print(min(median_s(pool, pairs) for _ in range(5)))
"""


def test_a_worker_adds_little_to_a_grading():
    # 0.08 to 0.22 ms where this was written. A process for each grading, or a wait between looks, takes far longer
    # than this limit; the best of five, because other processes share the cores.
    pairs = json.dumps([(row["tail"], row["gt"]) for row in rows("grading/responses_dev.jsonl")])
    result = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE], input=pairs, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert float(result.stdout) < 2e-3
