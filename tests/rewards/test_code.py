"""Grading of programs by tests: what is right, and what hostile programs may cost.

Each file in hostile_programs/ begins with "# MODE: REWARD REASON". In the mode "stdout" the program must print the
square of its input, in the mode "assert" define `square`. A program that tries to reach something prints the right
answer if it was refused, so the reward 1 says that nothing escaped. SECRET_FILE, PORT and VICTIM stand for a file, a
server and a process of this test.
"""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from reinforce_ada_jax.isolation import process_tree
from reinforce_ada_jax.rewards import code, code_tests
from reinforce_ada_jax.rewards.code_tests import Assertions, FunctionCall, InputOutput, read_tests
from reinforce_ada_jax.rewards.loading import Made
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import reward_check
from reinforce_ada_jax.types import Verdict

HOSTILE = sorted((pathlib.Path(__file__).parent / "hostile_programs").glob("*.txt"))
SECRET = "a secret of the parent"
# Programs that end by themselves do so in less, also on a machine that is ten times slower.
LIMITS = {"processor_s": 1, "wall_s": 25.0, "memory_bytes": 2**27, "files_bytes": 2**24, "processes": 16}
STDOUT = {"input_output": {"inputs": ["7\n"], "outputs": ["49\n"]}}
ASSERT = {"test_list": ["assert square(7) == 49"]}
RIGHT = Verdict(True, 1.0)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is complete on Linux only")


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\n"


SQUARE = (fenced("print(int(input()) ** 2)"), "", STDOUT)


def settings(**changes):
    return {"time_limit_s": 100.0, "max_tests": 0, "limits": LIMITS} | changes


def grading(**changes):
    given = settings(**changes)
    grader = Made("reinforce_ada_jax.rewards.code:grader", given)
    return VerifierPool(grader, workers=2, time_limit_s=given["time_limit_s"])


@pytest.fixture(scope="module")
def pool():
    os.environ["HOSTILE_TEST_KEY"] = SECRET
    with grading() as pool:
        yield pool
    del os.environ["HOSTILE_TEST_KEY"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Things that the programs try to reach, by their names in the texts."""
    if "WITHOUT" in (how := reward_check.isolation()):
        pytest.skip(how)  # tests/isolation/test_sandbox.py has what holds then
    folder = tmp_path_factory.mktemp("secrets")
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o666)
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o777)  # so that only the sandbox is in the way
    victim = subprocess.Popen(["sleep", "600"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield {"SECRET_FILE": str(secret), "VICTIM": str(victim.pid), "PORT": str(server.getsockname()[1])}
        with pytest.raises(BlockingIOError):
            server.accept()
    assert secret.read_text() == SECRET
    assert os.listdir(folder) == ["secret"]
    assert victim.poll() is None
    victim.kill()
    victim.wait()


def left_behind():
    """Files and shared memory that a program or a sandbox could have left."""
    found = [
        path for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~")) for path in os.listdir(folder)
    ]
    return sorted(name for name in found if name.startswith(("hostile-was-here", "sandbox-", "part")))


def read(file, world):
    first, _, program = file.read_text().partition("\n")
    mode, expected = first.removeprefix("# ").split(": ")
    reward, _, reason = expected.partition(" ")
    for name, value in world.items():
        program = program.replace(name, value)
    return (fenced(program), "", STDOUT if mode == "stdout" else ASSERT), (float(reward), reason)


def graded(pool, response, **columns):
    (verdict,) = pool.grade_all([(fenced(response), "", columns)])
    return verdict.reward, verdict.correct, verdict.reason


def of_hostile(pool, world, chosen, files=HOSTILE):
    """Grades the chosen files, with harmless programs among them; nothing of them may be left."""
    read_files = {file.stem: read(file, world) for file in files}
    read_files = {name: given for name, given in read_files.items() if chosen(*given[1])}
    before, processes = left_behind(), set(process_tree.descendants(os.getpid()))
    pairs = {name: pair for name, (pair, _) in read_files.items()}
    neighbours = {f"neighbour of {name}": SQUARE for name in [*pairs][::4]}
    names = sorted(pairs | neighbours, key=lambda name: name.split()[-1])
    verdicts = dict(zip(names, pool.grade_all([(pairs | neighbours)[name] for name in names]), strict=True))
    expected = {name: reward_and_reason for name, (_, reward_and_reason) in read_files.items()}
    assert {name: (verdicts[name].reward, verdicts[name].reason) for name in names} == {
        name: expected.get(name, (1.0, "")) for name in names
    }
    assert left_behind() == before
    assert set(process_tree.descendants(os.getpid())) == processes  # no worker was lost, and nothing runs beside them
    return len(read_files)


@pytest.mark.parametrize(("files", "least"), [(HOSTILE[::3], 20), pytest.param(HOSTILE, 60, marks=pytest.mark.slow)])
def test_hostile_programs_reach_and_leave_nothing(pool, world, files, least):
    assert of_hostile(pool, world, lambda reward, reason: reason != "time_limit", files) >= least


@pytest.mark.slow
def test_hostile_programs_that_never_end(world):
    with grading(time_limit_s=20.0, limits=LIMITS | {"wall_s": 2.5}) as hasty:
        assert of_hostile(hasty, world, lambda reward, reason: reason == "time_limit") >= 12


@pytest.mark.parametrize(
    ("end", "reason"),
    [("signal.raise_signal(signal.SIGXCPU)", "time_limit"), ("os._exit(0)", ""), ("os._exit(1)", "exception")],
    ids=str,
)
def test_a_program_that_ends_while_its_function_is_called(pool, end, reason):
    program = f"import os, signal\n\ndef f(x):\n    {end}"
    assert graded(pool, program, test_list=["assert f(1) == 1"]) == (0.0, False, reason)


def test_a_fork_bomb_costs_only_itself(world):
    program, expected = read(HOSTILE[0].with_name("fork_bomb.txt"), world)
    with grading(limits=LIMITS | {"wall_s": 5.0}) as hasty:
        first, *others = hasty.grade_all([program, SQUARE, SQUARE])
    assert (first.reward, first.reason) == expected
    assert others == [RIGHT, RIGHT]


def test_the_reward_is_the_share_of_tests(pool):
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "4", "9", "15"]}
    assert graded(pool, "print(int(input()) ** 2)", input_output=tests) == (0.75, False, "")


@pytest.mark.parametrize(
    ("program", "columns"),
    [
        ("def f(x):\n    x.sort()", {"test_list": ["x = [2, 1]\nf(x)\nassert x == [1, 2]"]}),
        ("def f(a, b):\n    return {a}, (b, 1.5), None", {"test": "assert f(1, b='x') == ({1}, ('x', 1.5), None)"}),
        ("def f(x):\n    raise ValueError(x)",
         {"test": "try:\n    f('no')\nexcept ValueError as e:\n    assert str(e) == 'no'"}),
        ("def f(x):\n    return x",
         {"test": "def check(candidate):\n    assert candidate(3) == 3", "entry_point": "f"}),
        ("def f(x):\n    return x", {"test": "from solution import f\n\ndef test_f():\n    assert f(2) == 2"}),
        # LeetCodeDataset.
        ("class Solution:\n    def f(self, x):\n        return x",
         {"test": "def check(candidate):\n    assert candidate(x=3) == 3", "entry_point": "Solution().f"}),
        # BigCodeBench: an entry point, and no `check`.
        ("def f(x):\n    return x", {"entry_point": "f", "test": "import unittest\n\nclass T(unittest.TestCase):\n"
                                     "    def test_f(self):\n        self.assertEqual(f(2), 2)"}),
        ("class P:\n    def __init__(self, x):\n        self.x = x\n\ndef f(ps):\n    return sum(p.x for p in ps)",
         {"test_list": ["assert f([P(1), P(2)]) == 3", "assert P(4).x == 4"]}),
        ("class Solution:\n    def f(self, x):\n        return (x, 0.1 + 0.2)",
         {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 0.3]]}}),
        # The text "12", and the number that a text of JSON holds.
        ("def f(x):\n    return str(x) if x > 9 else x",
         {"input_output": {"fn_name": "f", "inputs": [[12], [3]], "outputs": ["12", "3"]}}),
        # Problem 126 of MBPP: `sum` is the program's, as long as the test asks for nothing else.
        ("def sum(a, b):\n    return a * b",
         {"test_list": ["assert sum(2, 3) == 6", "assert isinstance(sum(2, 3), int)"]}),
        ("def sum(a, b):\n    return a * b", {"test": "def check(candidate):\n    assert sum(2, 3) == 6",
                                               "entry_point": "sum"}),
        ("def f(x):\n    return float('nan')", {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [NaN]}'}),
        ("import math\n\ndef f(x):\n    return math.sqrt(x)",
         {"test_list": ["assert math.isclose(f(4), 2)"], "test_imports": ["import math"]}),
    ],
)  # fmt: skip
def test_functions_are_called_from_another_process(pool, program, columns):
    assert graded(pool, program, **columns) == (1.0, True, "")


@pytest.mark.parametrize(
    ("program", "columns"),
    [
        # Where the test names a function of the program, the program replaces nothing of Python's.
        ("def f(x):\n    return []\n\ndef len(x):\n    return 3", {"test_list": ["assert len(f(1)) == 3"]}),
        ("def f(x):\n    return []\n\ndef len(x):\n    return 3",
         {"test": "from solution import f\n\ndef test_f():\n    assert len(f(1)) == 3"}),
        ("def f(x):\n    return 0.5", {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [Infinity]}'}),
        ("def f(x):\n    return 1.0000001", {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [1]}'}),
        ("def f(x):\n    return x - 1",
         {"input_output": '{"fn_name": "f", "inputs": [[1234568.0]], "outputs": [1234568.0]}'}),
    ],
)  # fmt: skip
def test_what_is_wrong_stays_wrong(pool, program, columns):
    assert graded(pool, program, **columns) == (0.0, False, "")


HUGE = "1" + "0" * 5000 + "7"  # longer than the whole numbers that Python reads by itself


@pytest.mark.parametrize(
    ("program", "columns"),
    [
        ("print(10 ** 5001 + 7)", {"input_output": {"inputs": ["5001"], "outputs": [HUGE]}}),
        ("print(10 ** 5001 + 7)", {"input_output": f'{{"inputs": ["5001"], "outputs": [{HUGE}]}}'}),
        ("def f(x):\n    return x", {"input_output": f'{{"fn_name": "f", "inputs": [[{HUGE}]], "outputs": [{HUGE}]}}'}),
    ],
)
def test_tests_may_have_long_whole_numbers(pool, program, columns):
    code_tests.tests_hash([columns])
    assert graded(pool, program, **columns) == (1.0, True, "")
    assert sys.get_int_max_str_digits() == 4300


@pytest.mark.parametrize(
    "test",
    ["import no_such_package\n\ndef test_f():\n    assert f(1) == 1",
     "def test_f():\n    from no_such_package import part\n    assert f(1) == 1"],
)  # fmt: skip
def test_a_test_that_imports_what_is_not_installed_has_a_reason(pool, test):
    assert graded(pool, "def f(x):\n    return x", test=test) == (0.0, False, "unsupported_import")


def test_an_import_of_the_program_is_no_import_of_the_test(pool):
    program = "def f(x):\n    import no_such_package"
    assert graded(pool, program, test="def test_f():\n    assert f(1) == 1") == (0.0, False, "")


LOOKS_FOR_3000009 = """
import gc

def f(x):
    wanted = "".join(["30", "00", "009"])
    return any(wanted in str(each) for each in gc.get_objects()) * int(wanted)
"""


def test_a_program_never_sees_what_is_expected(pool):
    assert graded(pool, LOOKS_FOR_3000009, test_list=["assert f(0) == 3000009"]) == (0.0, False, "")


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        # What is not marked as Python may be its output, or a command that starts it.
        ("```python\na\n```\ntext\n```\nb\n```", "a\n"),
        ("```\na\n```\n```bash\npython a.py\n```", "a\n"),
        ("```cpp\na\n```", None),
        ("~~~py\na\n~~~", "a\n"),
        ("````\n```\na\n````", "```\na\n"),
        ("```python\na\n```\n```cpp\nb\n```", "a\n"),
        ("print(49)", None),
        ("```python\nprint(49)", None),
        # In a list, with the line ends of Windows, with a longer fence at the end.
        ("1. a\n\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("- a\n\t```python\n\ta\n\n\tb\n\t```", "a\n\nb\n"),
        ("Text\r\n```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("```python\na\n````\n", "a\n"),
        ("````\n```python\na\n```", "a\n"),  # the first fence is never closed
        ("```a = 1``` is text\n```python\nb\n```", "b\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(response, program):
    assert code.program_of(response) == program


@pytest.mark.parametrize("lines", ["```a", "~~~a\n```b", "`" * 53 + "x", "```python\na\n````\n```"])
def test_fences_that_nothing_closes_take_no_time(lines):
    start = time.process_time()
    code.program_of(f"{lines}\n" * 10_000)
    assert time.process_time() - start < 5.0  # one of them took 300 s when each fence was looked for to the end


def test_a_response_without_a_program_has_a_reason(pool):
    assert pool.grade_all([("49", "", STDOUT)]) == [Verdict(False, 0.0, "no_code")]


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n", "1\n2", True),
        ("0.3000001", "0.3", True),
        ("0.301", "0.3", False),
        ("49.0", "49", False),
        ("1234567.00", "1234568.00", False),  # whole numbers, within a relative 1e-6
        ("1234568.00", "1234568.0", True),
        ("1234567.25", "1234568.25", True),
        ("1234566.25", "1234568.25", False),
        ("0.00001", "1e-05", True),
        ("100000.2", "1e5", False),
        ("1234567890123456789", "1234567890123456788", False),
        ("4_9.5", "49.5", False),
        ("\u0664\u0669.5", "49.5", False),  # Arabic digits
        ("nan", "0.5", False),
        ("", "49", False),
    ],
)
def test_outputs_have_the_same_words(written, expected, same):
    assert code.same_output(written, expected) == same


def test_a_long_word_is_compared_at_once():
    # 0.1 ms; a quadratic pattern takes 5 s, and hours for the 4 MiB that a program may write.
    start = time.perf_counter()
    assert not code.same_output("1" * 20_000 + "x", "0.5")
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("columns", "tests"),
    [
        ({"input_output": '{"inputs": ["1\\n"], "outputs": ["2"]}'}, [InputOutput("1\n", "2")]),
        ({"input_output": {"inputs": [["1", "2"]], "outputs": [["3"]]}}, [InputOutput("1\n2", "3")]),
        ({"input_output": {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}}, [FunctionCall("f", [1, 2], 3)]),
        ({"public_tests": {"input": ["a"], "output": ["b"]}, "private_tests": {"input": ["c"], "output": ["d"]}},
         [InputOutput("a", "b"), InputOutput("c", "d")]),
        ({"tests": '[{"input": "a", "output": "b", "testtype": "stdin"}]'}, [InputOutput("a", "b")]),
        ({"public_test_cases": '[{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]',
          "metadata": '{"func_name": "f"}'}, [FunctionCall("f", [[1], 2], 3)]),
        ({"verification_info": {"language": "python", "test_cases": [
            {"type": "stdin_stdout", "input": "a", "output": "b", "fn_name": None}]}}, [InputOutput("a", "b")]),
        ({"test_list": ["assert f(1) == 1"], "test_setup_code": "import re", "answer": "x"},
         [Assertions("import re\nassert f(1) == 1")]),
        ({"reward_model": {"ground_truth": '{"inputs": ["a"], "outputs": ["b"]}'}}, [InputOutput("a", "b")]),
    ],
)  # fmt: skip
def test_tests_are_read_from_the_columns_of_public_sets(columns, tests):
    assert read_tests(columns) == tests


@pytest.mark.parametrize(
    "code",
    [
        "def check(f):\n    assert f(2) == 4\n\nlist(map(check, [f]))",
        "def check(f):\n    assert f(2) == 4\n\nfor a, b in [(2, 4)]:\n    assert f(a) == b",
    ],
)
def test_a_test_that_uses_check_or_asserts_beside_it_is_read(code):
    assert [test.code for test in read_tests({"test": code})] == [code]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"problem": "x"}, "no tests: none of verification_info, tests, .* among its columns problem"),
        ({"tests": [{"input": "a"}]}, "tests: an object of tests has input, and no input and output"),
        ({"input_output": {"inputs": ["a"], "outputs": []}}, "input_output: 1 inputs and 0 outputs"),
        (
            {
                "public_test_cases": [{"input": "a", "output": "b", "testtype": "functional"}],
                "metadata": {"func_name": "f"},
            },
            "the argument 'a' of a function is not JSON",
        ),
        ({"test": "def check(f):\n    assert f(2) == 4", "entry_point": "f(2)"}, "test: its code only defines names"),
        ({"tests": 3}, "tests: tests are a int"),
        ({"tests": "one, two three"}, "tests: a text is neither JSON nor Python"),
        ({"private_test_cases": "eJxrYJmqwwABtVMA"}, "no tests"),
        # Without a call, every program would pass.
        (
            {"test": "'A text.'\nimport math\n\ndef check(f):\n    assert f(2) == 4"},
            "test: its code only defines names",
        ),
        ({"test": "def check(f):\n    assert f(2) == 4\n\nprint('loaded')"}, "test: its code only defines names"),
        (
            {
                "test_list": [
                    "class T:\n    def check(self):\n        assert f(2) == 4\n\nif __name__ == '__main__':\n    T()"
                ]
            },
            "test_list: its code only defines names",
        ),
        (
            {"test": "class CheckF:\n    def test_a(self):\n        assert f(3) == 9"},
            "test: its code only defines names",
        ),
        # Nothing awaits it.
        (
            {"test": "from solution import f\n\n@mark\nasync def test_a():\n    assert await f(3) == 9"},
            "or an async test that nothing awaits",
        ),
        (
            {
                "test": "class TestF:\n    def test_a(self):\n        pass\n"
                "    async def test_b(self):\n        assert await f(3) == 9"
            },
            "or an async test that nothing awaits",
        ),
    ],
)
def test_a_problem_without_tests_is_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        read_tests(columns)
