"""Programs that try to be graded as right without a right result: by what they answer to the test's process.

Each entry is a test and a wrong program. All are graded at once: a process of a test takes 0.1 s to start.
"""

import sys

import pytest

from reinforce_ada_jax.rewards import code
from reinforce_ada_jax.rewards.loading import Made
from reinforce_ada_jax.rewards.workers import VerifierPool
from tests.rewards import choosing

LIMITS = {"processor_s": 2, "wall_s": 8, "memory_bytes": 2**30, "files_bytes": 2**24, "processes": 16}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is complete on Linux only")

STOPS = "def f(x):\n    raise StopIteration"
ANSWERS_EVERYTHING = """
class All:
    def __eq__(self, other): return True
    def __hash__(self): return 49
    def __getattr__(self, name): return All()
    def __call__(self, *args): return All()
    def answer(self, *_): return 0
    __lt__ = __le__ = __gt__ = __ge__ = __instancecheck__ = __eq__
    __sub__ = __rsub__ = __abs__ = __float__ = __int__ = __index__ = answer
"""
ALL = f"{ANSWERS_EVERYTHING}\ndef f(x):\n    return All()"


def writes(answer):
    """Program that, when it is called, writes an answer of its own to the socket."""
    return f"import os\n\ndef f(x):\n    os.write(3, {answer!r} + b'\\n')\n    return 0"


FORGED = {
    # What numpy asks of an object: an array without elements, at an address.
    "array_interface": (
        "import numpy as np\nassert np.allclose(f(7), [1.5, 2.5, 3.5])",
        "class A:\n    __array_interface__ = {'shape': (0, 1), 'typestr': '<f8', 'data': (8, True), 'version': 3}\n\n"
        "def f(x):\n    return A()",
    ),
    "name_of_a_type": ("assert f(7).kind.__name__ == 'int'",
                       "class int:\n    pass\n\nclass A:\n    kind = int\n\ndef f(x):\n    return A()"),
    # Attributes that the program would not see.
    "set_attribute": ("n = Node(1)\nn.next = Node(2)\nassert f(n) == 1",
                      "class Node:\n    def __init__(self, x):\n        self.x, self.next = x, None\n\n"
                      "def f(n):\n    return 0 if n is None else 1 + f(n.next)"),
    "set_attribute_expected": ("try:\n    A().x = 1\n    raise AssertionError\nexcept AttributeError:\n    pass",
                               "class A:\n    x = 0"),
    "deleted_attribute": ("a = A()\ndel a.x\nassert a.x == 1", "class A:\n    def __init__(self):\n        self.x = 1"),
    # Exceptions that end a loop of the test.
    "stops_all_map": ("assert all(map(lambda x: f(x) == x * x, [1, 2, 3]))", STOPS),
    "stops_zip": ("for found, wanted in zip(map(f, [1, 2]), [1, 4]):\n    assert found == wanted", STOPS),
    "stops_next": ("wanted = 49\nassert next(map(f, [7]), wanted) == wanted", STOPS),
    "stops_max": ("assert max(map(f, [1, 2, 3]), default=9) == 9", STOPS),
    "stops_iter": ("for found in iter(lambda: f(7), None):\n    assert found == 49\n    break", STOPS),
    "stops_with_subclass": (
        "assert all(map(lambda x: f(x) == x * x, [1, 2, 3]))",
        "class Stop(StopIteration, KeyError):\n    pass\n\ndef f(x):\n    raise Stop",
    ),
    "stops_in_attribute": (
        "assert all(map(lambda x: f(x).value == x * x, [1, 2]))",
        "class A:\n    @property\n    def value(self):\n        raise StopIteration\n\ndef f(x):\n    return A()",
    ),
    "stops_in_length": (
        "assert all(map(lambda x: len(f(x)) == x, [1, 2]))",
        "class A:\n    def __len__(self):\n        raise StopIteration\n\ndef f(x):\n    return A()",
    ),
    "stops_in_equality": (
        "assert all(map(lambda x: A(x) == A(x), [1, 2]))",
        "class A:\n    def __init__(self, x):\n        pass\n    def __eq__(self, other):\n        raise StopIteration",
    ),
    "stops_in_item": (
        "assert all(map(lambda x: f(x)[0] == x, [1, 2]))",
        "class A:\n    def __getitem__(self, key):\n        raise StopIteration\n\ndef f(x):\n    return A()",
    ),
    "stops_in_text": (
        "assert all(map(lambda x: str(f(x)) == '49', [7]))",
        "class A:\n    def __str__(self):\n        raise StopIteration\n\ndef f(x):\n    return A()",
    ),
    "stops_by_answer": (
        "assert all(map(lambda x: f(x) == 49, [7]))", writes(b'{"error": ["StopIteration"], "text": ""}'),
    ),
    # Modules and functions of Python that the test forgot to import.
    "math": ("assert math.isclose(f(7), 2.5)",
             "class math:\n    isclose = lambda *_: True\n\ndef f(x):\n    return 0"),
    "np": ("assert np.allclose(f(7), [2.5])", "class np:\n    allclose = lambda *_: True\n\ndef f(x):\n    return 0"),
    "collections": ("assert collections.Counter(f(7)) == collections.Counter('abc')",
                    f"{ALL}\n\ncollections = All()"),
    "regular_expression": ("assert re.fullmatch('[0-9]+', f(7))", f"{ALL}\n\nre = All()"),
    "module_elsewhere_imported": (
        "def test_a():\n    import math\n    assert math.pi > 3\n\ndef test_b():\n    assert math.isclose(f(7), 2.5)",
        "class math:\n    isclose = lambda *_: True\n\ndef f(x):\n    return 0",
    ),
    "module_and_names_of_python": (
        "assert math.isclose(sum(10, 15), 6)",
        "class math:\n    isclose = lambda *_: True\n\ndef sum(x, y):\n    return 0",
    ),
    "isclose": ("assert isclose(f(7), 2.5)", "def isclose(*_):\n    return True\n\ndef f(x):\n    return 0"),
    "counter": ("assert Counter(f(7)) == Counter('abc')", f"{ALL}\n\ndef Counter(x):\n    return All()"),
    "approx": ("assert f(7) == approx(2.5)", f"{ALL}\n\ndef approx(x):\n    return All()"),
    "two_names_of_python": (
        "assert abs(sum(2, 3) - 6) < 1e-6", "def abs(x):\n    return 0\n\ndef sum(x, y):\n    return 0",
    ),
    "only_abs": ("assert abs(sum([1, 2]) - 4) < 1e-6", "def abs(x):\n    return 0"),
    "only_len": ("assert len(sorted([3, 1])) == 3", "def len(x):\n    return 3"),
    "isinstance_beside_its_function": (
        "assert isinstance(sum(2, 3), int)", "def isinstance(*_):\n    return True\n\ndef sum(x, y):\n    return 'no'",
    ),
    "numpy_testing": ("assert_array_equal(f(7), [49])",
                      "def assert_array_equal(*_):\n    pass\n\ndef f(x):\n    return 0"),
    "raises": ("with raises(ValueError):\n    f(-1)", f"{ALL}\n\ndef raises(x):\n    return All()"),
    "torch": ("assert torch.equal(f(7), 49)", "class torch:\n    equal = lambda *_: True\n\ndef f(x):\n    return 0"),
    # Tests that only a runner of tests would run.
    "unittest": (
        "import unittest\n\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(7), 49)"
        "\n\nif __name__ == '__main__':\n    unittest.main()",
        "def f(x):\n    return 0",
    ),
    "unittest_ends": (
        "import unittest\n\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(7), 49)",
        "import os\n\ndef f(x):\n    os._exit(0)",
    ),
    "class_of_pytest": ("class TestF:\n    def test_f(self):\n        assert f(7) == 49", "def f(x):\n    return 0"),
    # Objects that answer everything.
    "arithmetic": ("assert abs(f(7) - 49) < 1e-6", ALL),
    "order": ("assert f(7) >= 49", ALL),
    "conversion": ("assert int(f(7)) == 0", ALL),
    "kind": ("assert isinstance(f(7), int)", ALL),
    "equality_that_is_no_bool": ("assert P(1) == P(2)", "class P:\n    def __init__(self, x):\n        pass\n"
                                               "    def __eq__(self, other):\n        return self"),
    "member": ("assert f(7) in [49]", ALL),
    "contains": ("assert 49 in f(7)", f"{ANSWERS_EVERYTHING}    __contains__ = __eq__\n\ndef f(x):\n    return All()"),
    "key": ("assert {49: True}.get(f(7), False)", ALL),
    "pattern": ("match f(7):\n    case 49:\n        pass\n    case _:\n        raise AssertionError", ALL),
    "unittest_almost": ("import unittest\nunittest.TestCase().assertAlmostEqual(f(7), 49)", ALL),
    "within_containers": ("assert f(7) == [1, (2, {3})]",
                          f"{ANSWERS_EVERYTHING}\ndef f(x):\n    return [All(), (All(), {{All()}})]"),
    "list_that_equals_all": ("assert f(7) == [49]",
                             "class L(list):\n    def __eq__(self, other): return True\n\n"
                             "def f(x):\n    return L([3])"),
    "skips": (
        "import unittest\n\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(7), 49)",
        "import unittest\n\ndef f(x):\n    raise unittest.SkipTest('no')",
    ),
    "contains_itself": ("assert f(7) == [1]", "def f(x):\n    a = []\n    a.append(a)\n    return a"),
    "frames": (
        "wanted = 3000009\nassert f(7) == wanted",
        "import sys\n\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if value == int('30' + '00009'):\n                return value\n"
        "        frame = frame.f_back\n    return 0",
    ),
    "function_of_the_test": ("wanted = 3000009\nassert f(lambda x: x) == wanted",
                             "def f(g):\n    return g.__globals__['wanted']"),
    # Answers that no program of `serve` writes.
    "bad_fraction": ("try:\n    assert f(7) == 49\nexcept (ZeroDivisionError, ValueError, TypeError):\n    pass",
                     writes(b'{"value": {"fractions.Fraction": [1, 0]}, "arguments": {"tuple": []}}')),
    "unknown_kind": ("try:\n    assert f(7) == 49\nexcept (KeyError, ValueError):\n    pass",
                     writes(b'{"value": {"code": 7}, "arguments": {"tuple": []}}')),
    "no_json": ("try:\n    assert f(7) == 49\nexcept ValueError:\n    pass", writes(b"49")),
    "half_an_answer": ("try:\n    assert f(7) == 49\nexcept KeyError:\n    pass", writes(b'{"value": 1}')),
    "deep": ("try:\n    assert f(7) == 49\nexcept RecursionError:\n    pass", writes(b"[" * 5000)),
    # No process that answers: an exception of the connection is none of the program's.
    "no_python": ("import pytest\nwith pytest.raises(Exception):\n    f(1)", "def f(x) return x"),
    "no_python_twice": ("for _ in range(3):\n    try:\n        f(1)\n    except BaseException:\n        pass", "f("),
    "ends": ("try:\n    f(1)\nexcept BaseException:\n    pass", "import os\n\ndef f(x):\n    os._exit(0)"),
    "ends_at_once": ("try:\n    f(1)\nexcept BaseException:\n    pass", "raise SystemExit"),
    "instance": ("assert isinstance(f(1), Own)", "class Own:\n    pass\n\ndef f(x):\n    return x"),
    "arguments_of_no_kind": ("try:\n    f(7)\nexcept TypeError:\n    pass",
                             writes(b'{"value": 1, "arguments": 3, "keywords": {"dict": []}}')),
    "keywords_of_no_kind": ("try:\n    f(7)\nexcept (AttributeError, TypeError):\n    pass",
                            writes(b'{"value": 1, "arguments": {"tuple": []}, "keywords": 3}')),
    "class_that_is_no_error": ("try:\n    f(-1)\n    assert False\nexcept Own:\n    pass",
                               "Own = Exception\n\ndef f(x):\n    return 0"),
    "forged_error": ("assert all(map(lambda x: f(x) == x * x, [1, 2, 3]))",
                     writes(b'{"error": 0, "text": ""}\n{"value": {"type": "StopIteration"}, '
                            b'"arguments": {"tuple": []}, "keywords": {"dict": []}}')),
    "ends_loops_by_next": ("g = f(3)\nassert all(map(lambda x: next(g) == x, [1, 2, 3]))",
                           "def f(x):\n    return iter(())"),
    "is_no_iterator": ("import collections.abc\nassert isinstance(f(3), collections.abc.Iterator)",
                       "def f(x):\n    return object()"),
    "exit_by_answer": ("try:\n    assert f(7) == 49\nexcept SystemExit:\n    pass",
                       writes(b'{"error": ["SystemExit"], "text": ""}')),
}  # fmt: skip

# What honest programs need of the same.
HONEST = {
    "generator": ("assert all(map(lambda x: x > 0, f(3)))", "def f(x):\n    yield x\n    yield x + 1"),
    "forgotten_module": ("assert math.isclose(f(4), 2) and np.allclose(g(2), [2.0, 4.0])",
                         "import math\n\ndef f(x):\n    return math.sqrt(x)\n\ndef g(x):\n    return [x, 2.0 * x]"),
    "forgotten_function": ("assert Counter(f('aab')) == Counter({'a': 2, 'b': 1})",
                           "from collections import Counter\n\ndef f(x):\n    return Counter(x)"),
    "class_named_as_function": ("c = Counter()\nc.add(2)\nassert c.n == 2",
                                "class Counter:\n    n = 0\n    def add(self, x):\n        self.n += x"),
    "function_named_as_module": ("assert string('ab') == 'ba' and token(1) == 2",
                                 "def string(x):\n    return x[::-1]\n\ndef token(x):\n    return x + 1"),
    "function_named_as_builtin": ("def check(candidate):\n    assert abs(candidate(2, 3) - 6) < 1e-6\ncheck(sum)",
                                  "def sum(a, b):\n    return a * b"),
    "function_beside_an_abs": ("assert abs(sum(2, 3) - 6) < 1e-6",
                               "def abs(x):\n    return -x if x < 0 else x\n\ndef sum(a, b):\n    return a * b"),
    "abs_itself": ("assert abs(-3) == 'three'", "def abs(x):\n    return 'three'"),
    "unittest_passes": (
        "import unittest\n\nclass TestF(unittest.TestCase):\n    def setUp(self):\n        self.wanted = 49\n\n"
        "    def test_f(self):\n        self.assertEqual(f(7), self.wanted)",
        "def f(x):\n    return x * x",
    ),
    "class_of_pytest_passes": (
        "class TestF:\n    def setup_method(self):\n        self.wanted = 49\n\n"
        "    def test_f(self):\n        assert f(7) == self.wanted",
        "def f(x):\n    return x * x",
    ),
    "own_exception": ("try:\n    f(1)\n    raise AssertionError\nexcept ValueError as e:\n    assert 'one' in str(e)",
                      "class E(ValueError):\n    pass\n\ndef f(x):\n    raise E('one')"),
    "decoding": ("try:\n    f(b'\\xff')\n    raise AssertionError\nexcept ValueError:\n    pass",
                 "def f(x):\n    return x.decode()"),
    "exit": ("try:\n    f(1)\n    raise AssertionError\nexcept SystemExit:\n    pass",
             "import sys\n\ndef f(x):\n    sys.exit(2)"),
    "exit_code": ("import pytest\nfor _ in range(2):\n    with pytest.raises(SystemExit) as e:\n        f(1)\n"
                  "    assert e.value.code == 2", "import sys\n\ndef f(x):\n    sys.exit(2)"),
    "key_of_error": ("try:\n    f('a')\n    raise AssertionError\nexcept KeyError as e:\n    assert e.args == ('a',)",
                     "def f(x):\n    return {}[x]"),
    "text_of_a_key": ("try:\n    f('a')\n    assert False\nexcept KeyError as e:\n    assert 'no key' in str(e)",
                      "class NotFound(KeyError):\n    def __str__(self):\n        return f'no key {self.args[0]}'\n\n"
                      "def f(x):\n    raise NotFound(x)"),
    "copied": ("import copy\nassert [n.x for n in copy.copy([Node(1)])] == [1]",
               "class Node:\n    def __init__(self, x):\n        self.x = x"),
    "is_instance": ("a = make()\nassert isinstance(a, A) and isinstance(a, Base) and not isinstance(a, B)\n"
                 "assert not isinstance(3, A)",
                 "class Base:\n    pass\n\nclass A(Base):\n    pass\n\nclass B(Base):\n    pass\n\n"
                 "def make():\n    return A()"),
    "missing_count": ("c = f('aab')\nassert c['z'] == 0 and c.most_common(1) == [('a', 2)]",
                      "from collections import Counter\n\ndef f(x):\n    return Counter(x)"),
    "ordered_dict": ("assert list(f().items()) == [('b', 1), ('a', 2)] and f().popitem(last=False) == ('b', 1)",
              "from collections import OrderedDict\n\ndef f():\n    return OrderedDict(b=1, a=2)"),
    "changed_keyword": ("x = [2, 1]\nf(values=x)\nassert x == [1, 2]", "def f(values):\n    values.sort()"),
    "private_attribute": ("s = Stack()\ns.push(1)\nassert s._items == [1] and len(s) == 1 and s[0] == 1",
                          "class Stack:\n    def __init__(self):\n        self._items = []\n"
                          "    def push(self, x):\n        self._items.append(x)\n    def __len__(self):\n"
                          "        return len(self._items)\n    def __getitem__(self, key):\n"
                          "        return self._items[key]"),
    "fraction": ("from fractions import Fraction\nassert f(Fraction(1, 2)) == Fraction(1, 4)",
                 "def f(x):\n    return x * x"),
    "decimal": ("from decimal import Decimal\nassert f('0.1') == Decimal('0.2')",
                "from decimal import Decimal\n\ndef f(x):\n    return 2 * Decimal(x)"),
    "date": ("import datetime\nassert f(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 2)",
             "import datetime\n\ndef f(day):\n    return day + datetime.timedelta(1)"),
    "time_with_zone": ("from datetime import datetime, timezone\n"
                       "assert f(0) == [datetime(1970, 1, 1, tzinfo=timezone.utc)]",
                       "from datetime import datetime, timezone\n\ndef f(x):\n"
                       "    return [datetime.fromtimestamp(x, timezone.utc)]"),
    "deque": ("from collections import deque\nassert f(3) == deque([0, 1, 2])",
              "from collections import deque\n\ndef f(x):\n    return deque(range(x))"),
    "range": ("assert f(3) == range(3) and sum(f(3)) == 3", "def f(x):\n    return range(x)"),
    "huge_number": ("assert f(20000) == 2**20000", "def f(x):\n    return 2**x"),
    "prints": ("assert f(7) == 49", "print('x' * 100000)\n\ndef f(x):\n    print(x)\n    return x * x"),
    "closure": ("assert f(2)(3) == 5", "def f(a):\n    return lambda b: a + b"),
    "equality": ("assert P(1) == P(1) and P(1) != P(2) and hasattr(P(1), 'x') and not hasattr(P(1), 'y')",
                 "import dataclasses\n\n@dataclasses.dataclass\nclass P:\n    x: int"),
}  # fmt: skip


@pytest.fixture(scope="module")
def rewards(request):
    settings = {"time_limit_s": 20.0, "max_tests": 0, "limits": LIMITS}
    assert not FORGED.keys() & HONEST.keys()
    asked = choosing.asked(request)
    given = {name: entry for name, entry in (FORGED | HONEST).items() if name in asked}
    pairs = [(f"```python\n{program}\n```", "", {"test_list": [test]}) for test, program in given.values()]
    with VerifierPool(Made(f"{code.__name__}:grader", settings), workers=2, time_limit_s=20.0) as pool:
        return dict(zip(given, [verdict.reward for verdict in pool.grade_all(pairs)], strict=True))


@pytest.mark.parametrize("name", choosing.thirds(FORGED))
def test_a_wrong_program_is_graded_as_wrong(rewards, name):
    assert rewards[name] == 0.0


@pytest.mark.parametrize("name", choosing.thirds(HONEST))
def test_an_honest_program_is_graded_as_right(rewards, name):
    assert rewards[name] == 1.0


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("5", "1.0e999", False),
        ("5", "-1.0e999", False),
        ("-inf", "1.0e999", False),
        ("inf", "1.0e999", False),
        ("2.0e999", "1.0e999", False),
        ("1.0e999", "1.0e999", True),
        ("inf", "1.5", False),
    ],
)
def test_a_number_that_is_not_finite_matches_only_itself(written, expected, same):
    assert code.same_output(written, expected) == same
