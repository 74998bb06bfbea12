"""A user's reward: named as file.py:function, checked without being run here, run in the workers."""

import sys
import time

import pytest

from reinforce_ada_jax.rewards import loading
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Verdict
from tests.running import tiny

MINE = """
import time
import beside
from reinforce_ada_jax.types import Verdict

def grade(response, answer):
    match response:
        case "raise":
            raise KeyError(answer)
        case "nan":
            return float("nan")
        case "hang":
            while True:
                pass
        case "none":
            return None
        case "half":
            return beside.HALF
        case "verdict":
            return Verdict(True, 1.0, "partial")
    return response == answer
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("HALF = 0.5\n")
    return f"{tmp_path / 'mine.py'}:grade"


def configured(path, **reward):
    settings = {"path": path, "workers": 2, "time_limit_s": 1.0} | reward
    return tiny(**{f"reward.{key}": value for key, value in settings.items()})


def test_everything_that_a_function_may_do_is_settled(mine):
    responses = ["a", "raise", "nan", "hang", "b", "none", "half", "verdict", "a"]
    with components_lib.verifier_pool(configured(mine)) as pool:
        verdicts = pool.grade_all([(response, "a") for response in responses])
    error = Verdict(False, 0.0, "error")
    assert verdicts == [
        Verdict(True, 1.0),
        error,
        error,
        Verdict(False, 0.0, "timeout"),
        Verdict(False, 0.0),
        error,
        Verdict(False, 0.5),
        Verdict(True, 1.0, "partial"),
        Verdict(True, 1.0),
    ]
    assert not {"mine", "beside"} & sys.modules.keys()
    # Half a reward is correct where the threshold says so.
    assert [Shaping(threshold)(verdicts[6], 1).correct for threshold in (0.4, 0.7)] == [True, False]


def test_a_relative_path_is_of_the_directory_at_the_start(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = VerifierPool("mine.py:grade", workers=1, time_limit_s=1.0)
    monkeypatch.chdir("/")
    with pool:
        assert pool.grade_all([("a", "a")]) == [Verdict(True, 1.0)]


FORMS = """
raise SystemExit("run in the parent")
from somewhere import imported, other as renamed
assigned = lambda response, answer: 1.0
if True:
    def conditional(response, answer): ...
else:
    def otherwise(response, answer): ...
try:
    def tried(response, answer): ...
except ImportError:
    def fallback(response, answer): ...
with contextlib.suppress(ImportError):
    def within(response, answer): ...
annotated: object = renamed
first, (second, FORMS["item"]) = renamed, (renamed, 1)
class Called:
    def method(self): ...
def outer():
    def inner(response, answer): ...
"""


def test_the_parent_checks_a_file_without_running_it(tmp_path):
    file = tmp_path / "forms.py"
    file.write_text(FORMS)
    forms = "imported renamed assigned conditional otherwise tried fallback within annotated first second Called outer"
    for name in forms.split():
        assert loading.file_reference(f"{file}:{name}") == f"{file}:{name}"
    for name in ("inner", "method", "other", "absent", "FORMS"):
        with pytest.raises(ValueError, match=rf"defines no '{name}' \(it defines imported, renamed, assigned, "):
            loading.file_reference(f"{file}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:grade", "there is no file .*absent.py"),
        ("broken.py:grade", "broken.py is not valid Python: .*line 2"),
        ("null.py:grade", "null.py is not valid Python"),
        ("loose.py:grade", "loose.py is not valid Python: .*outside function"),
        ("empty.py:grade", r"empty.py defines no 'grade' \(it defines nothing\)"),
        ("empty.py", "in a file is named file.py:function"),
        ("empty.txt:grade", "in a file is named file.py:function"),
        ("empty.py:a.b", "in a file is named file.py:function"),
    ],
)
def test_a_reference_that_is_wrong_is_an_error_before_anything_starts(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("x = 1\ndef grade(:\n")
    (tmp_path / "null.py").write_bytes(b"x = '\0'\n")
    (tmp_path / "loose.py").write_text("return 3\ndef grade(r, a): ...\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=message):
        components_lib.verifier_pool(configured(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import a_package_that_is_not_there\ndef grade(r, a): ...\n", "(?s)cannot start.*a_package_that_is_not_there"),
        ("grade = 3\n", "(?s)cannot start.*is 3, not a function"),
        ("def grade(r, a): ...\nimport sys\nsys.exit(4)\n", r"(?s)SystemExit: 4 \(.*failing.py, line 3\)"),
    ],
)
def test_a_file_that_fails_when_it_is_run_is_an_error_at_once(text, message, tmp_path):
    (tmp_path / "failing.py").write_text(text)
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=message),
        VerifierPool(f"{tmp_path / 'failing.py'}:grade", workers=1, time_limit_s=1.0),
    ):
        pass
    assert time.monotonic() - start < 30.0


def test_a_file_is_never_run_in_the_parent(mine):
    with pytest.raises(ValueError, match="workers is 0 .* it is run in workers only"):
        VerifierPool(mine, workers=0, time_limit_s=1.0)


def test_a_file_may_have_the_name_of_a_module(tmp_path):
    # What is called like a module of the standard library must not stand in its place.
    (tmp_path / "math.py").write_text("import math\ndef grade(response, answer):\n    return math.sqrt(1.0)\n")
    with VerifierPool(f"{tmp_path / 'math.py'}:grade", workers=1, time_limit_s=1.0) as pool:
        assert pool.grade_all([("", "")]) == [Verdict(True, 1.0)]


def test_a_file_may_define_dataclasses(tmp_path):
    # They look their module up by its name, which a module of the standard library has already.
    (tmp_path / "statistics.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nimport statistics\n"
        "@dataclasses.dataclass\nclass Half:\n    value: float = statistics.mean([0, 1])\n"
        "def grade(response, answer):\n    return Half().value\n"
    )
    with VerifierPool(f"{tmp_path / 'statistics.py'}:grade", workers=1, time_limit_s=1.0) as pool:
        assert pool.grade_all([("", "")]) == [Verdict(False, 0.5)]


def test_a_benchmark_has_the_grader_that_the_configuration_gives_it(tmp_path):
    (tmp_path / "minerva_math.jsonl").write_text('{"id": "0", "problem": "?", "answer": "2.197e-3"}\n')
    benchmarks = (str(tmp_path / "minerva_math.jsonl"),)
    config = tiny(**{"reward.kind": "gsm8k", "reward.workers": 1, "evaluation.benchmarks": benchmarks})
    with components_lib.verifier_pool(config) as pool:
        pairs = [(r"\boxed{2.2 \times 10^{-3}}", "2.197e-3")]
        assert pool.grade_all(pairs, "minerva") == [Verdict(True, 1.0)]
        assert pool.grade_all([("#### 7", "7")]) == [Verdict(True, 1.0)]


def test_workers_keep_off_the_accelerator(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    (tmp_path / "where.py").write_text(
        "import os\ndef grade(response, answer):\n    return os.environ['JAX_PLATFORMS'] == 'cpu'\n"
    )
    with VerifierPool(f"{tmp_path / 'where.py'}:grade", workers=1, time_limit_s=1.0) as pool:
        assert pool.grade_all([("", "")]) == [Verdict(True, 1.0)]
