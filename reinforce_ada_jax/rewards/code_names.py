"""Names in the assertions of a test: its own, Python's, or the program's. A part of `code_test_side`."""

import ast
import builtins
import importlib
import sys

# Modules and functions that a test may use without an import: the names then mean Python's.
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
# Names that tests use around a call of another one: `abs(sum(2, 3) - 6) < 1e-6`.
AROUND = {"abs", "all", "any", "isinstance", "issubclass", "len", "print", "repr", "round", "sorted", *FUNCTIONS}
AROUND |= {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}


class Names(dict):
    """Names of a test: its own, then Python's, then those of the program.

    If the test uses only names of Python, and the program defines exactly one of them, the test gets the program's:
    `assert sum(10, 15) == 6` of MBPP. If the program defines more, the test gets Python's. A name of AROUND means
    Python's, unless it is the only name: otherwise a program could define nothing but an `abs` that is always 0.
    """

    def __init__(self, solution, tree):
        super().__init__(__name__="test", __builtins__=builtins)
        self.solution = solution
        self.modules, others = names_used(tree)
        if others <= PYTHON:
            meant = others - AROUND if len(others) > 1 else others
            found = {name: getattr(solution, name, None) for name in meant if not name.startswith("__")}
            defined = {name: value for name, value in found.items() if value is not None}
            self.update(defined if len(defined) == 1 else {})
        # In the body of a class Python does not ask `__missing__`.
        bodies = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        in_classes = {each.id for node in bodies for each in ast.walk(node) if isinstance(each, ast.Name)}
        for name in sorted(in_classes & others - PYTHON):
            if (value := getattr(solution, name, None)) is not None:
                self[name] = value

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
    """Returns two sets: the modules of Python that a test uses, and other names that it uses and does not define.

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
