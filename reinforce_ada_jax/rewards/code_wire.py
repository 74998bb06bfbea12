"""Values as JSON, between the two processes of a test: a part of both (`code_test_side`, `code_program_side`).

Nothing of this package can be imported there.
"""

import collections
import importlib
import json
import math
import os
import sys
from typing import Any

CHANNEL_CLOSED = 3  # exit code, as in isolation/sandbox.py
PLAIN = (bool, int, float, str)
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Values of Python's own classes, which travel as the arguments that make them again.
MADE = {
    "builtins.complex": lambda value: [value.real, value.imag],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.deque": lambda value: [list(value), value.maxlen],
    **dict.fromkeys(
        ("builtins.range", "builtins.slice", "datetime.date", "datetime.datetime", "datetime.time",
         "datetime.timedelta", "datetime.timezone", "decimal.Decimal", "fractions.Fraction"),
        lambda value: value.__reduce__()[1],
    ),
}  # fmt: skip
# Special methods of an object of the program that the test may call.
SUPPORTED = (
    "__bool__", "__call__", "__delitem__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__",
    "__setitem__",
)  # fmt: skip
# Refused special methods, which would let the program decide a comparison. The keys are words in the verdict's reason.
REFUSED = {
    "order": "lt le gt ge",
    "arithmetic": "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor radd rsub rmul rtruediv "
                  "rfloordiv rmod rdivmod rpow rmatmul rlshift rrshift rand ror rxor iadd isub imul itruediv ifloordiv "
                  "imod ipow imatmul iand ior ixor neg pos abs invert round floor ceil trunc",
    "number": "int float complex index",
    "member": "contains",
    "format": "format",
    "async": "await aiter anext aenter aexit",
}  # fmt: skip
WORD_OF = {f"__{name}__": word for word, names in REFUSED.items() for name in names.split()}
ABILITIES = {*SUPPORTED, *WORD_OF}
ARRAYS = "biufcSUmM"  # kinds of the elements of numpy's arrays that are data
# Exceptions that end a loop, or that need more than a text: the other process raises Exception or RuntimeError instead.
NOT_RAISED = (
    StopIteration, StopAsyncIteration, BaseExceptionGroup, UnicodeDecodeError, UnicodeEncodeError,
    UnicodeTranslateError,
)  # fmt: skip
# Modules whose exceptions keep their class in the other process. None may end or skip a test.
ERROR_MODULES = ("builtins", "dataclasses", "decimal", "json.decoder", "queue", "statistics", "struct")
EXACT = 2**53  # a float holds every whole number below


def close(found, expected):
    """Returns True if numbers are within 1e-6, absolute or relative, as in usual checkers; whole ones must be equal."""
    if found == expected or not math.isfinite(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    is_whole = float(found).is_integer() and float(expected).is_integer() and abs(expected) < EXACT
    return not is_whole and abs(found - expected) <= 1e-6 * max(1.0, abs(expected))


def numpy_of(value):
    """Returns numpy if a value is one of its arrays or scalars that travel as data, else None."""
    numpy = sys.modules.get("numpy")
    is_data = numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in ARRAYS
    return numpy if is_data else None


def has_own_methods(kind):
    """Returns True for a class of the program with public methods: an object that is sent as data would lose them."""
    return kind.__module__ == "solution" and any(
        callable(each) and name[:1] != "_" for name, each in vars(kind).items()
    )


def encode(value, keep):
    """Returns a value as JSON; `keep` describes an object that is no data."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    container = next((name for name, kind in CONTAINERS.items() if isinstance(value, kind)), "")
    if numpy := numpy_of(value):
        array = numpy.ascontiguousarray(value)
        found = {"numpy": [array.dtype.str, list(value.shape), array.tobytes().hex()]}
    elif isinstance(value, str):
        found = str.__str__(value)  # `str` of its class may give another text, as for a member of an enumeration
    elif value is None or isinstance(value, PLAIN):
        found = next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)
    elif isinstance(value, bytes | bytearray):
        found = {"bytes": bytes(value).hex()}
    elif name in MADE:
        found = {name: [encode(each, keep) for each in MADE[name](value)]}
    elif container != "tuple" and has_own_methods(type(value)):
        found = {"object": keep(value)}
    elif isinstance(value, dict):
        found = {"dict": [[encode(key, keep), encode(entry, keep)] for key, entry in value.items()]}
    elif isinstance(value, tuple) and (fields := getattr(value, "_fields", ())):
        found = {"namedtuple": [type(value).__name__, list(fields), [encode(item, keep) for item in value]]}
    elif container:
        found = {container: [encode(item, keep) for item in value]}
    else:
        found = {"object": keep(value)}
    return found


def decode(value, find) -> Any:
    """Returns the value that was given to `encode`; `find` returns the object of a description."""
    if value is None or isinstance(value, PLAIN):
        return value
    ((kind, content),) = value.items()
    if kind in CONTAINERS:
        found = CONTAINERS[kind](decode(item, find) for item in content)
    elif kind == "dict":
        found = {decode(key, find): decode(entry, find) for key, entry in content}
    elif kind in MADE:
        module, _, name = kind.partition(".")
        found = getattr(importlib.import_module(module), name)(*(decode(each, find) for each in content))
    elif kind == "numpy":
        dtype, shape, data = content
        array = importlib.import_module("numpy").frombuffer(bytes.fromhex(data), str(dtype))  # no dtype with pointers
        found = array.reshape(shape).copy()[()]  # a scalar if it has no dimensions
    elif kind == "namedtuple":
        name, fields, items = content
        items = [decode(item, find) for item in items]
        if any(hasattr(tuple, field) and callable(item) for field, item in zip(fields, items, strict=True)):
            raise ValueError(f"a field would replace a method of tuples: {fields}")
        found = collections.namedtuple(name, fields)(*items)
    elif kind == "bytes":
        found = bytes.fromhex(content)
    elif kind == "object":
        found = find(content)
    else:
        raise ValueError(f"no kind of data: {kind}")
    return found


def python_error(module: str, name: str) -> type[Exception] | None:
    """Returns the exception of Python with this name if the other process may raise it, else None."""
    kind = getattr(importlib.import_module(module), name, None) if module in ERROR_MODULES else None
    is_error = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_RAISED)
    return kind if is_error else None


def send(lines, message):
    """Writes a message to the other process; if that has ended, this one ends, too."""
    try:
        lines.write(json.dumps(message).encode() + b"\n")
        lines.flush()
    except OSError:
        os._exit(CHANNEL_CLOSED)


def error_from(names, text):
    """Returns the first of the named built-in exceptions that may be raised; else a RuntimeError."""
    kinds = (python_error("builtins", name) for name in names)
    return next(filter(None, kinds), RuntimeError)(text)
