"""The collectives of a compiled program, read from its text."""

import re

_COLLECTIVE = re.compile(
    r" (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r".*?channel_id=(?P<channel>\d+)"
)
_LOOP = re.compile(r" while\(.*condition=%?[\w.-]+, body=%?(?P<body>[\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|(?:true|false)_computation)=(%?[\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """(lines of each computation, name of the entry)."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        begins = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if begins:
            name = begins[2]
            computations[name] = []
            entry = name if begins[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _branches(line: str) -> list[str]:
    return [name.strip(" %") for each in _BRANCHES.findall(line) for name in each.split(",")]


def _callees(line: str) -> list[str]:
    return [name.strip(" %") for name in _CALLED.findall(line)] + _branches(line)


def by_loop(hlo: str) -> dict[tuple[str, ...], list[str]]:
    """Returns the kinds of collectives in each loop and branch of a compiled program that has some.

    The key is its nesting: bodies of loops and branches of conditionals, from the outermost to its own.
    """
    computations, entry = _computations(hlo)
    found: dict[tuple[str, ...], dict[str, str]] = {}

    def walk(name: str, nesting: tuple[str, ...]) -> None:
        for line in computations.get(name, ()):
            collective, loop = _COLLECTIVE.search(line), _LOOP.search(line)
            if collective:
                found.setdefault(nesting, {})[collective["channel"]] = collective["kind"]
            bodies = [loop["body"]] if loop else _branches(line)
            for body in bodies:
                walk(body, (*nesting, body))
            for callee in [] if loop else _callees(line):
                if callee not in bodies:
                    walk(callee, nesting)

    walk(entry, ())
    return {nesting: list(kinds.values()) for nesting, kinds in found.items()}
