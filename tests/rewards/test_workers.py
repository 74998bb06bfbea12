"""The pool against checkers that hang, crash and lie (`graders.obedient` does what the response says)."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reinforce_ada_jax.config import Config, RewardConfig
from reinforce_ada_jax.isolation import workers as workers_lib
from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Pool, Prompt, Verdict
from tests import standins
from tests.forked import children
from tests.rewards import graders

RIGHT, WRONG = Verdict(True, 1.0), Verdict(False, 0.0)


def failed(reason):
    return Verdict(False, 0.0, reason)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def shared_pool():
    with VerifierPool(graders.obedient, workers=2, time_limit_s=1.0) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    yield shared_pool
    # Its lost workers start again beside what follows; other tests count processes.
    assert wait_until(lambda: all(worker.ready for worker in shared_pool._workers), limit_s=60.0)


def verdicts_beside(pool, hostile):
    return pool.grade_all([("a", "a"), (hostile, "x"), ("b", "a"), ("c", "c")])


@pytest.mark.parametrize("hostile", ["loop", "power", pytest.param("sleep", marks=pytest.mark.slow)])
def test_a_pair_that_never_ends_costs_only_itself(pool, hostile):
    assert verdicts_beside(pool, hostile) == [RIGHT, failed("timeout"), WRONG, RIGHT]


def test_a_hostile_pair_costs_only_itself():
    reasons = {"abort": "crash", "exit": "crash"}
    reasons |= dict.fromkeys(("raise", "system_exit", "recurse", "memory", "none", "nan", "text"), "error")
    # They end by themselves, also on a machine that is ten times slower.
    with VerifierPool(graders.obedient, workers=2, time_limit_s=60.0) as pool:
        found = {hostile: verdicts_beside(pool, hostile) for hostile in reasons}
    assert found == {hostile: [RIGHT, failed(reason), WRONG, RIGHT] for hostile, reason in reasons.items()}


def rewards_of(verdicts):
    """Rewards of a pool with these verdicts, as advantages have them."""
    return Pool(Prompt("p", "", "", np.zeros(1, np.int32)), (), tuple(verdicts), 1, True).rewards.tolist()


def test_a_failed_grading_is_no_better_than_a_wrong_answer():
    said = ["right", "wrong", "loop", "abort", "raise", "nan"]
    with VerifierPool(graders.strict, workers=2, time_limit_s=1.0) as pool:
        verdicts = pool.grade_all([(each, "right") for each in said])
    assert [verdict.reason for verdict in verdicts] == ["", "", "timeout", "crash", "error", "error"]
    # With 0 for a failure, whose mean is 0 here, only the wrong answer was discouraged.
    assert rewards_of(verdicts) == [1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    # Also in this process, which nothing can hang; and where all fail, none is better than the others.
    with VerifierPool(graders.strict, workers=0, time_limit_s=1.0) as pool:
        verdicts = pool.grade_all([("wrong", ""), ("raise", "")])
    assert rewards_of(verdicts) == [-1.0, -1.0]
    assert rewards_of(verdicts[1:]) == [0.0]


# The others are kinds of lines that are no JSON of a verdict, as pickles are.
@pytest.mark.parametrize(
    "written",
    [
        "a framed pickle",
        "a forged verdict",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("a pickle", "garbage", "a long line", "nested brackets")
        ),
    ],
)
def test_what_a_grading_writes_to_its_socket_costs_only_itself(pool, written):
    # Code of a model that a reward runs can find the socket. Unpickled, the first two would run code in this process.
    pairs = [("a", "a"), ("writes", written), ("b", "a"), ("c", "c")]
    assert pool.grade_all(pairs) == [RIGHT, failed("crash"), WRONG, RIGHT]
    assert not os.path.exists("unpickled")


def test_half_a_message_and_a_closed_socket_block_nothing(pool):
    begin = time.monotonic()
    pairs = [("a", "a"), ("writes_half", ""), ("b", "a"), ("closes", ""), ("c", "c")]
    assert pool.grade_all(pairs) == [RIGHT, failed("timeout"), WRONG, failed("crash"), RIGHT]
    assert time.monotonic() - begin < 30.0


def test_processes_that_leave_the_group_die_with_their_grading(pool, tmp_path):
    mark = f"# {tmp_path}"
    pairs = [("daemon_and_hang", mark), ("daemon_and_exit", mark), ("a", "a")]
    assert pool.grade_all(pairs) == [failed("timeout"), failed("crash"), RIGHT]
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in listing


def test_numbers_and_bools_become_verdicts(pool):
    assert pool.grade_all([("half", ""), ("bool", ""), ("infinite", "")]) == [
        Verdict(False, 0.5),
        RIGHT,
        failed("error"),
    ]


def test_a_call_may_ask_for_another_grader():
    for workers in (0, 1):
        with VerifierPool(graders.obedient, workers, 1.0, others={"opposite": graders.opposite}) as pool:
            assert pool.grade_all([("a", "a"), ("b", "a")]) == [RIGHT, WRONG]
            assert pool.grade_all([("a", "a"), ("b", "a")], "opposite") == [WRONG, RIGHT]
            assert pool.submit([("b", "a")], "opposite").result() == [RIGHT]
            assert pool.submit([("a", "a"), ("b", "a")], then=lambda verdicts: verdicts[::-1]).result() == [
                WRONG,
                RIGHT,
            ]
            with pytest.raises(ValueError, match="no grader 'gsm8k'; the others of this pool are: opposite"):
                pool.grade_all([("a", "a")], "gsm8k")


def test_order_is_kept(pool):
    """Verdicts come in the order of the pairs, also around failures."""
    pairs = [(str(i % 7), str(i % 3)) for i in range(200)]
    pairs[10] = pairs[60] = ("exit", "x")
    pairs[30] = ("loop", "x")
    expected = [RIGHT if response == answer else WRONG for response, answer in pairs]
    expected[10] = expected[60] = failed("crash")
    expected[30] = failed("timeout")
    assert pool.grade_all(pairs) == expected
    assert pool.grade_all([]) == []


def test_long_texts_and_all_of_unicode_arrive(pool):
    text = "Я\U0001f600\n\0" * 100_000
    assert pool.grade_all([(text, text), (text, text + "x")]) == [RIGHT, WRONG]


def test_a_pair_whose_worker_is_killed_from_outside_is_graded_again(pool):
    def busy():
        return [worker.child.process.pid for worker in pool._workers if worker.is_busy]

    # The killed worker was grading the first pair; another one does it again.
    with ThreadPoolExecutor(1) as thread:
        verdicts = thread.submit(pool.grade_all, [("wait", "wait"), ("b", "a")] * 3)
        for _ in range(2):
            time.sleep(0.2)
            assert wait_until(busy, limit_s=5.0)
            os.kill(busy()[0], signal.SIGKILL)
        assert verdicts.result() == [RIGHT, WRONG] * 3


def test_a_pair_that_kills_its_workers_is_not_graded_forever(pool):
    assert pool.grade_all([("a", "a"), ("suicide", ""), ("b", "a")]) == [RIGHT, failed("crash"), WRONG]


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_workers_killed_at_random_change_no_verdict(kills):
    """A thread kills a worker, whatever it does, whenever another one has come up."""
    pairs = [("pause" if number % 3 else str(number), str(number % 12)) for number in range(25 * kills)]
    wanted = [RIGHT if response == answer else WRONG for response, answer in pairs]
    assert 0 < wanted.count(RIGHT) < len(wanted)
    before, done, killed, random = children(), threading.Event(), [], np.random.default_rng(0)

    def kill(pool):
        starting = 0  # killed in a row while they started; after 20 the pool gives up
        while len(killed) < kills and not done.is_set():
            worker = pool._workers[random.integers(2)]
            victim, is_ready = worker.child, worker.ready
            is_up = any(worker.ready for worker in pool._workers) and (is_ready or starting < 10)
            if victim is not None and is_up and victim.process.pid not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.process.pid, signal.SIGKILL)
                    killed.append(victim.process.pid)
                    starting = 0 if is_ready else starting + 1
            time.sleep(0.1 * random.random())

    with VerifierPool(graders.obedient, workers=2, time_limit_s=60.0) as pool:
        killer = threading.Thread(target=kill, args=(pool,))
        killer.start()
        verdicts, rounds = [], 0
        try:
            while len(killed) < kills or not rounds:
                futures = [pool.submit(pairs[first : first + 50]) for first in range(0, len(pairs), 50)]
                verdicts = [verdict for future in futures for verdict in future.result()]
                assert verdicts == wanted
                rounds += 1
        finally:
            done.set()
            killer.join()
        last = [worker.child.process.pid for worker in pool._workers if worker.child is not None]
    assert len(killed) == kills
    assert children() == before and not any(map(is_running, {*killed, *last}))


def test_workers_persist(pool):
    """Workers grade many pairs each."""
    first = {verdict.reason for verdict in pool.grade_all([("pid", "")] * 20)}
    again = {verdict.reason for verdict in pool.grade_all([("pid", "")] * 20)}
    assert len(first | again) <= 2


def test_workers_that_died_between_two_calls_cost_nothing(pool):
    victims = children()
    assert len(victims) == 2
    for victim in victims:
        os.kill(int(victim), signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, victims)), limit_s=5.0)
    assert pool.grade_all([("a", "a")] * 4) == [RIGHT] * 4


def test_workers_see_what_they_should(pool):
    # Never jax (it would claim the accelerator), never the parent's main module (it may import jax), never gmpy2.
    modules, ground_types = pool.grade_all([("modules", ""), ("ground_types", "")])
    assert modules == Verdict(True, 1.0, "reinforce_ada_jax.rewards.worker")
    assert ground_types.reason == "python"


def test_what_a_checker_prints_harms_nothing(pool):
    assert pool.grade_all([("print", "a"), ("a", "a")]) == [WRONG, RIGHT]


def test_an_interrupted_call_leaves_nothing_behind(pool):
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.grade_all([("sleep", "x"), ("sleep", "x"), ("a", "a")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    # A pool that kept the stuck workers would answer these with the verdicts of the pairs before.
    assert pool.grade_all([("b", "a"), ("a", "a"), ("b", "a")]) == [WRONG, RIGHT, WRONG]


def test_no_process_outlives_the_block(tmp_path):
    before = children()
    mark = f"# {tmp_path}"  # in the command line of the process that the checker starts
    with VerifierPool(graders.obedient, workers=1, time_limit_s=0.5) as pool:
        assert pool.grade_all([("child", mark), ("exit", "x"), ("a", "a")]) == [
            failed("timeout"),
            failed("crash"),
            RIGHT,
        ]
        assert len(children()) == len(before) + 1
    assert children() == before
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in listing


@pytest.mark.parametrize("response", ["idle", "power"])
def test_workers_die_with_the_parent(response, tmp_path):
    # The parent is killed while its worker is idle (end of file ends it) or locked up in C (its own alarm does).
    program = (
        "import sys, time\n"
        "from tests.rewards import graders\n"
        "from reinforce_ada_jax.rewards import workers\n"
        "with workers.VerifierPool(graders.obedient, workers=1, time_limit_s=1.0) as pool:\n"
        "    print(pool.grade_all([('pid', '')])[0].reason, flush=True)\n"
        f"    pool.grade_all([({response!r}, '')])\n"
        "    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)  # it is in grade_all by now
        assert is_running(worker)
        parent.kill()
    assert wait_until(lambda: not is_running(worker), limit_s=15.0)


def test_a_module_that_cannot_be_imported_is_an_error_at_once(tmp_path, monkeypatch):
    (tmp_path / "checker_with_a_missing_dependency.py").write_text(
        "import sys\n"
        "if 'pytest' not in sys.modules:\n"
        "    import a_package_that_is_not_there\n"
        "def grade(response, answer): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    checker = importlib.import_module("checker_with_a_missing_dependency")

    before = children()
    pool = VerifierPool(checker.grade, workers=2, time_limit_s=1.0)
    with pytest.raises(RuntimeError, match=r"(?s)cannot start.*No module named 'a_package_that_is_not_there'"), pool:
        pass
    assert children() == before


def test_a_module_that_kills_its_worker_is_an_error_at_once(tmp_path, monkeypatch):
    (tmp_path / "checker_that_exits.py").write_text(
        "import os, sys\nif 'pytest' not in sys.modules:\n    os._exit(3)\ndef grade(response, answer): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    checker = importlib.import_module("checker_that_exits")

    with (
        pytest.raises(RuntimeError, match="3 verifier workers in a row did not start"),
        VerifierPool(checker.grade, 1, 1.0),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import absent\ndef grade(response, answer): ...", r"ModuleNotFoundError: .* 'absent' .*line 1\)"),
        ("def grade(response, answer): ...\n\n1 / 0", r"ZeroDivisionError: division by zero .*yours.py, line 3\)"),
        ("def grade(response): ...", r"yours.py:grade takes \(response\), and is called with \(response, answer\)"),
        ("import os\ndef grade(response, answer): ...\nos._exit(1)", r"3 verifier workers in a row did not start"),
        ("raise ValueError('a\\nb')\ndef grade(response, answer): ...", r"ValueError: a b .*line 1\)"),
        ("import json\ndef grade(response, answer): ...\njson.loads('x')", r"JSONDecodeError: .*yours.py, line 3\)"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_loaded_is_an_early_error_of_one_line(tmp_path, text, said):
    (tmp_path / "yours.py").write_text(text)
    before = children()
    pool = VerifierPool(f"{tmp_path}/yours.py:grade", workers=2, time_limit_s=1.0)
    with pytest.raises(ValueError, match=said) as error:
        pool.check()
    assert "\n" not in str(error.value) and f"{tmp_path}/yours.py:grade" in str(error.value)
    assert children() == before


def test_a_file_whose_import_never_ends_is_tried_once(tmp_path, monkeypatch):
    standins.constants(monkeypatch, workers_lib, TRIAL_LIMIT_S=0.5)
    starts = tmp_path / "starts"
    text = f"import time\nwith open({str(starts)!r}, 'a') as file:\n    file.write('.')\ntime.sleep(1e6)\n"
    (tmp_path / "yours.py").write_text(text + "def grade(a, b): ...")
    before = children()
    pool = VerifierPool(f"{tmp_path}/yours.py:grade", workers=2, time_limit_s=5.5)
    limit = r"its import took more than 6 s \(0.5 s and reward.time_limit_s\). .* or raise reward.time_limit_s"
    with pytest.raises(ValueError, match=f"cannot start with {tmp_path}/yours.py:grade: {limit}"):
        pool.check()
    assert starts.read_text() == "."
    assert children() == before


def test_a_pool_that_was_checked_can_be_entered(tmp_path):
    (tmp_path / "yours.py").write_text(
        "def grade(response, answer, /, *, strict=False):\n    return response == answer"
    )
    before = children()
    pool = VerifierPool(f"{tmp_path}/yours.py:grade", workers=1, time_limit_s=1.0)
    pool.check()
    assert children() == before
    with pool:
        assert pool.grade_all([("a", "a"), ("b", "a")]) == [RIGHT, WRONG]
    VerifierPool(graders.obedient, workers=0, time_limit_s=1.0).check()  # nothing to load elsewhere


def test_a_run_fails_on_it_before_its_weights_are_read(tmp_path):
    (tmp_path / "yours.py").write_text("import absent\ndef grade(response, answer): ...")
    config = Config(reward=RewardConfig(kind="function", path=f"{tmp_path}/yours.py:grade"))
    with pytest.raises(ValueError, match="No module named 'absent'"):
        components_lib.verifier_pool(config).check()


def test_grade_functions_that_cannot_travel():
    def local(response, answer): ...

    in_main = types.FunctionType(local.__code__, {"__name__": "__main__"})
    in_main.__qualname__ = "grade"
    for grade_fn in (local, lambda response, answer: None, in_main, "".join):
        with pytest.raises(ValueError, match=r"grade_fn .*(move it to the top level|workers=0)"):
            VerifierPool(grade_fn, workers=1, time_limit_s=1.0)


def test_arguments_are_checked():
    """Wrong numbers of workers and limits are refused."""
    with pytest.raises(ValueError, match="workers is -1"):
        VerifierPool(graders.obedient, workers=-1, time_limit_s=1.0)
    for limit in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time_limit_s is"):
            VerifierPool(graders.obedient, workers=1, time_limit_s=limit)


@pytest.mark.parametrize("workers", [0, 1])
def test_grading_outside_of_the_block_is_an_error(workers):
    pool = VerifierPool(graders.obedient, workers=workers, time_limit_s=1.0)
    with pytest.raises(ValueError, match="with"):
        pool.grade_all([("a", "a")])


def test_no_workers_grades_here():
    def local(response, answer):  # nothing has to travel
        return graders.obedient(response, answer)

    with VerifierPool(local, workers=0, time_limit_s=1.0) as pool:
        verdicts = pool.grade_all([("pid", ""), ("a", "a"), ("raise", ""), ("nan", ""), ("b", "a")])
    assert verdicts == [Verdict(True, 1.0, str(os.getpid())), RIGHT, failed("error"), failed("error"), WRONG]


@pytest.mark.slow  # tests above have hostile pairs beside others
def test_mathematics_beside_hostile_mathematics():
    # Towers and factorials take sympy hours; the start of a worker (sympy's import) counts against no limit.
    with VerifierPool(math_answer.grade, workers=2, time_limit_s=1.5) as pool:
        verdicts = pool.grade_all(
            [
                (r"\boxed{\frac{1}{2}}", "0.5"),
                (r"\boxed{10^{10^{10}}}", "2"),
                (r"\boxed{3}", "2"),
                (r"\boxed{((20!)!)!}", "2"),
                (r"\boxed{x+1}", "1+x"),
            ]
        )
    assert verdicts == [RIGHT, failed("timeout"), WRONG, failed("timeout"), RIGHT]
