"""One server over several processes: process 0 listens, all launch the same windows.

Process 0 has the requests and the schedulers of all replicas. Its sampler uses a `SharedEngine` as one engine, which
sends each process the inputs of that process's replicas. The other processes run `follow`: they call their engine with
these inputs, in the order in which process 0 calls its own, and send back the outputs. So all processes launch the same
programs in the same order, and only process 0 knows the requests. Messages go from host to host (`processes.send`), so
an idle server runs no program on the devices.
"""

import contextlib
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import DecodeState, PromptTerms, WindowInputs, WindowOutputs, default_terms

# What process 0 asks the others to do: read the weights of a model; begin with an empty state; set the terms of
# prompts; launch a window; send the outputs of the oldest window that was not read; end.
_LOAD, _RESET, _TERMS, _WINDOW, _READ, _END = "load", "reset", "terms", "window", "read", "end"
IDLE_S = 1.0


def to_bytes(action: str, model: int, tree: Any = ()) -> bytes:
    """Returns a message: an action, the number of the model, and the arrays of a tree."""
    file = io.BytesIO()
    header = np.frombuffer(json.dumps([action, model]).encode(), np.uint8)
    np.savez(file, header, *map(np.asarray, jax.tree.leaves(tree)))
    return file.getvalue()


def from_bytes(data: bytes) -> tuple[str, int, list[np.ndarray]]:
    """Returns (action, model, arrays) of a message."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header, *leaves = (arrays[f"arr_{number}"] for number in range(len(arrays.files)))
    action, model = json.loads(header.tobytes())
    return action, model, leaves


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Ends this process after an error, so that other processes and clients do not wait for it without end."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(cli.STOPPED)


class DeviceThread(threading.Thread):
    """Thread that owns the devices of this process, until it is stopped."""

    def __init__(self, wake: threading.Event):
        """`wake` is set when there is something to do."""
        super().__init__(name="devices", daemon=True)
        self.wake, self._stopping = wake, threading.Event()

    def repeat(self, turn: Callable[[], bool]) -> None:
        """Calls `turn` repeatedly; if it returns False, waits for `wake`, at most IDLE_S. An error ends the process."""
        with ending_all():
            while not self._stopping.is_set():
                self.wake.clear()
                if not turn():
                    self.wake.wait(IDLE_S)

    def stop(self, within_s: float) -> bool:
        """Ends the thread after its present turn; returns False if that turn did not end in time."""
        self._stopping.set()
        self.wake.set()
        self.join(within_s)
        return not self.is_alive()


class SharedEngine:
    """Engine of all processes, used in process 0. Its replicas are in the order of the processes."""

    def __init__(self, engine: Engine, model: int):
        self.options = engine.options
        self.replicas = engine.replicas * processes.count()
        self._engine, self._model = engine, model

    def _ask(self, action: str, of_replicas: Sequence[Any] = ()) -> Sequence[Any]:
        """Sends each other process its part of `of_replicas`, and returns the part of this process."""
        own = len(of_replicas) // processes.count()
        for process in range(1, processes.count()):
            part = of_replicas[process * own : (process + 1) * own]
            processes.send(process, to_bytes(action, self._model, part))
        return of_replicas[:own]

    def load(self, load: Callable[[], Params]) -> Params:
        self._ask(_LOAD)
        return self._engine.decode_weights(load())

    def init_decode_state(self) -> DecodeState:
        self._ask(_RESET)
        return self._engine.init_decode_state()

    def set_terms(self, state: DecodeState, terms: Sequence[PromptTerms]) -> DecodeState:
        with ending_all():
            return self._engine.set_terms(state, self._ask(_TERMS, terms))

    def decode_window(
        self, params: Params, state: DecodeState, inputs: Sequence[WindowInputs]
    ) -> tuple[DecodeState, WindowOutputs]:
        with ending_all():
            return self._engine.decode_window(params, state, self._ask(_WINDOW, inputs))

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        """Waits for the oldest window that was not read; returns the outputs of all replicas."""
        with ending_all():
            self._ask(_READ)
            own = self._engine.fetch_outputs(outputs)
            structure, found = jax.tree.structure(own), list(own)
            for process in range(1, processes.count()):
                found += jax.tree.unflatten(structure, from_bytes(processes.receive(process))[2])
            return found


def end() -> None:
    """Ends the other processes' `follow`."""
    for process in range(1, processes.count()):
        processes.send(process, to_bytes(_END, 0))


def follow(engines: Sequence[Engine], loads: Sequence[Callable[[], Params]]) -> None:
    """Does what process 0 asks for until it calls `end`; `engines` and `loads` are in its order of the models."""
    weights: dict[int, Params] = {}
    states: dict[int, Any] = {}
    windows: dict[int, list[WindowOutputs]] = {}
    empty = [jax.tree.structure([_no_inputs(engine)] * engine.replicas) for engine in engines]
    terms = [jax.tree.structure([default_terms(engine.options)] * engine.replicas) for engine in engines]
    while True:
        action, model, leaves = from_bytes(processes.receive(0))
        engine = engines[model]
        if action == _END:
            return
        if action == _LOAD:
            weights[model] = engine.decode_weights(loads[model]())
        elif action == _RESET:
            states.pop(model, None)  # frees the old state first: devices seldom have room for two
            states[model], windows[model] = engine.init_decode_state(), []
        elif action == _TERMS:
            states[model] = engine.set_terms(states[model], jax.tree.unflatten(terms[model], leaves))
        elif action == _WINDOW:
            inputs = jax.tree.unflatten(empty[model], leaves)
            states[model], outputs = engine.decode_window(weights[model], states[model], inputs)
            windows[model].append(outputs)
        elif action == _READ:
            processes.send(0, to_bytes(_READ, model, engine.fetch_outputs(windows[model].pop(0))))


def _no_inputs(engine: Engine) -> WindowInputs:
    def unused(request: Any) -> Any:
        raise AssertionError(request)

    return Scheduler(engine.options).next_window(unused, unused)
