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
DATA = (*PLAIN, *CONTAINERS.values(), bytes, dict)
PURE = (abs, all, any, chr, divmod, hash, len, max, min, ord, pow, repr, round, sorted, sum)
BUILTIN_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
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


def step(value):
    """Returns the next item of an iterator in a list, which is empty at its end."""
    try:
        return [next(value)]
    except StopIteration:
        return []


SPECIAL = {"__iter__": take, "__len__": len, "__next__": step, "__str__": str, "__repr__": repr}


# What a test does with an object of the program, beside calls.
OPERATIONS = {
    "attribute": getattr,
    "equal": lambda target, other: target == other,
    "instance": lambda target, other: isinstance(other, target),
    "item": lambda target, key: target[key],
    "set": lambda target, name_and_value: setattr(target, *name_and_value),
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

    def __call__(self, *args, **kwargs):
        return self._ask("call", self._number, args, kwargs)

    def __getitem__(self, key):
        return self._ask("item", self._number, key)

    def __eq__(self, other):
        return isinstance(other, Remote) and self._ask("equal", self._number, other) is True

    def __hash__(self):
        return hash(self._number)

    def __setattr__(self, name, value):
        self._ask("set", self._number, (name, value))

    def __instancecheck__(self, instance):
        return isinstance(instance, Remote) and self._ask("instance", self._number, instance) is True

    def __next__(self):
        for item in self._ask("special", self._number, "__next__"):
            return item
        raise StopIteration

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


class RemoteException(type):
    """A class of exceptions of the program, as the test sees it, for `except`, `pytest.raises` and `isinstance`."""

    def __new__(cls, name, bases, remote):
        return super().__new__(cls, name, bases, {"_remote": remote, "__getattr__": Remote.__getattr__})

    def __init__(cls, name, bases, remote):
        super().__init__(name, bases, {})

    def __call__(cls, *args, **kwargs):
        return cls._remote(*args, **kwargs)

    def __getattr__(cls, name):
        return Remote.__getattr__(cls._remote, name)

    def __instancecheck__(cls, instance):
        return super().__instancecheck__(instance) or isinstance(instance, cls._remote)

    def error(cls, text, number):
        """Returns an error of this class, whose attributes are those of the program's."""
        error = type.__call__(cls, text)
        error.__dict__.update(_ask=cls._remote._ask, _number=number)
        return error


def described(kind, keep):
    """Returns a class of exceptions as JSON: the names of its order of resolution for Python's own, else a record."""
    if kind.__module__ == "builtins":
        return [each.__name__ for each in kind.__mro__]
    bases = [described(base, keep) for base in kind.__bases__ if issubclass(base, BaseException)]
    return {"name": kind.__name__, "bases": bases, **keep(kind)}


def encode(value, keep):
    """Returns a value as JSON; `keep` returns {kind: number} of an object that is no data."""
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
    return of_type(value, keep) if isinstance(value, type) else keep(value)


def of_type(kind, keep):
    """Returns a type as JSON: Python's own by their names, so that both sides have the same."""
    if issubclass(kind, Exception):
        return {"exception": described(kind, keep)}
    return {"type": kind.__name__} if BUILTIN_TYPES.get(kind.__name__) is kind else keep(kind)


def decode(value, find):
    """Returns the value of `encode`; `find` returns the object of a number, a description or a function's number."""
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
    if kind == "type":
        return BUILTIN_TYPES[content]
    if kind not in ("bytes", "object", "exception", "function"):
        raise ValueError(f"no kind of data: {kind}")
    return bytes.fromhex(content) if kind == "bytes" else find({kind: content} if kind == "function" else content)


class Served:
    """The program's side of the connection: its objects, by number; the first is the namespace."""

    def __init__(self, connection, namespace):
        self.objects: list = [namespace]
        self.lines = connection.makefile("rwb")

    def serve(self):
        """Answers the test's requests with the program's functions until it closes the socket."""
        for line in self.lines:
            self.answer(*json.loads(line))

    def keep(self, value):
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def find(self, value):
        """Returns an object of the program, or a function that calls one of the test."""
        if isinstance(value, int):
            return self.objects[value]
        return lambda *args, **keywords: self.call_back(value["function"], args, keywords)

    def send(self, message):
        self.lines.write(json.dumps(message).encode() + b"\n")
        self.lines.flush()

    def call_back(self, function, args, keywords):
        self.send({"call": function, "arguments": encode(args, self.keep), "keywords": encode(keywords, self.keep)})
        # The test's function may itself call the program, before it returns.
        while isinstance(message := json.loads(self.lines.readline()), list):
            self.answer(*message)
        if "error" in message:
            raise exception_of(message["error"], None, {})(message["text"])
        return decode(message["value"], self.find)

    def do(self, what, number, argument, keywords):
        target = self.objects[number]
        if what == "name":
            return target[argument]
        return target(*argument, **keywords) if what == "call" else OPERATIONS[what](target, argument)

    def answer(self, what, number, argument, keywords):
        try:
            arguments, named = (decode(each, self.find) for each in (argument, keywords))
            value = self.do(what, number, arguments, named)
            # The arguments go back: a function may have changed a list in its place.
            given = {"arguments": encode(arguments, self.keep), "keywords": encode(named, self.keep)}
            answer = {"value": encode(value, self.keep)} | given
        except SystemExit as error:
            answer = {"exit": error.code if isinstance(error.code, PLAIN) else None}
        except Exception as error:
            # The text of a KeyError is the representation of its key.
            key = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else error
            text = key if isinstance(key, PLAIN) else str(error)[:1000]
            answer = {"error": described(type(error), self.keep), "text": text, **self.keep(error)}
        self.send(answer)


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


def exception_of(value, ask, known):
    """Returns the class of a description: of Python's the first that may be raised in a test, or a `RemoteException`.

    `known` are those that were made already, by name.
    """
    if isinstance(value, list):
        kinds = (getattr(builtins, name, None) for name in value)
        kinds = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
        return next((kind for kind in kinds if not issubclass(kind, NOT_RAISED)), RuntimeError)
    name, number = str(value["name"]), int(value["object"])
    if name not in known:
        bases = dict.fromkeys(exception_of(base, ask, known) for base in value["bases"])
        lowest = [base for base in bases if not any(issubclass(other, base) for other in bases if other is not base)]
        known[name] = RemoteException(name, tuple(lowest), Remote(ask, number))
    return known[name]


def read_answer(answer, find):
    """Returns an answer's exception (or None), value, arguments and keywords; a malformed answer ends the test."""
    try:
        if "exit" in answer:
            return SystemExit(decode(answer["exit"], find)), None, (), {}
        if "error" in answer:
            kind, text = find(answer["error"]), answer["text"]
            text = text if isinstance(text, int | float) else str(text)[:1000]
            is_own = isinstance(kind, RemoteException)
            return kind.error(text, int(answer["object"])) if is_own else kind(text), None, (), {}
        value, arguments, keywords = (decode(answer[part], find) for part in ("value", "arguments", "keywords"))
        if not isinstance(keywords, dict):
            raise ValueError("keywords are no dict")
        return None, value, arguments, keywords
    except MALFORMED:
        os._exit(CHANNEL_CLOSED)  # no exception: the test might expect one


def may_be_called(value):
    """Returns True for functions of the test, mocks, and functions of Python that only compute, unlike `eval`."""
    owner = getattr(value, "__self__", None) if isinstance(value, types.BuiltinMethodType) else None
    return callable(value) and (
        getattr(value, "__module__", None) in ("test", "math", "_operator")
        or type(value).__module__ in ("operator", "unittest.mock")
        or (type(value).__name__ == "partial" and may_be_called(getattr(value, "func", None)))
        or getattr(value, "__objclass__", None) in DATA
        or isinstance(owner, DATA)
        or any(value is each for each in PURE)
    )


class Asked:
    """The test's side of the connection. Whatever is wrong with an answer ends the test: see `read_answer`."""

    def __init__(self, connection):
        self.lines = connection.makefile("rwb")
        self.known = {}  # the program's classes of exceptions that the test has met, by name
        self.functions = []  # of the test, that the program may call

    def keep(self, value):
        if isinstance(value, RemoteException):
            value = value._remote
        if isinstance(value, Remote) or isinstance(type(value), RemoteException):
            return {"object": value._number}
        if may_be_called(value):
            self.functions.append(value)
            return {"function": len(self.functions) - 1}
        raise TypeError(f"a test can give data and its own functions to the program, not {type(value).__name__}")

    def find(self, value):
        return Remote(self.ask, value) if isinstance(value, int) else exception_of(value, self.ask, self.known)

    def send(self, message):
        """Sends a message, and returns the next one of the program; ends the test if there is none."""
        try:
            self.lines.write(json.dumps(message).encode() + b"\n")
            self.lines.flush()
            return json.loads(self.lines.readline(MAX_ANSWER))
        except (OSError, *MALFORMED):
            os._exit(CHANNEL_CLOSED)  # the program has ended, or is no Python, or does not end its answer

    def called_back(self, request):
        """Returns the answer of a function of the test that the program calls."""
        try:
            function = self.functions[request["call"]]
            arguments, keywords = (decode(request[part], self.find) for part in ("arguments", "keywords"))
        except MALFORMED:
            os._exit(CHANNEL_CLOSED)
        try:
            return {"value": encode(function(*arguments, **keywords), self.keep)}  # pyright: ignore  # a dict, or an error
        except AssertionError:
            raise  # the program must not hide it
        except Exception as error:
            return {"error": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}

    def ask(self, what, number, argument, keywords=None):
        """Returns what the program answers; raises its exception."""
        keywords = keywords or {}
        answer = self.send([what, number, encode(argument, self.keep), encode(keywords, self.keep)])
        while isinstance(answer, dict) and "call" in answer:
            answer = self.send(self.called_back(answer))
        error, value, arguments, named = read_answer(answer, self.find)
        if error is not None:
            raise error
        try:
            if what == "call":
                update(argument, arguments)
                update(keywords.values(), [named.get(name) for name in keywords])
        except MALFORMED:
            os._exit(CHANNEL_CLOSED)
        return value


class Solution(types.ModuleType):
    """Module of the program's names, for tests; also what `from solution import f` finds."""

    def __init__(self, connection):
        super().__init__("solution")
        self.__dict__["_ask"] = Asked(connection).ask

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


def cases_of(function):
    """Returns the arguments of each case of a test, as `pytest.mark.parametrize` gives them; one case without it."""
    cases = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = (*mark.args, *mark.kwargs.values())[:2]
            is_one = isinstance(names, str) and "," not in names
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            # The other type is that of `pytest.param`.
            rows = [value.values if type(value).__name__ == "ParameterSet" else [value] if is_one else value
                    for value in values]  # fmt: skip
            cases = [case | dict(zip(names, row, strict=True)) for row in rows for case in cases]
    return cases


def asked_for(function):
    """Returns the names of the parameters that have no default."""
    inspect = importlib.import_module("inspect")  # each test starts a process, and few need it
    parameters = inspect.signature(function).parameters.values()
    many = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [each.name for each in parameters if each.default is each.empty and each.kind not in many]


def run_function(function, names):
    """Runs all cases of a test function; what else it asks for are fixtures among the names of the test."""

    def value_of(name, made):
        if name not in made:
            wrapped = getattr(names[name], "_get_wrapped_function", None)  # of pytest from 8.4 on
            fixture = wrapped() if wrapped else names[name].__pytest_wrapped__.obj
            found = fixture(**{each: value_of(each, made) for each in asked_for(fixture)})
            made[name] = next(found) if isinstance(found, types.GeneratorType) else found
        return made[name]

    for case in cases_of(function):
        made = dict(case)
        function(**case | {name: value_of(name, made) for name in asked_for(function)})


def run_class(kind, names):
    """Runs the test methods of a class, as unittest or pytest does."""
    if "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
        tests = sys.modules["unittest"].defaultTestLoader.loadTestsFromTestCase(kind)
        assert tests.run(sys.modules["unittest"].TestResult()).wasSuccessful()
    elif kind.__name__.startswith("Test"):
        for name in [name for name in dir(kind) if name.startswith("test_")]:
            case = kind()
            getattr(case, "setup_method", bool)()
            run_function(getattr(case, name), names)


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
                run_function(value, names)
            elif isinstance(value, type) and value.__module__ == names["__name__"]:
                run_class(value, names)
    os.write(verdict, test["token"].encode())


def run_program(connection):
    sys.modules["solution"] = types.ModuleType("solution")
    namespace = sys.modules["solution"].__dict__
    with open("program.py", encoding="utf-8") as file:
        text = file.read()
    exec(compile(text, "program.py", "exec"), namespace)
    Served(connection, namespace).serve()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    with socket.socket(fileno=3) as channel:
        (run_program if sys.argv[1] == "program" else run_test)(channel)
