"""Runs a program; graders give it the usual names that its author left out, such as `List` and `heapq`.

A program that reads standard input has a process that runs only this. If a test calls functions of the program, this is
a part of `code_program_side`. Nothing of this package can be imported there.
"""

import builtins
import importlib
import sys
import types

MODULES = (
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "json", "math", "operator", "os",
    "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
# Names by the module that has them.
NAMES = {
    "bisect": "bisect_left bisect_right insort",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby pairwise permutations product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi sqrt",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "typing": "Any Callable Deque DefaultDict Dict FrozenSet Generator Iterable Iterator List Mapping NamedTuple "
              "Optional Sequence Set Tuple Type TypeVar Union",
}  # fmt: skip
MODULE_OF = {name: module for module, names in NAMES.items() for name in names.split()}


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names that compiled Python reads or writes, in its functions too."""
    found, unseen = set(), [code]
    while unseen:
        each = unseen.pop()
        found.update(each.co_names)
        unseen += [part for part in each.co_consts if isinstance(part, types.CodeType)]
    return found


def run(namespace: dict) -> None:
    """Runs program.py in a namespace. Names that it does not define itself are looked up among those above.

    They become built-ins, so they are not among the names that the program defines.
    """
    with open("program.py", "rb") as file:
        code = compile(file.read(), "program.py", "exec", dont_inherit=True)
    for name in names_in(code):
        if name in MODULES:
            setattr(builtins, name, importlib.import_module(name))
        elif name in MODULE_OF:
            setattr(builtins, name, getattr(importlib.import_module(MODULE_OF[name]), name))
    exec(code, namespace)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = "program.py"
    sys.argv, sys.modules["__main__"] = ["program.py"], main
    run(main.__dict__)
