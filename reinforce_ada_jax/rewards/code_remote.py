"""Objects of the program, as the test sees them. A part of `code_test_side`."""

import functools
import os
import types

from reinforce_ada_jax.rewards.code_wire import SUPPORTED, WORD_OF

VERDICT = 9  # descriptor that the verdict is written to


def unsupported(word):
    """Ends the test, with a reason."""
    os.write(VERDICT, f"unsupported_{word}".encode())
    os._exit(1)


def ask(remote, what, *arguments):
    """Returns the program's answer about one of its objects."""
    return remote.__state__.ask(what, remote.__state__.number, *arguments)


class Remote:
    """Object of the program, as the test sees it. A subclass has the methods of SUPPORTED that the object's class has.

    It has no arithmetic and no order: else the program would decide what `abs(f(7) - 49) < 1e-6` means.
    """

    def __init__(self, ask, number):
        # No attribute of the program has a name like this.
        self.__dict__["__state__"] = types.SimpleNamespace(ask=ask, number=number)

    def __getattr__(self, name):
        if name.startswith("__"):  # numpy would read memory where `__array_interface__` says
            raise AttributeError(f"the test cannot read {name} of an object of the program")
        return ask(self, "attribute", name)

    def __setattr__(self, name, value):
        ask(self, "set_attribute", [name, value])

    def __delattr__(self, name):
        ask(self, "delete_attribute", name)

    def __eq__(self, other):
        return isinstance(other, Remote) and ask(self, "equal", other) is True

    def __hash__(self):
        return hash(self.__state__.number)

    def __instancecheck__(self, instance):
        return isinstance(instance, Remote) and ask(self, "instance", instance) is True

    def __subclasscheck__(self, kind):
        return isinstance(kind, Remote) and ask(self, "subclass", kind) is True

    def __mro_entries__(self, bases):
        unsupported("subclass")

    def __str__(self):
        return ask(self, "str")

    def __repr__(self):
        return ask(self, "repr")


def call(self, *args, **kwargs):
    return ask(self, "call", args, kwargs)


def iterate(self):
    iterator = ask(self, "iter")
    while item := ask(iterator, "next"):  # one at a time: the program may change what it has yielded
        yield item[0]


def next_item(self):
    # The end of the iterator would raise StopIteration here, which would end any loop of the test.
    item = ask(self, "next")
    return item[0] if item else unsupported("end_of_iterator")


def leave(self, kind, error, _):
    names = None if error is None else [[each.__name__ for each in kind.__mro__], str(error)]
    ask(self, "exit", names)  # returning its result could suppress a failed assertion


METHODS = {
    "__bool__": lambda self: ask(self, "truth") is True,
    "__call__": call,
    "__delitem__": lambda self, key: ask(self, "delete_item", key),
    "__enter__": lambda self: ask(self, "enter"),
    "__exit__": leave,
    "__getitem__": lambda self, key: ask(self, "item", key),
    "__iter__": iterate,
    "__len__": lambda self: ask(self, "length"),
    "__next__": next_item,
    "__setitem__": lambda self, key, value: ask(self, "set_item", [key, value]),
}


@functools.cache
def remote_class(names):
    """Returns the subclass of Remote with these special methods."""
    methods = {name: METHODS[name] for name in names if name in SUPPORTED}
    for name in names:
        # `in` works without `__contains__` if the object has `__iter__`: Python then compares the items.
        if name in WORD_OF and not (name == "__contains__" and "__iter__" in names):
            methods[name] = functools.partialmethod(lambda self, word, *_: unsupported(word), WORD_OF[name])
    return type("Remote", (Remote,), methods)


class ErrorClass(type):
    """Class of the program's exceptions, as the test sees it: the test may catch it."""

    def __call__(cls, *args, **kwargs):
        if "__remote__" not in vars(cls):
            unsupported("subclass")
        return vars(cls)["__remote__"](*args, **kwargs)

    def __getattr__(cls, name):
        return getattr(cls.__remote__, name)
