"""One verifier process: `python -m reinforce_ada_jax.rewards.worker FD TIME_LIMIT_S GRADERS`.

`rewards.workers` starts and watches it; `rewards.loading` defines references. GRADERS is a JSON list, an entry for each
grader: {"references", "names", "weights"}; without names there is one function, whose verdict is not weighted. The
process writes on the socket (file descriptor FD), one JSON object a line (`protocol`): {"ready": true}, or an error
when it cannot start; then a verdict for each {"request", "grader", "response", "answer", "columns"} that it receives,
until the other end closes. `grader` is an index of the list.
"""

import json
import sys
from typing import Any

from reinforce_ada_jax.isolation import child
from reinforce_ada_jax.rewards import grading, loading, protocol
from reinforce_ada_jax.rewards.grading import Grader


def _grader(entry: dict[str, Any]) -> Grader:
    functions = [loading.load(reference, entry.get("settings")) for reference in entry["references"]]
    grade = grading.weighted(entry["names"], functions, entry["weights"]) if entry["names"] else functions[0]
    # BaseException: Math-Verify's TimeoutException is one, and a checker that calls sys.exit has failed.
    return grading.guarded(grade, caught=BaseException)


def main() -> None:
    descriptor, time_limit_s, entries = sys.argv[1:]

    def load() -> tuple[dict[str, Any], child.Answer]:
        graders = [_grader(entry) for entry in json.loads(entries)]

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            grade = graders[request["grader"]]
            return protocol.verdict_to_json(*grade(request["response"], request["answer"], request["columns"]))

        return {}, answer

    child.serve(int(descriptor), load, lambda request: float(time_limit_s))


if __name__ == "__main__":
    main()
