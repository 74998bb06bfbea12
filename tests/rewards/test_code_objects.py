"""Tests that use objects of a program: what an honest program gets right, what is refused, and what nobody may forge.

Each entry is a test and a program. All are graded at once: a process of a test takes 0.1 s to start.
"""

import sys

import pytest

from reinforce_ada_jax.rewards import code
from reinforce_ada_jax.rewards.loading import Made
from reinforce_ada_jax.rewards.workers import VerifierPool
from tests.rewards import choosing

LIMITS = {"processor_s": 2, "wall_s": 8, "memory_bytes": 2**30, "files_bytes": 2**24, "processes": 16}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is complete on Linux only")

ARRAY = "import numpy as np\n\ndef f(x):\n    return np.arange(x)"
SQUARE = "def f(x):\n    return x * x"
NODE = "class Node:\n    def __init__(self, x):\n        self.x, self.next = x, None\n\n"
VECTOR = "class V:\n    def __init__(self, x):\n        self.x = x\n"
BUS = ("class Bus:\n    def __init__(self):\n        self.functions = []\n    def on(self, function):\n"
       "        self.functions.append(function)\n    def off(self, function):\n"
       "        self.functions.remove(function)\n    def emit(self, x):\n"
       "        for each in self.functions:\n            each(x)")  # fmt: skip
TRANSACTION = ("class T:\n    def __init__(self):\n        self.log = []\n"
               "    def __enter__(self):\n        return self\n"
               "    def __exit__(self, kind, error, _):\n        self.log.append(kind and f'{kind.__name__} {error}')\n"
               "        return True")  # fmt: skip
HONEST = {
    "decorates_a_helper": ("@memo\ndef g(x):\n    return 7 * x\nassert g(7) == g(7) == 49",
                           "import functools\nmemo = functools.cache"),
    "decorates_a_check": ("@f\ndef check(g):\n    assert g(7) == 7\ncheck(f)", "def f(x):\n    return x"),
    "attribute_of_a_class": (
        "import unittest\n\nclass T(unittest.TestCase):\n    solver = Solver()\n\n    def test_f(self):\n"
        "        self.assertEqual(self.solver.f(7), 49)",
        "class Solver:\n    def f(self, x):\n        return x * x",
    ),
    # Names that the author left out.
    "typing": ("assert Solution().f([2, 7]) == [0, 1]",
               "class Solution:\n    def f(self, x: List[int]) -> Optional[List[int]]:\n        return [0, 1]"),
    "modules": ("assert f([3, 1]) == [1, 2]",
                "def f(x):\n    heapq.heapify(x)\n    return [heappop(x), math.isqrt(5)]"),
    # Arrays.
    "array": ("a = f(3)\nassert a.tolist() == [0, 1, 2] and a.shape == (3,) and a.sum() == 3 and a.dtype == np.int64\n"
              "assert isinstance(a, np.ndarray) and (a == np.array([0, 1, 2])).all()", ARRAY),
    "array_given": ("import numpy as np\nx = np.array([[2, 1]])\nassert f(x) == 3 and x.tolist() == [[1, 2]]",
                    "def f(x):\n    x.sort()\n    return int(x.sum())"),
    "scalar_of_numpy": ("import numpy as np\nassert f(np.float32(3)).dtype == np.float32 and np.isnan(f(np.nan))",
                        "def f(x):\n    return x * x.dtype.type(2) if hasattr(x, 'dtype') else x"),
    "array_of_dates": ("import numpy as np\nassert f()[0] == np.datetime64('2020-01-01')",
                       "import numpy as np\n\ndef f():\n    return np.array(['2020-01-01'], 'datetime64[D]')"),
    # What a test does with objects.
    "with": ("with f() as x:\n    assert x == 3",
             "import contextlib\n\n@contextlib.contextmanager\ndef f():\n    yield 3"),
    "with_an_error": ("import pytest\nt = T()\nwith pytest.raises(ValueError):\n    with t:\n"
                      "        raise ValueError('no')\nwith t:\n    pass\nassert t.log == ['ValueError no', None]",
                      TRANSACTION),
    "in_items": ("assert 1 in S() and 5 not in S()",
                 "class S:\n    def __iter__(self):\n        return iter([1, 2])\n    def __contains__(self, x):\n"
                 "        return x in (1, 2)"),
    "set_item": ("s = S()\ns[1] = 2\ns[3] = 4\ndel s[3]\nassert s[1] == 2 and len(s) == 1",
                 "class S:\n    def __init__(self):\n        self.d = {}\n    def __setitem__(self, key, value):\n"
                 "        self.d[key] = value\n    def __getitem__(self, key):\n        return self.d[key]\n"
                 "    def __delitem__(self, key):\n        del self.d[key]\n    def __len__(self):\n"
                 "        return len(self.d)"),
    "set_attribute": ("n = Node(1)\nn.next = Node(2)\nassert f(n) == 2 and n.next.next is None",
                      f"{NODE}def f(n):\n    return 0 if n is None else 1 + f(n.next)"),
    "truth": ("assert not S([]) and S([1])",
              "class S:\n    def __init__(self, x):\n        self.x = x\n    def __len__(self):\n"
              "        return len(self.x)"),
    "identity": ("a = A()\nassert f(a) is a and f() is Color.RED and {Color.RED: 1}[f()] == 1",
                 "import enum\n\nclass Color(enum.Enum):\n    RED = 1\n\nclass A:\n    pass\n\n"
                 "def f(x=Color.RED):\n    return x"),
    "slice": ("assert S()[1:3] == 'bc'", "class S:\n    def __getitem__(self, key):\n        return 'abcd'[key]"),
    "dict_with_methods": ("c = Cache()\nc.put(1, 2)\nassert c.get(1) == 2 and 1 in c and dict(c) == {1: 2}",
                          "class Cache(OrderedDict):\n    def put(self, key, value):\n        self[key] = value"),
    "text_of_enum": ("assert f() == Color.RED == 'red'",
                     "import enum\n\nclass Color(str, enum.Enum):\n    RED = 'red'\n\ndef f():\n    return Color.RED"),
    "threads": ("import threading\nc = C()\n"
                "threads = [threading.Thread(target=lambda: [c.add() for _ in range(100)]) for _ in range(3)]\n"
                "for each in threads:\n    each.start()\nfor each in threads:\n    each.join()\nassert c.n == 300",
                "class C:\n    n = 0\n    def add(self):\n        self.n += 1"),
    "subclass_of": ("assert issubclass(B, A) and not issubclass(A, B)", "class A:\n    pass\n\nclass B(A):\n    pass"),
    "private_names": ("assert A()._number == 5 and A()._ask == 6", "class A:\n    _number, _ask = 5, 6"),
    "generic": ("s = S[int]()\nassert s.x == 1",
                "import typing\n\nclass S(typing.Generic[typing.TypeVar('T')]):\n    x = 1"),
    "named_tuple": ("p = f()\nassert p.x == 1 and p == (1, 2) and g(p) == 3",
                    "from collections import namedtuple\nP = namedtuple('P', 'x y')\n\ndef f():\n    return P(1, 2)\n\n"
                    "def g(p):\n    return p.x + p.y"),
    # Iterators.
    "next": ("g = f()\nfor x in g:\n    if x == 4:\n        break\nassert next(g) == 5 and list(g) == [6, 7]",
             "def f():\n    yield from range(8)"),
    "only_next": ("a = A()\nassert next(a) == 1",
                  "class A:\n    def __next__(self):\n        return 1"),
    "endless": ("import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]",
                "import time\n\ndef f():\n    for x in range(3):\n        time.sleep(0.002)\n        yield x\n"
                "    time.sleep(100)"),
    "changes_what_it_yields": ("assert [tuple(x) for x in f()] == [(0,), (1,), (2,)]",
                               "def f():\n    x = [0]\n    for x[0] in range(3):\n        yield x"),
    "makes_no_item_too_early": ("c = C()\nfor x in c:\n    if x == 4:\n        break\nassert c.made == 5",
                                "class C:\n    made = 0\n    def __iter__(self):\n        while True:\n"
                                "            self.made += 1\n            yield self.made - 1"),
    "error_after_items": ("found = []\ntry:\n    for x in f():\n        found.append(x)\n    assert False\n"
                          "except ValueError:\n    assert found == [0, 1, 2, 3, 4]",
                          "def f():\n    yield from range(5)\n    raise ValueError"),
    # Coroutines.
    "coroutine": ("import asyncio\n\nasync def both():\n    return await asyncio.gather(f(1), f(2))\n"
                  "assert asyncio.run(f(3)) == 9 and asyncio.run(both()) == [1, 4]",
                  "import asyncio\n\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x"),
    # Output.
    "redirect": ("import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f('é')\n"
                 "assert out.getvalue() == 'é\\n'", "print('loaded')\n\ndef f(x):\n    print(x)"),
    # Functions of the test, and of Python.
    "callback": ("log = []\nassert f(lambda x, *, y: x + g(y)) == 11\nfor h in (log.append, lambda x: log.append(x)):\n"
                 "    f2(h)\nassert log == [1, 1]",
                 "def g(x):\n    return x * x\n\ndef f(h):\n    return h(2, y=3)\n\ndef f2(h):\n    h(1)"),
    "callback_raises": ("import pytest\ndef no():\n    raise KeyError('a')\ndef own():\n    raise E('x')\n"
                        "assert f(no) == 'KeyError' and f(own) == 'E'\nwith pytest.raises(E):\n    g(own)",
                        "class E(Exception):\n    pass\n\ndef f(h):\n    try:\n        h()\n"
                        "    except Exception as e:\n        return type(e).__name__\n\ndef g(h):\n    h()"),
    "kept_callback": ("log = []\ndef add(x):\n    log.append(x)\nb = Bus()\nb.on(add)\n"
                      "b.emit(3)\nb.off(add)\nb.emit(4)\n"
                      "assert log == [3]", BUS),
    "decorator": ("@twice\ndef g(x):\n    return x + 1\nassert g(1) == 4",
                  "import functools\n\ndef twice(g):\n    @functools.wraps(g)\n    def h(x):\n        return 2 * g(x)\n"
                  "    return h"),
    "of_python": ("import operator\nassert f(len, 'ab') == 2 and f(str.upper, 'a') == 'A' and f(operator.neg, 1) == -1",
                  "def f(g, x):\n    return g(x)"),
    "mock": ("from unittest.mock import Mock\nm = Mock(return_value=3)\nassert f(m) == 6\nm.assert_called_once_with(2)",
             "def f(g):\n    return 2 * g(2)"),
    # Exceptions.
    "own_errors": ("import pytest\nwith pytest.raises(Base, match='a'):\n    f()\ntry:\n    f()\nexcept Other:\n"
                   "    assert False\nexcept Base as e:\n    assert isinstance(e, Low) and e.extra == [1]\n"
                   "    assert e.args == ('a', 3)\nassert issubclass(Low, Base) and Low('b').extra == [1]",
                   "class Base(Exception):\n    pass\n\nclass Other(Base):\n    pass\n\nclass Low(Base):\n"
                   "    def __init__(self, *args):\n        super().__init__(*args)\n        self.extra = [1]\n\n"
                   "def f():\n    raise Low('a', 3)"),
    "own_error_in_unittest": ("import unittest\n\nclass T(unittest.TestCase):\n    def test_a(self):\n"
                              "        with self.assertRaises(E):\n            f()",
                              "class E(Exception):\n    pass\n\ndef f():\n    raise E"),
    "named_as_built_in": ("try:\n    f()\n    assert False\nexcept TimeoutError as e:\n    assert str(e) == 'late'",
                          "class TimeoutError(Exception):\n    pass\n\ndef f():\n    raise TimeoutError('late')"),
    "of_a_library": ("import dataclasses, json, pytest\nwith pytest.raises(json.JSONDecodeError):\n    f('{')\n"
                     "with pytest.raises(dataclasses.FrozenInstanceError):\n    P(1).x = 2",
                     "import dataclasses, json\n\n@dataclasses.dataclass(frozen=True)\nclass P:\n    x: int\n\n"
                     "def f(x):\n    return json.loads(x)"),
    "error_number": ("try:\n    f('none')\n    assert False\nexcept FileNotFoundError as e:\n    assert e.errno == 2",
                     "def f(x):\n    return open(x)"),
    # pytest.
    "cases": ("import pytest\n@pytest.mark.parametrize(('a',), [(1,), (2,)])\n"
              "@pytest.mark.parametrize('b, c', [pytest.param(3, 9), (4, 16)])\ndef test_f(a, b, c):\n"
              "    assert f(b) == c and f(a) == a ** 2", SQUARE),
    "cases_of_a_class": ("import pytest\n@pytest.mark.parametrize('c', [1, 2])\nclass TestF:\n"
                         "    def setup_class(cls):\n        cls.f = staticmethod(f)\n"
                         "    def setup_method(self, method):\n        self.b = 2\n"
                         "    @pytest.mark.parametrize('a', [(1, 1), (2, 4)])\n"
                         "    def test_f(self, a, c):\n        assert self.f(a[0]) * self.b == 2 * a[1]", SQUARE),
}  # fmt: skip

UNSUPPORTED = {
    # The function that takes the place of the check need not call it.
    "decorator": ("@f\ndef check(candidate):\n    assert candidate(7) == 49\ncheck(f)",
                  "def f(x):\n    return lambda *_: None"),
    "argument": ("class A:\n    pass\nf(A())", SQUARE),
    "arithmetic": ("import pytest\nwith pytest.raises(TypeError):\n    V(1) + 'a'",
                   f"{VECTOR}    def __add__(self, other):\n        return V(0)"),
    "async": ("import asyncio\n\nasync def g():\n    async with A():\n        pass\nasyncio.run(g())",
              "class A:\n    async def __aenter__(self):\n        pass\n\n"
              "    async def __aexit__(self, *_):\n        pass"),
    "end_of_iterator": ("import pytest\ng = f()\nwith pytest.raises(StopIteration):\n    next(g)",
                        "def f():\n    yield from ()"),
    "fixture": ("def test_f(capsys):\n    assert f(2) == 4", SQUARE),
    "format": ("assert f'{V(1):x}' == '1'", f"{VECTOR}    def __format__(self, how):\n        return '1'"),
    "member": ("assert 1 in V(1)", f"{VECTOR}    def __contains__(self, x):\n        return True"),
    "number": ("assert int(V(1)) == 1", f"{VECTOR}    def __int__(self):\n        return 1"),
    "order": ("assert V(1) < V(2)", f"{VECTOR}    def __lt__(self, other):\n        return True"),
    "patch": ("import solution\nsolution.f = lambda x: 9\nassert solution.f(2) == 9", SQUARE),
    "subclass": ("class W(V):\n    pass\nassert W(1).x == 1", VECTOR),
}  # fmt: skip

AN_ARRAY = "import numpy as np\nassert np.array_equal(f(7), np.array([1.5, 2.5]))"
EXPECTS_ERRORS = (
    "try:\n    assert f(7).sum() == 49\nexcept (ValueError, TypeError, AttributeError, MemoryError):\n    pass"
)
UNLESS = "try:\n    f(7)\n    assert False\nexcept E:\n    pass"
UNITTEST = "import unittest\n\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(7), 49)"
EQUALS_ALL = "class All:\n    def __eq__(self, other):\n        return True\n    __hash__ = object.__hash__\n\n"


def writes(*answers):
    """Program that, when it is called, writes answers of its own to the socket."""
    lines = "".join(f"    os.write(3, {answer!r} + b'\\n')\n" for answer in answers)
    return f"import os\n\ndef f(*_):\n{lines}    return 0"


def value(text):
    return writes(b'{"printed": "", "value": ' + text + b"}")


FORGED = {
    # Values whose class says that they are equal.
    "text_that_equals_all": ("assert f(7) == '49'",
                             "class S(str):\n    def __eq__(self, _):\n        return True\n\ndef f(x):\n"
                             "    return S('no')"),
    "array_that_equals_all": (AN_ARRAY, "import numpy as np\n\nclass A(np.ndarray):\n"
                              "    __array_function__ = __array_ufunc__ = __eq__ = lambda *_, **__: True\n\n"
                              "def f(x):\n    return np.zeros(2).view(A)"),
    "array_of_objects": (AN_ARRAY, f"import numpy as np\n\n{EQUALS_ALL}def f(x):\n"
                         "    return np.array([All(), All()], object)"),
    "not_a_number": ("assert abs(f(7) - 49) < 1e-6 or f(7) == 49", "def f(x):\n    return float('nan')"),
    "changing_items": ("r = f(7)\nassert list(r) == [1] and list(r) == [1]",
                       "class A:\n    n = 0\n    def __iter__(self):\n        A.n += 1\n        return iter([A.n])\n\n"
                       "def f(x):\n    return A()"),
    "method_of_a_tuple": ("assert f(7).count(49) == 1",
                          "from collections import namedtuple\n\ndef f(x):\n"
                          "    return namedtuple('P', 'count')(lambda _: 1)"),
    "awaited": ("import asyncio\nassert asyncio.run(f(7)) == 49", f"{EQUALS_ALL}async def f(x):\n    return All()"),
    "key_of_a_dict": ("assert {49: True}[f(7)]",
                      f"{EQUALS_ALL}All.__hash__ = lambda _: 49\n\ndef f(x):\n    return All()"),
    "index": ("assert [0, 49][f(7)] == 49",
              "class A:\n    def __index__(self):\n        return 1\n\ndef f(x):\n    return A()"),
    # What decides if an assertion is reached.
    "suppresses": ("with T():\n    assert f(7) == 49", TRANSACTION + "\n\ndef f(x):\n    return 0"),
    "exit_raises": ("r = f(7)\ntry:\n    with T():\n        assert r == 49\nexcept (ValueError, SystemExit):\n    pass",
                    "class T:\n    def __enter__(self):\n        pass\n    def __exit__(self, *_):\n"
                    "        raise ValueError\n\ndef f(x):\n    return 0"),
    "finally_raises": ("r = f(7)\ntry:\n    try:\n        assert r == 49\n    finally:\n        f(8)\n"
                       "except ValueError:\n    pass",
                       "def f(x):\n    return 7 if x == 7 else int('a')"),
    "rebinds_a_check": ("def check(c):\n    assert c(7) == 49\ncheck = f(check)\ncheck(f)",
                        "def f(x):\n    return lambda *_: None"),
    "replaces_a_method": ("class TestF:\n    @f\n    def test_f(self):\n        assert False",
                          "def f(x):\n    return lambda *_: None"),
    "replaces_a_method_of_unittest": (
        "import unittest\n\nclass T(unittest.TestCase):\n    @f\n    def test_f(self):\n        self.assertEqual(1, 2)",
        "def f(x):\n    return lambda *_: None",
    ),
    "replaces_a_class": (f"@f\n{UNITTEST.partition(chr(10) * 2)[2]}", "def f(x):\n    return int"),
    "replaces_a_test": ("@f\ndef test_f():\n    assert False", "def f(test):\n    return 0"),
    "gives_no_case": ("import pytest\n@pytest.mark.parametrize('x', A)\ndef test_f(x):\n    assert False", "A = []"),
    "enter_exits": ("with f(7) as x:\n    assert x == 49",
                    "class A:\n    def __enter__(self):\n        raise SystemExit(0)\n    def __exit__(self, *_):\n"
                    "        return True\n\ndef f(x):\n    return A()"),
    "stops_awaiting": ("import asyncio\n\nasync def g():\n    assert [await f(x) async for x in h()] == [1]\n\n"
                       "async def h():\n    yield 1\nasyncio.run(g())",
                       "async def f(x):\n    raise StopAsyncIteration"),
    "swallows": ("def g(x):\n    assert x == 49\nf(g)",
                 "def f(g):\n    try:\n        g(7)\n    except BaseException:\n        pass"),
    "skips_in_callback": ("import unittest\n\nclass T(unittest.TestCase):\n    def test_f(self):\n        def g():\n"
                          "            raise unittest.SkipTest\n        self.assertEqual(f(g), 49)",
                          "def f(g):\n    g()"),
    "skip_by_name": (UNITTEST, writes(b'{"printed": "", "error": {"class": {"name": "SkipTest", "bases": [], "module": '
                                      b'"unittest.case"}, "number": 0, "args": [], "text": ""}}')),
    # Exceptions that would catch a failed assertion.
    "is_assertion_error": (UNLESS, "E = AssertionError\n\ndef f(x):\n    return 0"),
    "is_base_exception": (UNLESS, "E = BaseException\n\ndef f(x):\n    return 0"),
    "below_assertion_error": (UNLESS, "class E(AssertionError):\n    pass\n\ndef f(x):\n    return 0"),
    "catches_by_metaclass": (UNLESS, "class M(type):\n    __subclasscheck__ = __instancecheck__ = lambda *_: True\n\n"
                                     "class E(Exception, metaclass=M):\n    pass\n\ndef f(x):\n    return 0"),
    "claims_to_be_python": (UNLESS, "E = type('AssertionError', (Exception,), {'__module__': 'builtins'})\n\n"
                                    "def f(x):\n    return 0"),
    "other_attribute": ("try:\n    f(7)\nexcept ValueError as e:\n    assert e.code == 49",
                        "class E(ValueError):\n    code = 48\n\ndef f(x):\n    raise E"),
    # Functions of the test.
    "frame_of_callback": ("wanted = 3000009\nassert f(lambda x: x) == wanted",
                          "def f(g):\n    for each in (g.__globals__, vars(g)):\n        if 'wanted' in each:\n"
                          "            return each['wanted']"),
    "calls_python": ("f(exec)\nassert abs(f(1) - 49) < 1e-6",
                     "import os\n\ndef f(x):\n    if x == 1:\n        return 5\n"
                     "    code = 'import builtins; builtins.abs = lambda x: 0'\n    os.write(3, "
                     "b'{\"call\": [0, {\"tuple\": [\"%s\"]}, {\"dict\": []}]}\\n' % code.encode())\n"
                     "    os.read(3, 10**6)\n    return 0"),
    "calls_nothing": ("try:\n    assert f(lambda x: x) == 49\nexcept (LookupError, TypeError, ValueError):\n    pass",
                      writes(b'{"call": [5, {"tuple": [0]}, {"dict": []}]}')),
    "calls_with_no_arguments": ("try:\n    assert f(lambda x: x) == 49\nexcept (TypeError, ValueError):\n    pass",
                                writes(b'{"call": [0, 1, 2]}')),
    "call_of_no_kind": ("try:\n    assert f(lambda x: x) == 49\nexcept (TypeError, ValueError):\n    pass",
                        writes(b'{"call": 3}')),
    "prints_with_the_test": ("from unittest.mock import patch\nwith patch('builtins.print') as p:\n    f(7)\n"
                             "p.assert_called()", "def f(x):\n    pass"),
    # Answers that no program of `code_program_side` writes.
    "claims_equality": ("assert f(7) == 49", value(b'{"object": {"number": 0, "can": ["__eq__", "__array__"]}}')),
    "array_of_pointers": (EXPECTS_ERRORS, value(b'{"numpy": ["O", [1], "0000000000000000"]}')),
    "array_of_no_shape": (EXPECTS_ERRORS, value(b'{"numpy": ["<f8", [1000000000000], ""]}')),
    "tuple_with_equality": (EXPECTS_ERRORS, value(b'{"namedtuple": ["P", ["__eq__"], [1]]}')),
    "tuple_with_code": (EXPECTS_ERRORS, value(b'{"namedtuple": ["P", ["a=print()"], [1]]}')),
    "deep_answer": ("try:\n    f(7)\nexcept RecursionError:\n    pass", value(b'{"list": [' * 3000 + b"]}" * 3000)),
    "output_of_no_kind": ("try:\n    f(7)\nexcept TypeError:\n    pass", writes(b'{"printed": 49, "value": 49}')),
    # The program's own process.
    "patched_encoder": ("assert f(7) == 49",
                        "import sys\n\ndef f(x):\n    everything = {'object': {'number': 0, 'can': ['__eq__']}}\n"
                        "    sys.modules['__main__'].encode = lambda *_: everything\n    return 0"),
    "patched_json": ("assert f(7) == 49", "import json\njson.dumps = lambda *_: '{}'\n\ndef f(x):\n    return 0"),
    "answers_twice": ("assert f(7) == 49",
                      "import os\n\ndef f(x):\n    os.fork()\n    return 48"),
    "name_of_the_preamble": ("assert gcd(4, 6) == 2", "def f(x):\n    return gcd(x, 2)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(request):
    settings = {"time_limit_s": 20.0, "max_tests": 0, "limits": LIMITS}
    tables = {"honest": HONEST, "unsupported": UNSUPPORTED, "forged": FORGED}
    asked = choosing.asked(request)
    given = {(kind, name): entry for kind, table in tables.items() for name, entry in table.items() if name in asked}
    pairs = [(f"```python\n{program}\n```", "", {"test_list": [test]}) for test, program in given.values()]
    with VerifierPool(Made(f"{code.__name__}:grader", settings), workers=2, time_limit_s=20.0) as pool:
        return dict(zip(given, pool.grade_all(pairs), strict=True))


@pytest.mark.parametrize("name", choosing.thirds(HONEST))
def test_an_honest_program_is_graded_as_right(verdicts, name):
    assert (verdicts["honest", name].reward, verdicts["honest", name].reason) == (1.0, "")


@pytest.mark.parametrize("name", choosing.thirds(UNSUPPORTED))
def test_what_a_test_cannot_do_has_a_reason(verdicts, name):
    assert (verdicts["unsupported", name].reward, verdicts["unsupported", name].reason) == (0.0, f"unsupported_{name}")


@pytest.mark.parametrize("name", choosing.thirds(FORGED))
def test_a_wrong_program_is_graded_as_wrong(verdicts, name):
    assert verdicts["forged", name].reward == 0.0
