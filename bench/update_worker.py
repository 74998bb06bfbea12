"""The learner in its own process, for `bench.update`; see baselines/json_worker.py for the protocol.

{"command": "load", "model": DIR or null, "architecture": {...}, "dtype": "float32", "rows": 64, ...}
{"command": "score", "examples": [...]}  -> {"logprobs", "of_neighbours"}, of each response's tokens
{"command": "begin", "examples": [...]}  -> {"rows"}: the minibatch that every update takes
{"command": "run"}                       -> {"seconds", "loss", "grad_norm", "put_s", "dispatch_s", ...}, one update
"""

import dataclasses
import gc
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.baselines.json_worker import reset_peak, serve
from bench.measuring import machine, memory_bytes
from bench.models import neighbours
from reinforce_ada_jax.config import (
    CollectionConfig,
    Config,
    DataConfig,
    LearningConfig,
    MeshConfig,
    ModelConfig,
    SamplingConfig,
)
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.types import Response

# Settings of the learner and of baselines. At this learning rate, usual for fine-tuning, a few updates change a loss by
# less than its rounding.
LEARNING: dict[str, Any] = dict(
    learning_rate=1e-5, b1=0.9, b2=0.999, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0, clip_low=0.2, clip_high=0.28,
    dual_clip=10.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the minibatch.

    Attributes:
      rows: number of responses.
      prompt_tokens: of each prompt.
      response_tokens: of the longest response; rows are padded to it.
      micro_batches: of both programs.
      dtype: of the products; weights, moments and sums are float32.
      seed: of the tokens, and of random weights.
    """

    rows: int
    prompt_tokens: int
    response_tokens: int
    micro_batches: int
    dtype: str = "float32"
    seed: int = 0


class UpdateWorker:
    """A learner, its state and the minibatch."""

    def __init__(
        self, *, model: str | None, architecture: dict[str, Any], sizes: dict[str, Any], per_row: int, devices: int
    ):
        """`sizes` has the fields of `Sizes`."""
        self.sizes = Sizes(**sizes)
        mesh = mesh_lib.make_mesh(data=devices)
        config = Config(
            seed=self.sizes.seed,
            model=ModelConfig(compute_dtype=self.sizes.dtype),
            data=DataConfig(max_prompt_tokens=self.sizes.prompt_tokens),
            sampling=SamplingConfig(max_response_tokens=self.sizes.response_tokens),
            collection=CollectionConfig(group_size=1),
            learning=LearningConfig(
                prompts_per_update=self.sizes.rows, micro_batches=self.sizes.micro_batches, responses_per_row=per_row,
                warmup_updates=1, **LEARNING,
            ),
            mesh=MeshConfig(data=devices),
        )  # fmt: skip
        self.learner = Learner(from_hf(architecture), config, mesh)
        if model is None:
            params = transformer.init(self.learner.architecture, jax.random.key(self.sizes.seed), mesh)
        else:
            params = huggingface.load(pathlib.Path(model), mesh, jnp.float32)[1]
        self.params: Params = jax.block_until_ready(params)
        gc.collect()
        self.weights_alone_bytes = memory_bytes(peak=False)
        self.state: LearnerState
        self.batch: Batch

    def describe(self) -> dict[str, Any]:
        """Returns the machine, and the learner's choices."""
        return machine() | {
            "devices": self.learner.mesh.size,
            "attention": self.learner.platform.attention,
            "micro_rows": self.learner.micro_rows,
            "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(self.params)),
        }

    def _batch(self, examples: list[dict[str, Any]], layout: RowLayout, leave_out: bool = False) -> Batch:
        def example(number: int, one: dict[str, Any]) -> Example:
            tokens = np.array(one["response"], np.int32)
            logprobs = np.array(one.get("old_logprobs", np.zeros(len(tokens))), np.float32)
            response = Response(str(number), 0, tokens, logprobs, truncated=False, policy_version=0)
            return Example(np.array(one["prompt"], np.int32), response, one["advantage"])

        made = [example(number, one) for number, one in enumerate(examples)]
        micro_rows, sizes = self.learner.micro_rows, self.sizes
        return make_batch(
            made,
            max_prompt_tokens=sizes.prompt_tokens,
            max_response_tokens=sizes.response_tokens,
            num_rows=layout.num_rows(sizes.rows, sizes.prompt_tokens + sizes.response_tokens, micro_rows),
            layout=layout,
            micro_rows=micro_rows if leave_out else None,
        )

    def score(self, examples: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
        """Returns log-probabilities of each response's tokens, and those under neighbours of the weights."""
        batch = self.learner.put(self._batch(examples, RowLayout()))

        def scored(params: Params) -> list[list[float]]:
            rows = np.asarray(self.learner.score(params, batch)).reshape(-1, self.sizes.response_tokens)
            return [row[: len(one["response"])].tolist() for row, one in zip(rows, examples, strict=False)]

        return {"logprobs": scored(self.params), "of_neighbours": scored(neighbours(self.params))}

    def begin(self, examples: list[dict[str, Any]], leave_out: bool = False) -> dict[str, int]:
        """Sets the minibatch of all updates; returns the number of its rows that have tokens.

        With `leave_out` responses whose advantage is 0 are left out of it, as in training.
        """
        self.batch = self._batch(examples, self.learner.layout, leave_out)
        self.state = self.learner.init(self.params)
        del self.params  # the state has them
        return {"rows": int((self.batch.response_length.sum(axis=-1) > 0).sum())}

    def run(self) -> dict[str, float]:
        """Runs one update; returns its time, its results, its memory beyond the weights, and the host's share.

        `put` and `update` return when they have handed their work over. The time until then, by the clock and by this
        thread's count of processor time, is the host's share; the rest is waiting.
        """
        if jax.devices()[0].memory_stats() is None:
            reset_peak()
        cpu_begin, begin, thread = time.process_time(), time.perf_counter(), time.thread_time()
        on_device = self.learner.put(self.batch)
        put_s = time.perf_counter() - begin
        handed = time.perf_counter()
        self.state, metrics = self.learner.update(self.state, on_device)
        dispatch_s, host_cpu_s = time.perf_counter() - handed, time.thread_time() - thread
        jax.block_until_ready((self.state, metrics))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        extra_bytes = memory_bytes(peak=True) - self.weights_alone_bytes
        return dict(
            seconds=seconds, cpu_seconds=cpu_seconds, loss=float(metrics.loss), grad_norm=float(metrics.grad_norm),
            extra_bytes=extra_bytes, put_s=put_s, dispatch_s=dispatch_s, host_cpu_s=host_cpu_s,
        )  # fmt: skip


if __name__ == "__main__":
    serve(UpdateWorker)
