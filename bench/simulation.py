"""An engine in virtual time: the window model with prescribed lengths, and seconds from prescribed costs.

`SimulatedEngine` takes the place of an `Engine` in `Rollouts`. The host's side, the collection loop and its strategy
are the real ones; steps, windows and dispatches are those of the real engine. The seconds are as exact as the costs.
"""

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bench.window_model import WindowModel
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.state import EngineOptions, Occupancy, WindowInputs, WindowOutputs


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds that the programs of an engine take on some machine.

    Attributes:
      decode_step: one decode step, whatever the slots hold: above all, reading the weights.
      cached_token: in addition, for each token whose keys and values are read in a step.
      prefill: one chunk of `prefill_tokens` prompt tokens, padding included.
      window: starting a decode window.
      host: the host's work between reading a window's outputs and submitting the next window; the device waits for it
        only where it has run out of windows.
    """

    decode_step: float = 0.0
    cached_token: float = 0.0
    prefill: float = 0.0
    window: float = 0.0
    host: float = 0.0


# Real seconds after which a simulated host that launches no window counts as lost.
HOST_S = 60.0


class HostArray(np.ndarray):
    """A numpy array with the methods of a device array that the host calls."""

    def is_ready(self) -> bool:
        """Returns True: it was computed when it was made."""
        return True

    def copy_to_host_async(self) -> None:
        """Does nothing: it is on the host."""


class Hosts:
    """Hosts that decode in step, a thread each: their votes, and the seconds of their windows."""

    def __init__(self, count: int):
        """Makes hosts 0 to `count` - 1, none of which has launched a window."""
        self._windows: list[list[tuple[int, int, float]]] = [[] for _ in range(count)]
        self._changed = threading.Condition()

    def launch(self, host: int, vote: int, steps: int, seconds: float = 0.0) -> int:
        """Records a window of a host, with the steps and seconds that it takes there; returns its number."""
        with self._changed:
            self._windows[host].append((vote, steps, seconds))
            self._changed.notify_all()
            return len(self._windows[host]) - 1

    def agreed(self, number: int) -> np.ndarray:
        """Waits until all hosts have launched a window; returns its largest vote, and the most steps of the one before.

        Raises:
          TimeoutError: a host never launches it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(len(own) > number for own in self._windows), timeout=HOST_S):
                raise TimeoutError(f"window {number} was not launched by all hosts: {list(map(len, self._windows))}")
            steps = max(own[number - 1][1] for own in self._windows) if number else 0
            return np.array([max(own[number][0] for own in self._windows), steps], np.int32)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of each host's windows, float[hosts, windows]; a window begins when all hosts have reached it."""
        return np.array([[seconds for _, _, seconds in own] for own in self._windows])


class SimulatedEngine:
    """An engine of one replica without device and weights. Its clock runs on from session to session."""

    replicas = 1

    def __init__(
        self,
        options: EngineOptions,
        cost: Cost,
        lengths: Mapping[tuple[str, int], int],
        hosts: Hosts | None = None,
        host: int = 0,
    ):
        """Simulates the engine of `options`; `lengths[prompt id, draw]` are the tokens of untruncated responses.

        With `hosts` it is the engine of number `host` of several hosts. Its clock then leaves out the time in which it
        waits for the other hosts (`Hosts.seconds`).
        """
        self.options, self.cost, self._hosts, self._host = options, cost, hosts, host
        self.spans_processes = hosts is not None
        self._lengths = {_without_stream(token_lib.address(0, *draw)): length for draw, length in lengths.items()}
        self._device_s = self._host_s = 0.0  # times at which device and host have finished their work
        self._window_ends = collections.deque([0.0, 0.0], maxlen=2)

    @property
    def seconds(self) -> float:
        """The time at which the last program ends."""
        return self._device_s

    def decode_weights(self, params: Params | None) -> None:
        """Returns None: there are no weights."""

    def init_decode_state(self) -> WindowModel:
        """Returns an empty state."""
        return WindowModel(self.options, self._respond)

    def decode_window(
        self, params: None, state: WindowModel, inputs: Sequence[WindowInputs], vote: int = 0
    ) -> tuple[WindowModel, WindowOutputs]:
        """Runs one window."""
        outputs, cached, chunks = state.decode_window(*inputs)
        cost, steps = self.cost, int(outputs.counts.decode_steps)
        seconds = cost.window + (steps * cost.decode_step + cached * cost.cached_token + chunks * cost.prefill)
        # At most two windows are in flight: before it submits another one, the host reads the last but one.
        self._host_s = max(self._host_s, self._window_ends[0]) + cost.host
        self._device_s = max(self._device_s, self._host_s) + seconds
        self._window_ends.append(self._device_s)
        if self._hosts is not None:
            outputs = outputs.replace(agreed=self._hosts.launch(self._host, vote, steps, seconds))
        return state, jax.tree.map(lambda x: np.asarray(x).view(HostArray), outputs)

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        """Returns the outputs of the only replica, after the other hosts have launched the window, too."""
        if self._hosts is None or outputs.agreed is None:
            return [outputs]
        return [outputs.replace(agreed=self._hosts.agreed(int(outputs.agreed)))]

    def fetch(self, state: WindowModel) -> list[Occupancy]:
        """Returns a copy of the one replica's state."""
        return [jax.tree.map(np.array, state.state)]

    def _respond(self, address: np.ndarray, max_tokens: int) -> tuple[np.ndarray, bool]:
        length = self._lengths[_without_stream(address)]
        return np.zeros(min(length, max_tokens), np.int32), length >= max_tokens


def _without_stream(address: np.ndarray) -> bytes:
    """Returns the part of an address that names prompt and draw."""
    return np.asarray(address[1:]).tobytes()
