"""One verifier process: `python -m reinforce_ada_jax.rewards.worker FD TIME_LIMIT_S GRADERS`.

`rewards.workers` starts and watches it; `rewards.loading` defines references. GRADERS is a JSON list, an entry for each
grader: {"references", "names", "weights"}; without names the only function grades alone. The process writes on the
socket (file descriptor FD), one JSON object a line (`protocol`): {"ready": true}, or an error when it cannot start;
then a verdict for each {"request", "grader", "response", "answer", "columns"} that it receives, until the other end
closes. `grader` is an index of the list.
"""

import json
import signal
import socket
import sys
import traceback
from typing import Any

from reinforce_ada_jax.isolation import child, messages, process_tree
from reinforce_ada_jax.rewards import grading, loading, protocol
from reinforce_ada_jax.rewards.grading import Grader

# Ordinary gradings stay below 0.2 GiB of memory; an unlimited factorial takes all there is.
ADDRESS_SPACE_BYTES = 4 * 2**30
# The parent kills at the time limit. If the parent is gone, the kernel kills this much later: the default action of
# SIGALRM needs no interpreter, so it also ends C code that never returns. (PR_SET_PDEATHSIG would be sooner, but it
# fires when the *thread* that started the process ends, and would kill the workers of a pool made in a thread.)
ORPHAN_GRACE_S = 5.0


def _load(entry: dict[str, Any]) -> Grader:
    functions = [loading.load(reference, entry.get("settings")) for reference in entry["references"]]
    grade = grading.weighted(entry["names"], functions, entry["weights"]) if entry["names"] else functions[0]
    # BaseException: Math-Verify's TimeoutException is one, and a checker that calls sys.exit has failed.
    return grading.guarded(grade, caught=BaseException)


def _serve(connection: socket.socket, entries: list[dict[str, Any]], time_limit_s: float) -> None:
    try:
        graders = [_load(entry) for entry in entries]
    except BaseException as error:
        trace = traceback.format_exc()[-protocol.MAX_TEXT :]
        connection.sendall(messages.to_line({"error": grading.one_line(error), "trace": trace}))
        return
    connection.sendall(messages.to_line({"ready": True}))
    with connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, time_limit_s + ORPHAN_GRACE_S)
            grade = graders[request["grader"]]
            verdict, failure = grade(request["response"], request["answer"], request["columns"])
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.sendall(messages.to_line(protocol.verdict_to_json(verdict, request["request"], failure)))


def main() -> None:
    descriptor, time_limit_s, graders = sys.argv[1:]
    process_tree.supervise(int(descriptor))
    child.confine(ADDRESS_SPACE_BYTES)
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            _serve(connection, json.loads(graders), float(time_limit_s))
        except ConnectionError:
            pass  # the parent died


if __name__ == "__main__":
    main()
