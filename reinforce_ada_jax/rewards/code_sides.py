"""The two processes of a test that calls functions: the program's and the test's, each `python -c` in a sandbox.

The test never runs in the program's process, where a program could change the meaning of a comparison, end the process
with code 0, or find the expected value. It calls the program's functions over a socket. Arguments and results travel as
data: numbers, texts, bytes, dates, containers of Python. Any other object of the program stays in its process, and the
test has a `Remote` in its place. So the two sides share no object, and a result that equals everything is only a
`Remote` that equals nothing but other objects of the program. What the program sends is checked: it decides neither
what a module of Python does in the test, nor when a loop of the test ends.

Nothing of this package can be imported here. The only argument is "program" or "test".
"""

import ast
import builtins
import importlib
import json
import math
import os
import socket
import sys
import types

CHANNEL_CLOSED = 3  # exit code, as in isolation/sandbox.py
MAX_ANSWER = 2**25  # bytes
MAX_ITEMS = 100_000  # of an iterator that stays with the program
PLAIN = (bool, int, float, str)
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Values of Python's own classes, which travel as the arguments that make them again.
MADE = {
    "builtins.complex": lambda value: [value.real, value.imag],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.deque": lambda value: [list(value), value.maxlen],
    **dict.fromkeys(
        ("builtins.range", "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta",
         "datetime.timezone", "decimal.Decimal", "fractions.Fraction"),
        lambda value: value.__reduce__()[1],
    ),
}  # fmt: skip
# Exceptions from reading an answer that `serve` did not write.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
# Exceptions that end a loop (they become RuntimeError, as in a generator), or that need more than a text.
NOT_RAISED = (
    StopIteration, StopAsyncIteration, BaseExceptionGroup, UnicodeDecodeError, UnicodeEncodeError,
    UnicodeTranslateError,
)  # fmt: skip
# Modules and functions that are Python's in a test which uses them without an import.
OTHERS = ("networkx", "numpy", "pandas", "pytest", "scipy", "sklearn", "sympy", "torch")
MODULES = {name: name for name in (*sys.stdlib_module_names, *OTHERS)}
MODULES |= {"np": "numpy", "nx": "networkx", "pd": "pandas", "plt": "matplotlib.pyplot", "npt": "numpy.testing"}
FUNCTIONS = {
    "isclose": "math", "deepcopy": "copy", "Counter": "collections", "OrderedDict": "collections",
    "defaultdict": "collections", "allclose": "numpy", "array_equal": "numpy", "approx": "pytest", "raises": "pytest",
}  # fmt: skip
COMPARED = ("allclose", "almost_equal", "array_almost_equal", "array_equal", "equal")
FUNCTIONS |= {f"assert_{name}": "numpy.testing" for name in COMPARED}
PYTHON = {*dir(builtins), *FUNCTIONS}


def take(value):
    """Returns the items of an iterable as a list; ValueError if there are more than MAX_ITEMS."""
    items = []
    for item in value:
        if len(items) == MAX_ITEMS:
            raise ValueError("too many items")
        items.append(item)
    return items


SPECIAL = {"__iter__": take, "__len__": len, "__str__": str, "__repr__": repr}


# What a test does with an object of the program, beside calls.
OPERATIONS = {
    "attribute": getattr,
    "equal": lambda target, other: target == other,
    "instance": lambda target, other: isinstance(other, target),
    "item": lambda target, key: target[key],
    "special": lambda target, name: SPECIAL[name](target),
}


class Remote:
    """Object of the program, as the test sees it.

    It has no arithmetic and no order: else the program would decide what `abs(f(7) - 49) < 1e-6` means.
    """

    def __init__(self, ask, number):
        self.__dict__.update(_ask=ask, _number=number)

    def __getattr__(self, name):
        if name.startswith("__"):  # numpy would read memory where `__array_interface__` says
            raise AttributeError(f"the test cannot read {name} of an object of the program")
        return self._ask("attribute", self._number, name)

    def __setattr__(self, name, value):
        os._exit(CHANNEL_CLOSED)  # the program would not see it; no exception: the test might expect one

    def __delattr__(self, name):
        os._exit(CHANNEL_CLOSED)

    def __call__(self, *args, **kwargs):
        return self._ask("call", self._number, args, kwargs)

    def __getitem__(self, key):
        return self._ask("item", self._number, key)

    def __eq__(self, other):
        return isinstance(other, Remote) and self._ask("equal", self._number, other) is True

    def __hash__(self):
        return hash(self._number)

    def __instancecheck__(self, instance):
        return isinstance(instance, Remote) and self._ask("instance", self._number, instance) is True

    def __iter__(self):
        return iter(self._ask("special", self._number, "__iter__"))

    def __len__(self):
        return self._ask("special", self._number, "__len__")

    def __bool__(self):
        return True

    def __str__(self):
        return self._ask("special", self._number, "__str__")

    def __repr__(self):
        return self._ask("special", self._number, "__repr__")


def encode(value, keep):
    """Returns a value as JSON; `keep` returns the number of an object that is no data."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, PLAIN):
        return next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in MADE:
        return {name: [encode(each, keep) for each in MADE[name](value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(entry, keep)] for key, entry in value.items()]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    return {"object": keep(value)}


def decode(value, find):
    """Returns the value of `encode`; `find` returns the object of a number."""
    if value is None or isinstance(value, PLAIN):
        return value
    ((kind, content),) = value.items()
    if kind in CONTAINERS:
        return CONTAINERS[kind](decode(item, find) for item in content)
    if kind == "dict":
        return {decode(key, find): decode(entry, find) for key, entry in content}
    if kind in MADE:
        module, _, name = kind.partition(".")
        return getattr(importlib.import_module(module), name)(*(decode(each, find) for each in content))
    if kind not in ("bytes", "object"):
        raise ValueError(f"no kind of data: {kind}")
    return bytes.fromhex(content) if kind == "bytes" else find(content)


def serve(connection, namespace):
    """Answers the test's requests with the program's functions until it closes the socket."""
    objects = [namespace]

    def keep(value):
        objects.append(value)
        return len(objects) - 1

    def do(what, number, argument, keywords):
        target = objects[number]
        if what == "name":
            return namespace[argument]
        if what == "call":
            return target(*argument, **keywords)
        return OPERATIONS[what](target, argument)

    lines = connection.makefile("rwb")
    for line in lines:
        what, number, argument, keywords = json.loads(line)
        try:
            arguments, named = (decode(each, objects.__getitem__) for each in (argument, keywords))
            value = do(what, number, arguments, named)
            # The arguments go back: a function may have changed a list in its place.
            given = {"arguments": encode(arguments, keep), "keywords": encode(named, keep)}
            answer = {"value": encode(value, keep)} | given
        except SystemExit as error:
            answer = {"exit": error.code if isinstance(error.code, PLAIN) else None}
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            # The text of a KeyError is the representation of its key.
            is_key = type(error).__str__ is KeyError.__str__ and len(error.args) == 1
            key = error.args[0] if is_key else error
            answer = {"error": names, "text": key if isinstance(key, PLAIN) else str(error)[:1000]}
        lines.write(json.dumps(answer).encode() + b"\n")
        lines.flush()


def update(old, new):
    """Copies the program's changes of container arguments into the test's own containers."""
    for mine, theirs in zip(old, new, strict=False):
        if type(mine) is not type(theirs) or mine == theirs:
            continue
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)


def error_of(names, text):
    """Returns the first of the named exceptions of Python that may be raised in a test; else a RuntimeError."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_RAISED):
            return kind(text if isinstance(text, int | float) else str(text)[:1000])
    return RuntimeError(str(text)[:1000])


def read_answer(line, find):
    """Returns an answer's exception (or None), value, arguments and keywords; a malformed answer ends the test."""
    try:
        answer = json.loads(line)
        if "exit" in answer:
            return SystemExit(decode(answer["exit"], find)), None, (), {}
        if "error" in answer:
            return error_of(answer["error"], answer["text"]), None, (), {}
        value, arguments, keywords = (decode(answer[part], find) for part in ("value", "arguments", "keywords"))
        if not isinstance(keywords, dict):
            raise ValueError("keywords are no dict")
        return None, value, arguments, keywords
    except MALFORMED:
        os._exit(CHANNEL_CLOSED)  # no exception: the test might expect one


class Solution(types.ModuleType):
    """Module of the program's names, for tests; also what `from solution import f` finds."""

    def __init__(self, connection):
        super().__init__("solution")
        lines = connection.makefile("rwb")

        def keep(value):
            if isinstance(value, Remote):
                return value._number
            raise TypeError(f"a test can give data to the program, not {type(value).__name__}")

        def find(number):
            return Remote(ask, int(number))

        def ask(what, number, argument, keywords=None):
            request = [what, number, encode(argument, keep), encode(keywords or {}, keep)]
            try:
                lines.write(json.dumps(request).encode() + b"\n")
                lines.flush()
                line = lines.readline(MAX_ANSWER)
            except OSError:
                line = b""
            if not line.endswith(b"\n"):
                # The program has ended, or is no Python, or does not end its answer. No exception: see `read_answer`.
                os._exit(CHANNEL_CLOSED)
            error, value, arguments, named = read_answer(line, find)
            if error is not None:
                raise error
            if what == "call":
                try:
                    update(argument, arguments)
                    update((keywords or {}).values(), [named.get(name) for name in keywords or {}])
                except MALFORMED:
                    os._exit(CHANNEL_CLOSED)
            return value

        self.__dict__["_ask"] = ask

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_ask"]("name", 0, name)
        except KeyError:
            raise AttributeError(f"the program defines no {name}") from None


class Names(dict):
    """Names of a test: its own, then Python's, then those of the program.

    If the test uses only names of Python, and the program defines exactly one of them, the test gets the program's:
    `assert sum(10, 15) == 6` of MBPP. If the program defines more, the test gets Python's: `isinstance` could be one.
    """

    def __init__(self, solution, tree):
        super().__init__(__name__="test", __builtins__=builtins)
        self.solution = solution
        self.modules, others = names_used(tree)
        if others <= PYTHON:
            found = {name: getattr(solution, name, None) for name in others if not name.startswith("__")}
            defined = {name: value for name, value in found.items() if value is not None}
            self.update(defined if len(defined) == 1 else {})

    def __missing__(self, name):
        if name in self.modules:
            return importlib.import_module(MODULES[name])
        if name in FUNCTIONS:
            return getattr(importlib.import_module(FUNCTIONS[name]), name)
        if hasattr(builtins, name):
            return getattr(builtins, name)
        try:
            return getattr(self.solution, name)
        except AttributeError:
            raise NameError(f"name {name!r} is not defined") from None


def names_used(tree):
    """Returns the modules of Python among the names that a test uses, and the names that it does not define itself.

    A name is a module's if the test only reads its attributes, as in `math.isclose`.
    """
    used, own, modules = set(), set(), set()
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (own if not isinstance(node.ctx, ast.Load) else modules if id(node) in bases else used).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            used.update({"solution"}.intersection(imported))
            own.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler):
            own.add(node.name)
    own.discard("solution")
    found = modules.intersection(MODULES) - used
    return found, (used | modules) - own - found


def same(value, expected):
    """Returns True if a result is the expected JSON value, with tuples as lists, within 1e-6 of a float."""
    if isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        if not numbers or not math.isfinite(expected):
            return numbers and (value == expected or (math.isnan(expected) and math.isnan(value)))
        return abs(value - expected) <= 1e-6 * max(1.0, abs(expected))
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): entry for key, entry in each.items()} for each in (value, expected))
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    return value == expected and isinstance(value, Remote) == isinstance(expected, Remote)


def run_class(kind):
    """Runs the test methods of a class, as unittest or pytest does."""
    if "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
        tests = sys.modules["unittest"].defaultTestLoader.loadTestsFromTestCase(kind)
        assert tests.run(sys.modules["unittest"].TestResult()).wasSuccessful()
    elif kind.__name__.startswith("Test"):
        for name in [name for name in dir(kind) if name.startswith("test_")]:
            case = kind()
            getattr(case, "setup_method", bool)()
            getattr(case, name)()


def run_test(connection):
    """Runs the test on standard input; writes its token to standard output if every assertion held."""
    test = json.load(sys.stdin)
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the test prints
    solution = Solution(connection)
    sys.modules["solution"] = solution
    if "function" in test:
        try:
            owner = solution.Solution()
        except AttributeError:
            owner = solution
        found = getattr(owner, test["function"])(*test["arguments"])
        # In some sets the expected value is in a list of one, or is JSON.
        assert any(same(each, wanted) for each in (found, [found]) for wanted in test["expected"])
    else:
        tree = ast.parse(test["code"])
        names = Names(solution, tree)
        exec(compile(tree, "test", "exec"), names)
        for name, value in list(names.items()):
            if name.startswith("test_") and callable(value):
                value()
            elif isinstance(value, type) and value.__module__ == names["__name__"]:
                run_class(value)
    os.write(verdict, test["token"].encode())


def run_program(connection):
    sys.modules["solution"] = types.ModuleType("solution")
    namespace = sys.modules["solution"].__dict__
    with open("program.py", encoding="utf-8") as file:
        text = file.read()
    exec(compile(text, "program.py", "exec"), namespace)
    serve(connection, namespace)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    with socket.socket(fileno=3) as channel:
        (run_program if sys.argv[1] == "program" else run_test)(channel)
