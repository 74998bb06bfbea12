"""The process of a test that calls functions: it runs the test, and asks `code_program_side` for each call.

The test never runs in the program's process, where a program could change the meaning of a comparison, end the process
with code 0, or find the expected value. It calls the program's functions over a socket. Arguments and results travel as
data: numbers, texts, bytes, dates, containers and arrays. Any other object of the program stays in its process, and the
test has a `Remote` in its place. So the two sides share no object, and a result that equals everything is only a
`Remote` that equals nothing but other objects of the program. What the program sends is checked: it decides neither
what a module of Python does in the test, nor when a loop of the test ends.

If a test does something that a `Remote` does not support, the test ends with a reason, "unsupported_" and a word. It
gets no exception, because it might expect one.

The sandbox has no file of this package: only the modules that `code` puts before this text can be imported.
"""

import ast
import functools
import importlib
import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
import types

from reinforce_ada_jax.rewards.code_names import Names
from reinforce_ada_jax.rewards.code_remote import VERDICT, ErrorClass, Remote, remote_class, unsupported
from reinforce_ada_jax.rewards.code_wire import CHANNEL_CLOSED, PLAIN, close, decode, encode, python_error, send

MAX_ANSWER = 2**25  # bytes
# Exceptions from reading an answer that `code_program_side` did not write.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class Channel:
    """Requests to the program, and the objects of each side that the other one knows by number."""

    def __init__(self, connection):
        self.lines = connection.makefile("rwb")
        self.found, self.classes = {}, {}
        self.mine = []
        self.lock = threading.RLock()  # a test may have threads

    def keep(self, value):
        """Describes an object for the program: one of its own, one of Python, or a function that it may call."""
        own = value if isinstance(value, Remote) else getattr(value, "__remote__", None)
        if isinstance(own, Remote):
            return {"number": own.__state__.number}
        python = name_in_python(value)
        if not python and not is_function(value):
            unsupported("argument")
        if not any(each is value for each in self.mine):
            self.mine.append(value)
        index = next(index for index, each in enumerate(self.mine) if each is value)
        name = getattr(value, "__name__", "function")
        return {"mine": index} | ({"python": python} if python else {"name": str(name)})

    def find(self, content):
        """Returns the test's object for a description."""
        if "mine" in content:
            return self.mine[content["mine"]]
        number = int(content["number"])
        if "error" in content:
            return self.error(content["error"])
        if "error_class" in content and isinstance(kind := self.error_class(content["error_class"]), ErrorClass):
            return kind
        if content.get("await") is True:
            return self.awaited(number)
        if number not in self.found:
            self.found[number] = remote_class(tuple(content.get("can", ["__call__"])))(self.ask, number)
        return self.found[number]

    async def awaited(self, number):
        return self.ask("await", number)

    def error_class(self, content):
        """Returns a class for one of the program's classes of exceptions; it is never one of Python's own.

        So a name of the program cannot catch a failed assertion. If the program gives its class the name of a built-in
        one, and no other base, it becomes a subclass of the built-in one, because the test may mean either.
        """
        name, module = str(content["name"]), str(content["module"])
        number = content.get("number")
        if number is None and (known := python_error(module, name)):
            return known
        bases = [self.error_class(base) for base in content["bases"]]
        if number is None:
            return next(iter(bases), Exception)
        if (number := int(number)) not in self.classes:
            bases = [base for base in bases if base is not Exception] or [python_error("builtins", name) or Exception]
            methods = {
                "__remote__": remote_class(("__call__",))(self.ask, number),
                "__getattr__": lambda self, name: getattr(self.__remote__, name),
                "__str__": lambda self: self.__text__,
            }
            self.classes[number] = ErrorClass(name, tuple(bases), methods)
        return self.classes[number]

    def error(self, content):
        """Returns an exception as the program describes it."""
        kind, text, args = self.error_class(content["class"]), str(content["text"])[:1000], content["args"]
        if not all(arg is None or isinstance(arg, PLAIN) for arg in args):
            raise ValueError("arguments of an exception that are no data")
        error = kind.__new__(kind, *args)
        if isinstance(kind, ErrorClass):
            remote = remote_class(())(self.ask, int(content["number"]))
            error.__dict__.update(__remote__=remote, __text__=text)
        elif str(error) != text:
            error.args = (text,)
        return error

    def call_back(self, request):
        """Calls a function that the test gave, for the program."""
        try:
            index, args, kwargs = request
            function, args, kwargs = self.mine[index], decode(args, self.find), decode(kwargs, self.find)
        except MALFORMED:
            os._exit(CHANNEL_CLOSED)
        if not is_function(function):  # a function of Python, such as eval, which the program can call itself
            os._exit(CHANNEL_CLOSED)
        try:
            send(self.lines, {"value": encode(function(*args, **kwargs), self.keep)})
        except AssertionError:  # the program could catch it
            os._exit(1)
        except Exception as error:
            own = getattr(error, "__remote__", None)
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = {"number": own.__state__.number} if own else {"error": names, "text": str(error)[:1000]}
            send(self.lines, answer)

    def read(self):
        """Returns the next message of the program. Without one the process ends; the test might expect an exception."""
        try:
            line = self.lines.readline(MAX_ANSWER)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, *MALFORMED):
            message = None
        return message if isinstance(message, dict) else os._exit(CHANNEL_CLOSED)

    def read_answer(self, answer, given):
        """Returns an answer's exception (or None) and value; copies changes into the given arguments."""
        try:
            if answer["printed"]:  # not by print, which a test may have replaced
                sys.stdout.write(answer["printed"])
            if "exit" in answer:
                return SystemExit(decode(answer["exit"], self.find)), None
            if "error" in answer:
                return self.error(answer["error"]), None
            args, named = (decode(each, self.find) for each in answer.get("changed", [{"tuple": []}, {"dict": []}]))
            update(given[0] if args else (), args)
            update(given[1].values(), [named.get(name) for name in given[1]])
            return None, decode(answer["value"], self.find)
        except MALFORMED:
            os._exit(CHANNEL_CLOSED)  # no exception: the test might expect one

    def ask(self, what, number, argument=None, keywords=None):
        """Returns the program's answer, or raises its exception; `keywords` are those of a call."""
        with self.lock:
            send(self.lines, [what, number, encode(argument, self.keep), encode(keywords or {}, self.keep)])
            while "call" in (answer := self.read()):
                self.call_back(answer["call"])
            error, value = self.read_answer(answer, (argument, keywords or {}))
        if error is None:
            return value
        failed = sys.exception()
        if isinstance(failed, AssertionError) or not isinstance(failed, Exception | None):
            os._exit(1)  # else an exception of the program in `finally` or `__exit__` would replace it
        raise error


def name_in_python(value):
    """Returns the module and name of a function or class of Python's library, else None."""
    module = getattr(getattr(value, "__objclass__", value), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if (
        not (isinstance(module, str) and isinstance(name, str))
        or module.partition(".")[0] not in sys.stdlib_module_names
    ):
        return None
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return None
    return [module, name] if found is value else None


def is_function(value):
    """Returns True for what the program may call: functions of the test, methods of its containers, mocks."""
    if isinstance(value, types.BuiltinMethodType):
        return type(value.__self__) in (list, dict, set)
    if isinstance(function := getattr(value, "__func__", value), types.FunctionType):
        return isinstance(function.__globals__, Names)
    return type(value).__module__ == "unittest.mock"


def update(old, new):
    """Copies the program's changes of arguments into the test's own containers and arrays."""
    for mine, theirs in zip(old, new, strict=False):
        if type(mine) is not type(theirs):
            continue
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, dict | set):
            mine.clear()
            mine.update(theirs)
        elif type(mine).__name__ == "ndarray" and mine.shape:
            mine[...] = theirs


class Solution(types.ModuleType):
    """Module of the program's names, for tests; also what `from solution import f` finds."""

    def __init__(self, channel):
        super().__init__("solution")
        self.__dict__["_channel"] = channel

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_channel"].ask("name", 0, name)
        except KeyError:
            raise AttributeError(f"the program defines no {name}") from None

    def __setattr__(self, name, value):
        unsupported("patch")  # the program would not see it


def same(value, expected):
    """Returns True if a result is the expected JSON value, with tuples and arrays as lists and floats within 1e-6."""
    if hasattr(value, "tolist") and not isinstance(value, Remote):
        value = value.tolist()
    if isinstance(expected, float):
        return isinstance(value, int | float) and close(value, expected)
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): entry for key, entry in each.items()} for each in (value, expected))
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    return value == expected and isinstance(value, Remote) == isinstance(expected, Remote)


def cases(function):
    """Yields the keyword arguments of each call of a test, from the marks of `pytest.mark.parametrize`."""
    groups, case = [], getattr(function, "__self__", None)
    for mark in (*getattr(function, "pytestmark", []), *getattr(case, "pytestmark", [])):
        if mark.name == "parametrize":
            names, values, *_ = (*mark.args, *mark.kwargs.values())
            is_one = isinstance(names, str) and "," not in names
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            values = [value.values if type(value).__name__ == "ParameterSet" else [value] if is_one else value
                      for value in values]  # fmt: skip
            groups.append([dict(zip(names, value, strict=True)) for value in values])
    assert all(groups)  # without a case every program would pass; the list of cases may come from the program
    code, first = function.__code__, int(case is not None)
    needed = set(code.co_varnames[first : code.co_argcount - len(function.__defaults__ or ())])
    for chosen in itertools.product(*groups):
        given = {name: value for each in chosen for name, value in each.items()}
        yield given if needed <= given.keys() else unsupported("fixture")


def check_replaced(body, names):
    """Ends the test where an object of the program has taken the place of a function with assertions.

    A decorator of the program may return such an object, which need not call the function.
    """
    for node in body:
        if isinstance(node, ast.ClassDef) and isinstance(names.get(node.name), type):
            check_replaced(node.body, vars(names[node.name]))
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            found, asserts = names[node.name], any(isinstance(each, ast.Assert) for each in ast.walk(node))
            if isinstance(found, Remote) and (asserts or node.name.startswith("test_")):
                unsupported("decorator")
            assert callable(found) or isinstance(found, classmethod | property) or not node.decorator_list


def run_class(kind):
    """Runs the test methods of a class, as unittest or pytest does."""
    if "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
        tests = sys.modules["unittest"].defaultTestLoader.loadTestsFromTestCase(kind)
        assert tests.run(sys.modules["unittest"].TestResult()).wasSuccessful()
    elif kind.__name__.startswith("Test"):
        set_up = getattr(kind, "setup_class", bool)
        getattr(set_up, "__func__", set_up)(kind)  # a class method or not
        for name in [name for name in dir(kind) if name.startswith("test_")]:
            for given in cases(getattr(kind(), name)):
                case = kind()
                test, set_up = getattr(case, name), getattr(case, "setup_method", None)
                if set_up is not None:
                    set_up(*[test][: set_up.__code__.co_argcount - 1])
                test(**given)


def run_assertions(code, solution):
    """Runs the text of a test, and its test functions and classes."""
    tree = ast.parse(code)
    names = Names(solution, tree)
    exec(compile(tree, "test", "exec"), names)
    check_replaced(tree.body, names)
    for name, value in list(names.items()):
        if name.startswith("test_") and callable(value):
            for given in cases(value):
                value(**given)
        elif isinstance(value, type) and value.__module__ == names["__name__"]:
            run_class(value)


def run_test(connection):
    """Runs the test on standard input; writes its token to VERDICT if every assertion held."""
    test = json.load(sys.stdin)
    os.dup2(1, VERDICT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the test prints
    solution = Solution(Channel(connection))
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
        try:
            run_assertions(test["code"], solution)
        except ModuleNotFoundError as error:  # those of the program have no name
            package = (error.name or "").partition(".")[0]
            if package and importlib.util.find_spec(package) is None:
                unsupported("import")
            raise
    os.write(VERDICT, test["token"].encode())


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    with socket.socket(fileno=3) as channel:
        run_test(channel)
