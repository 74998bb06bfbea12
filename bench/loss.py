"""`bench.loss`: memory and time of the policy loss and its gradients to hidden states and head.

    naive      logits of all tokens, log_softmax, jax.grad
    chunked    logits of some positions of every row at a time, recomputed backward by jax.checkpoint
    fused      learning/fused_logprobs.py, by the scan

Each runs in its own process, so that its memory is measured alone; repetitions alternate, so that other programs on the
machine disturb all of them equally. The memory of a process is read from Linux.
"""

import contextlib
import functools
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jaxtyping import Array

from bench import command_line
from bench.baselines.json_worker import reset_peak, resident_bytes
from bench.json_subprocess import JsonSubprocess
from bench.measuring import in_turns
from bench.options import log
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.loss import SampledTokens, policy_loss
from reinforce_ada_jax.learning.scan_logprobs import TILE, HeadConfig
from reinforce_ada_jax.learning.token_losses import LossConfig
from reinforce_ada_jax.policy.transformer import distribution

TEMPERATURE = 1.0
# Positions of a row that "chunked" takes at a time.
CHUNK = 128
# The program of a process that has one implementation.
WORKER = "from bench import loss; from bench.baselines import json_worker; json_worker.serve(loss.LossWorker)"
# Share of the free memory that an implementation may take.
SAFE_SHARE = 0.9


def _naive(hidden, embedding, targets):
    logits = jnp.einsum("BTD,VD->BTV", hidden, embedding, preferred_element_type=jnp.float32)
    logprobs = distribution(logits, TEMPERATURE)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy


def _chunked(hidden, embedding, targets):
    rows, length = targets.shape
    chunk = min(CHUNK, length)
    padding = -length % chunk

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    one_chunk = jax.checkpoint(lambda chunk: _naive(chunk[0], embedding, chunk[1]), prevent_cse=False)
    results = jax.lax.map(one_chunk, (cut(hidden), cut(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in results)


# (log-probability, entropy) of each target: functions of hidden states, head and targets.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "naive": _naive, "chunked": _chunked,
    "fused": functools.partial(token_logprobs, HeadConfig(TEMPERATURE, tied=True, tile=TILE)),
}  # fmt: skip


def _loss(statistics_of, hidden, embedding, targets):
    """Computes the whole loss with an entropy bonus, so that XLA can drop no gradient."""
    logprobs, entropy = statistics_of(hidden, embedding, targets)
    advantages = jnp.broadcast_to((jnp.arange(len(targets)) % 2 - 0.5)[:, None], targets.shape)
    config = LossConfig(
        clip_low=0.2, clip_high=0.28, dual_clip=10.0, aggregation="token-mean", entropy_coefficient=1e-4
    )
    old_logprobs = jax.lax.stop_gradient(logprobs) + 0.1
    return policy_loss(config, logprobs, entropy, SampledTokens(old_logprobs, advantages, targets >= 0))[0]


class LossWorker:
    """One implementation in a process of its own; see baselines/json_worker.py."""

    def __init__(self, name: str, rows: int, length: int, words: int, columns: int, dtype: str):
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (rows, length, columns), jnp.dtype(dtype))
        embedding = jax.random.normal(keys[1], (words, columns), jnp.dtype(dtype)) / columns**0.5
        targets = jax.random.randint(keys[2], (rows, length), 0, words)
        program = jax.jit(jax.value_and_grad(functools.partial(_loss, IMPLEMENTATIONS[name]), argnums=(0, 1)))
        self.inputs = jax.block_until_ready((hidden, embedding, targets))
        self.program = program.lower(*self.inputs).compile()

    def describe(self) -> dict[str, int]:
        """Returns the memory that the compiler plans beside inputs and results."""
        memory = self.program.memory_analysis()
        return {"temporary_bytes": 0 if memory is None else memory.temp_size_in_bytes}

    def run(self) -> dict[str, float]:
        """Evaluates value and gradients once; the memory does not include the returned gradients."""
        reset_peak()
        before, begin, cpu_begin = resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
        loss, gradients = jax.block_until_ready(self.program(*self.inputs))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        extra_bytes = resident_bytes("VmHWM") - before - sum(x.nbytes for x in gradients)
        return dict(seconds=seconds, cpu_seconds=cpu_seconds, extra_bytes=extra_bytes, loss=float(loss))


def _free_bytes() -> int:
    text = pathlib.Path("/proc/meminfo").read_text()
    return 1024 * int(re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[0])


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    timed = runs[1:]
    return {
        "extra_bytes": int(max(run["extra_bytes"] for run in runs)),
        "seconds": statistics.median(run["seconds"] for run in timed),
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in timed),
        "all_seconds": [run["seconds"] for run in timed],
        "loss": timed[-1]["loss"],
    }


def measure(
    *, rows: int, length: int, words: int, columns: int, dtype: str = "float32", repeat: int = 3
) -> dict[str, Any]:
    """Measures memory and seconds of value and gradients for rows x length tokens; docs/performance.md has the keys.

    `words` and `columns` are the sizes of vocabulary and hidden states. An implementation whose temporaries, by the
    compiler's count, need more memory than the machine has now isn't run: its results are None.

    Raises:
      RuntimeError: a process ended.
    """
    sizes = dict(rows=rows, length=length, words=words, columns=columns, dtype=dtype)
    processes: dict[str, JsonSubprocess] = {}
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        for name in IMPLEMENTATIONS:
            process = JsonSubprocess(name, [sys.executable, "-c", WORKER])
            processes[name] = stack.enter_context(contextlib.closing(process))
            planned = process.ask("load", name=name, **sizes)
            results[name] = planned | dict.fromkeys(("extra_bytes", "seconds", "cpu_seconds", "all_seconds", "loss"))
            log(f"{name}: the compiler plans {planned['temporary_bytes'] / 1e9:.2f} GB")
        runs = {}
        for name in IMPLEMENTATIONS:
            if results[name]["temporary_bytes"] < SAFE_SHARE * _free_bytes():
                runs[name] = processes[name].run
            else:
                log(f"{name}: not run, {_free_bytes() / 1e9:.2f} GB are free")
        for name, taken in in_turns(runs, repeat, str).items():
            results[name] |= _summary(taken)
    ratios = {}
    for key in ("seconds", "cpu_seconds", "temporary_bytes"):
        fused, naive = results["fused"][key], results["naive"][key]
        ratios[f"{key}_ratio"] = None if fused is None or naive is None else fused / naive
    return results | ratios | dict(sizes=sizes)


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the sizes of the flags."""
    return measure(
        rows=options.rows or 16, length=options.row_tokens, words=options.words, columns=options.columns,
        dtype=options.dtype, repeat=options.repeat or 3,
    )  # fmt: skip


if __name__ == "__main__":
    command_line.start("loss", run)
