"""The process that runs the program in a test of functions: it answers the calls of `code_test_side` over a socket.

The sandbox has no file of this package: only the modules that `code` puts before this text can be imported.
"""

import contextlib
import functools
import importlib
import json
import os
import socket
import sys
import types

from reinforce_ada_jax.rewards.code_script import run
from reinforce_ada_jax.rewards.code_wire import ABILITIES, CHANNEL_CLOSED, PLAIN, decode, encode, error_from, send

MAX_PRINTED = 2**20  # bytes that the test gets of the text printed during one call


@functools.cache
def event_loop():
    import asyncio  # noqa: PLC0415  (0.05 s, which few programs need)

    return asyncio.new_event_loop()


def next_item(target, _):
    """Returns a list of the next item, or an empty one at the end."""
    try:
        return [next(target)]
    except StopIteration:
        return []


def leave(target, error):
    error = None if error is None else error_from(*error)
    type(target).__exit__(target, error and type(error), error, None)


# Operations of a test on an object of the program, in addition to calls. Each function takes the object and an
# argument.
OPERATIONS = {
    "attribute": getattr,
    "await": lambda target, _: event_loop().run_until_complete(target),
    "delete_attribute": delattr,
    "delete_item": lambda target, key: target.__delitem__(key),
    "enter": lambda target, _: type(target).__enter__(target),
    "equal": lambda target, other: target == other,
    "exit": leave,
    "instance": lambda target, other: isinstance(other, target),
    "item": lambda target, key: target[key],
    "iter": lambda target, _: iter(target),
    "length": lambda target, _: len(target),
    "next": next_item,
    "repr": lambda target, _: repr(target),
    "set_attribute": lambda target, pair: setattr(target, *pair),
    "set_item": lambda target, pair: target.__setitem__(*pair),
    "str": lambda target, _: str(target),
    "subclass": lambda target, other: any(each is target for each in type.mro(other)),
    "truth": lambda target, _: bool(target),
}


@functools.cache
def abilities(kind):
    """Returns the special methods of a class that decide what the test may do with its objects."""
    names = {name for each in kind.__mro__[:-1] for name, method in vars(each).items() if callable(method)}
    return sorted(names & ABILITIES)


def python_value(module, names):
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


class Program:
    """The program's objects by number, and the requests of the test."""

    def __init__(self, connection, namespace, printed):
        self.lines, self.namespace, self.printed = connection.makefile("rwb"), namespace, printed
        self.objects: list = [namespace]
        self.numbers = {}
        # Objects that the test gave, each with its description: by their ids here, and by their indices in the test's
        # list.
        self.given, self.given_by_index = {}, {}

    def number(self, value):
        """Returns the number of an object, which is the same in every call."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def error_class(self, kind):
        """Describes a class of exceptions: Python's by its name, the program's with its bases."""
        module = sys.modules.get(kind.__module__)
        is_own = kind.__module__ == "solution" or getattr(module, kind.__name__, None) is not kind
        bases = [self.error_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        found = {"name": kind.__name__, "module": kind.__module__, "bases": bases}
        return found | ({"number": self.number(kind)} if is_own else {})

    def error(self, error):
        """Describes an exception."""
        args = [arg if isinstance(arg, PLAIN) else str(arg) for arg in error.args]
        return {"class": self.error_class(type(error)), "number": self.number(error), "args": args,
                "text": str(error)[:1000]}  # fmt: skip

    def keep(self, value):
        """Describes an object for the test."""
        if id(value) in self.given:
            return self.given[id(value)][1]
        found = {"number": self.number(value)}
        if isinstance(value, Exception):
            return found | {"error": self.error(value)}
        if isinstance(value, type) and issubclass(value, Exception):
            return found | {"error_class": self.error_class(value)}
        generic = ["__getitem__"] if hasattr(value, "__class_getitem__") else []
        return found | {"can": abilities(type(value)) + generic, "await": isinstance(value, types.CoroutineType)}

    def find(self, content):
        """Returns the object of a description: the program's own, one of Python, or a function of the test."""
        if "number" in content:
            return self.objects[content["number"]]
        if content["mine"] not in self.given_by_index:
            value = python_value(*content["python"]) if "python" in content else self.function(content)
            self.given_by_index[content["mine"]] = self.given[id(value)] = value, content
        return self.given_by_index[content["mine"]][0]

    def function(self, content):
        """Returns a function that calls one of the test."""

        def call_back(*args, **kwargs):
            return self.call_back(content["mine"], args, kwargs)

        call_back.__name__ = call_back.__qualname__ = content["name"]
        return call_back

    def call_back(self, index, args, kwargs):
        """Calls a function of the test, which may itself call functions of the program."""
        send(self.lines, {"call": [index, encode(args, self.keep), encode(kwargs, self.keep)]})
        answer = self.serve()
        if answer is None:
            os._exit(CHANNEL_CLOSED)
        if "number" in answer:
            raise self.objects[answer["number"]]
        if "error" in answer:
            raise error_from(answer["error"], answer["text"])
        return decode(answer["value"], self.find)

    def answer(self, request):
        what, number, argument, keywords = request
        try:
            arguments, named = decode(argument, self.find), decode(keywords, self.find)
            target = self.objects[number]
            if what == "name":
                value = self.namespace[arguments]
            elif what == "call":
                value = target(*arguments, **named)
            else:
                value = OPERATIONS[what](target, arguments)
            answer = {"value": encode(value, self.keep)}
            # Changed arguments go back to the test: the function may have sorted a list in place.
            changed = [encode(arguments, self.keep), encode(named, self.keep)]
            if what == "call" and changed != [argument, keywords]:
                answer["changed"] = changed
        except SystemExit as error:
            answer = {"exit": error.code if isinstance(error.code, PLAIN) else None}
        except Exception as error:
            answer = {"error": self.error(error)}
        return answer | {"printed": self.printed()}

    def read(self):
        try:
            return self.lines.readline()
        except OSError:
            return b""

    def serve(self):
        """Answers requests until the test answers a call back; returns this answer, or None if the socket is closed."""
        while line := self.read():
            message = json.loads(line)
            if isinstance(message, dict):
                return message
            send(self.lines, self.answer(message))
        return None


def redirect_output():
    """Makes standard output a file; returns a function that returns what was printed since its last call."""
    file = os.open("printed", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.unlink("printed")
    os.dup2(file, 1)
    start = 0

    def printed():
        nonlocal start
        with contextlib.suppress(Exception):  # of a program that has replaced or closed its output
            sys.stdout.flush()
        start, first = os.fstat(file).st_size, start
        return os.pread(file, min(max(start - first, 0), MAX_PRINTED), first).decode(errors="replace")

    return printed


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    with socket.socket(fileno=3) as channel:
        sys.modules["solution"] = types.ModuleType("solution")
        program = Program(channel, sys.modules["solution"].__dict__, redirect_output())
        run(program.namespace)
        program.printed()
        program.serve()
