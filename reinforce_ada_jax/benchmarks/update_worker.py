"""The learner as a process of its own, for `benchmark update`: asked as baselines/transformers_update.py is.

{"command": "load", "model": DIR or null, "architecture": {...}, "dtype": "float32", "rows": 64, ...}
{"command": "score", "examples": [...]}  -> {"logprobs"}, of each response's tokens
{"command": "begin", "examples": [...]}  -> {"rows"}: the minibatch that every update takes
{"command": "run"}                       -> {"seconds", "loss", "grad_norm", "put_s", "dispatch_s", ...}, one update
"""

import gc
import json
import os
import pathlib
import re
import sys
import time
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.config import CollectionConfig, Config, LearningConfig, MeshConfig, ModelConfig, SamplingConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.learner import Learner, LearnerState
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.types import Response


def resident_bytes(name: str) -> int:
    """What Linux counts for this process: VmRSS now, VmHWM at most."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE).group(1))


def device_bytes(name: str) -> int | None:
    """What the first device counts ("bytes_in_use", "peak_bytes_in_use"); None where it keeps no count."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


class Worker:
    """A learner, its state and the minibatch."""

    def __init__(
        self,
        *,
        model: str | None,
        architecture: dict[str, Any],
        dtype: str,
        rows: int,
        micro_batches: int,
        per_row: int,
        prompt_tokens: int,
        response_tokens: int,
        learning: dict[str, Any],
        devices: int,
        seed: int,
    ):
        loss = {key: value for key, value in learning.items() if key != "temperature"}
        config = Config(
            seed=seed,
            model=ModelConfig(compute_dtype=dtype),
            collection=CollectionConfig(group_size=1),
            sampling=SamplingConfig(temperature=learning["temperature"]),
            learning=LearningConfig(
                prompts_per_update=rows,
                micro_batches=micro_batches,
                responses_per_row=per_row,
                warmup_updates=1,
                **loss,
            ),
            mesh=MeshConfig(data=devices),
        )
        self.config, self.rows = config, rows
        self.limits = dict(max_prompt_tokens=prompt_tokens, max_response_tokens=response_tokens)
        mesh = mesh_lib.make_mesh(data=devices)
        self.learner = Learner(from_hf(architecture), config, mesh)
        if model is None:
            params = transformer.init(self.learner.architecture, jax.random.key(seed), mesh)
        else:
            params = huggingface.load(pathlib.Path(model), mesh, jnp.float32)[1]
        self.params = jax.block_until_ready(params)
        gc.collect()
        # With the weights and nothing else; on a device, what it holds of them.
        self.before = resident_bytes("VmRSS") if device_bytes("bytes_in_use") is None else device_bytes("bytes_in_use")
        self.state: LearnerState | None = None
        self.batch: Batch | None = None

    def describe(self) -> dict[str, Any]:
        """The machine, and what the learner chose."""
        device = jax.devices()[0]
        return {
            "jax": jax.__version__,
            "device": device.device_kind,
            "platform": device.platform,
            "devices": self.learner.mesh.size,
            "attention": self.learner.platform.attention,
            "micro_rows": self.learner.micro_rows,
            "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(self.params)),
        }

    def _batch(self, examples: list[dict[str, Any]], per_row: int) -> Batch:
        def example(number: int, one: dict[str, Any]) -> Example:
            tokens = np.array(one["response"], np.int32)
            logprobs = np.array(one.get("old_logprobs", np.zeros(len(tokens))), np.float32)
            response = Response(str(number), 0, tokens, logprobs, truncated=False, policy_version=0)
            terms = (one.get(key, default) for key, default in (("reward", 0.0), ("baseline", 0.0), ("weight", 1.0)))
            return Example(np.array(one["prompt"], np.int32), response, *terms)

        made = [example(number, one) for number, one in enumerate(examples)]
        return make_batch(made, num_rows=self.rows, per_row=per_row, **self.limits)

    def score(self, examples: list[dict[str, Any]]) -> list[list[float]]:
        """Log-probabilities of each response's tokens."""
        batch = self.learner.put(self._batch(examples, per_row=1))
        scored = np.asarray(self.learner.score(self.params, batch)).reshape(self.rows, -1)
        return [row[: len(one["response"])].tolist() for row, one in zip(scored, examples, strict=False)]

    def begin(self, examples: list[dict[str, Any]]) -> int:
        """The minibatch of all updates; how many of its rows have tokens."""
        self.batch = self._batch(examples, self.config.learning.responses_per_row)
        self.state, self.params = self.learner.init(self.params), None
        return int((self.batch.response_length.sum(axis=-1) > 0).sum())

    def run(self) -> dict[str, float]:
        """One update: its time, its results, by how much memory grew beyond the weights, and what the host did.

        `put` and `update` return when they have handed their work over. What they take until then, by the clock and by
        this thread's count of processor time, is the host's part; the rest is waiting.
        """
        on_device = device_bytes("peak_bytes_in_use") is not None
        if not on_device:
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the most since now
        cpu_begin, begin, thread = time.process_time(), time.perf_counter(), time.thread_time()
        placed = self.learner.put(self.batch)
        put_s = time.perf_counter() - begin
        handed = time.perf_counter()
        self.state, metrics = self.learner.update(self.state, placed)
        dispatch_s, host_cpu_s = time.perf_counter() - handed, time.thread_time() - thread
        jax.block_until_ready((self.state, metrics))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        peak = device_bytes("peak_bytes_in_use") if on_device else resident_bytes("VmHWM")
        return dict(
            seconds=seconds, cpu_seconds=cpu_seconds, loss=float(metrics.loss), grad_norm=float(metrics.grad_norm),
            extra_bytes=peak - self.before, put_s=put_s, dispatch_s=dispatch_s, host_cpu_s=host_cpu_s,
        )  # fmt: skip


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers request after request until there are no more."""
    worker = None
    for line in requests:
        request = json.loads(line)
        command = request.pop("command")
        if command == "load":
            worker = Worker(**request)
            answer = worker.describe()
        elif command == "score":
            answer = {"logprobs": worker.score(**request)}
        elif command == "begin":
            answer = {"rows": worker.begin(**request)}
        elif command == "run":
            answer = worker.run()
        else:
            raise ValueError(f"unknown command {command!r}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Libraries print on stdout as they please; the answers have the real one to themselves.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, ANSWERS)
