"""What `benchmark loss` measures: memory and time of the policy loss and its gradients to hidden states and head.

    naive      logits of all tokens, log_softmax, jax.grad
    chunked    logits of some positions of every row at a time, made anew backward by jax.checkpoint
    fused      learning/fused_logprobs.py, by the scan

Each in a process of its own, so that memory is its own; repetitions are taken in turns, so that what else the machine
does falls on all of them. The memory of a process is read from Linux.
"""

import argparse
import functools
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.loss import LossConfig, policy_loss
from reinforce_ada_jax.learning.scan_logprobs import TILE, HeadConfig
from reinforce_ada_jax.policy.logprobs import distribution

TEMPERATURE = 1.0
# Of memory that is there, a baseline may take so much.
SAFE_SHARE = 0.9
MEASURED = ("extra_bytes", "seconds", "cpu_seconds", "all_seconds", "loss")


def _naive(hidden, embedding, targets):
    logits = jnp.einsum("BTD,VD->BTV", hidden, embedding, preferred_element_type=jnp.float32)
    logprobs = distribution(logits, TEMPERATURE)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy


def _chunked(hidden, embedding, targets, *, chunk):
    rows, length = targets.shape
    chunk = min(chunk, length)
    padding = -length % chunk

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    one_chunk = jax.checkpoint(lambda cut: _naive(cut[0], embedding, cut[1]), prevent_cse=False)
    results = jax.lax.map(one_chunk, (cut(hidden), cut(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in results)


def _baselines(chunk: int, tile: tuple[int, int] | None) -> dict[str, Callable[..., tuple[Array, Array]]]:
    return {
        "naive": _naive,
        "chunked": functools.partial(_chunked, chunk=chunk),
        "fused": functools.partial(token_logprobs, HeadConfig(TEMPERATURE, tied=True, tile=tile or TILE)),
    }


def _loss(baseline, hidden, embedding, targets):
    """The whole loss, entropy bonus included, so that no slope is known to be 0."""
    logprobs, entropy = baseline(hidden, embedding, targets)
    advantages = jnp.broadcast_to((jnp.arange(len(targets)) % 2 - 0.5)[:, None], targets.shape)
    return policy_loss(
        LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0, aggregation="token-mean", entropy_coefficient=1e-4),
        logprobs, entropy, old_logprobs=jax.lax.stop_gradient(logprobs) + 0.1, advantages=advantages, mask=targets >= 0,
    )[0]  # fmt: skip


# ---- one process -----------------------------------------------------------------------------------------------------


def _status(name: str) -> int:
    """Bytes that Linux counts for this process: VmRSS now, VmHWM at most."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE).group(1))


def _available() -> int:
    text = pathlib.Path("/proc/meminfo").read_text()
    return 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE).group(1))


def _worker(options: argparse.Namespace) -> None:
    """Compiles, says so, and then takes one step for each line that it reads. Speaks in lines of `key number`."""
    dtype = jnp.dtype(options.dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (options.rows, options.length, options.columns), dtype)
    embedding = jax.random.normal(keys[1], (options.words, options.columns), dtype) / options.columns**0.5
    targets = jax.random.randint(keys[2], (options.rows, options.length), 0, options.words)
    baseline = _baselines(options.chunk, options.tile and tuple(options.tile))[options.worker]
    program = jax.jit(jax.value_and_grad(functools.partial(_loss, baseline), argnums=(0, 1)))
    program = program.lower(hidden, embedding, targets).compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    jax.block_until_ready((hidden, embedding, targets))
    print("temporary_bytes", temporary, flush=True)
    for _ in sys.stdin:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the most since now
        before, start, cpu_start = _status("VmRSS"), time.perf_counter(), time.process_time()
        loss, gradients = jax.block_until_ready(program(hidden, embedding, targets))
        taken = dict(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu_start)
        extra = _status("VmHWM") - before - sum(x.nbytes for x in gradients)
        taken |= dict(extra_bytes=extra, loss=float(loss))
        print(*(f"{key} {number!r}" for key, number in taken.items()), flush=True)
        del gradients


# ---- all of them -----------------------------------------------------------------------------------------------------


def _start(name: str, arguments: list[str]) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "reinforce_ada_jax.benchmarks.loss", f"--worker={name}", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    return process, int(_answer(name, process)["temporary_bytes"])


def _answer(name: str, process: subprocess.Popen) -> dict[str, float]:
    line = process.stdout.readline().split()
    if not line:
        raise RuntimeError(f"{name} ended with status {process.wait()}: what it wrote stands above.")
    return {key: float(number) for key, number in zip(line[::2], line[1::2], strict=True)}


def measure(
    *,
    rows: int = 16,
    length: int = 1024,
    words: int = 151_936,
    columns: int = 256,
    dtype: str = "float32",
    repeat: int = 3,
    warm_up: int = 1,
    chunk: int = 128,
    tile: tuple[int, int] | None = None,
    baselines: tuple[str, ...] = ("naive", "chunked", "fused"),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Memory and seconds of value and gradients, for rows x length tokens.

    A baseline whose temporaries, by the compiler's count, would take more memory than the machine has now isn't run.

    Args:
      rows: of the batch.
      length: tokens of each.
      words: of the vocabulary.
      columns: of a hidden state.
      dtype: of hidden states and head.
      repeat: timed repetitions.
      warm_up: repetitions before them, not timed.
      chunk: positions that "chunked" takes at a time.
      tile: of "fused"; None: its own default.
      baselines: which of them.
      say: told what is going on.

    Returns:
      By baseline "temporary_bytes", which the compiler plans beside inputs and results, "extra_bytes", by how much
      the process grew at most, returned gradients aside, medians of "seconds" and of "cpu_seconds" of all its threads,
      which other processes disturb less, "all_seconds" and "loss"; None where it wasn't run. Then "seconds_ratio",
      "cpu_seconds_ratio" and "temporary_bytes_ratio" of "fused" to "naive", and "sizes".

    Raises:
      RuntimeError: a baseline's process ended.
    """
    sizes = dict(rows=rows, length=length, words=words, columns=columns, dtype=dtype, chunk=chunk)
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    if tile is not None:
        arguments += ["--tile", *map(str, tile)]
    processes, results, steps = {}, {}, {}
    try:
        for name in baselines:
            processes[name], temporary = _start(name, arguments)
            results[name] = dict(temporary_bytes=temporary) | dict.fromkeys(MEASURED)
            say(f"{name}: the compiler plans {temporary / 1e9:.2f} GB")
        for name in baselines:
            if results[name]["temporary_bytes"] < SAFE_SHARE * _available():
                steps[name] = []
            else:
                say(f"{name}: not run, {_available() / 1e9:.2f} GB are there")
        for turn in range(warm_up + repeat):
            for name, taken in steps.items():
                processes[name].stdin.write("\n")
                taken.append(_answer(name, processes[name]))
                say(f"{name}, turn {turn}: {taken[-1]}")
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait()
            process.stdout.close()
    for name, taken in steps.items():
        timed = taken[warm_up:]
        seconds, cpu_seconds = ([step[key] for step in timed] for key in ("seconds", "cpu_seconds"))
        extra_bytes = int(max(step["extra_bytes"] for step in taken))
        measured = extra_bytes, statistics.median(seconds), statistics.median(cpu_seconds), seconds, timed[-1]["loss"]
        results[name] |= dict(zip(MEASURED, measured, strict=True))

    def ratio(key):
        pair = [results[name][key] if name in results else None for name in ("fused", "naive")]
        return None if None in pair else pair[0] / pair[1]

    ratios = {f"{key}_ratio": ratio(key) for key in ("seconds", "cpu_seconds", "temporary_bytes")}
    return results | ratios | dict(sizes=sizes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("rows", "length", "words", "columns", "chunk"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tile", type=int, nargs=2)
    return parser


if __name__ == "__main__":
    _worker(_parser().parse_args())
