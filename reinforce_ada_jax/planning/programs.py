"""A run without arrays: its programs, lowered on demand for devices that need not be here, and what stays beside each.

What a program is counted to do is in `planning/roofline.py`; `compile_check.py` compiles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Batch, make_batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.value_head import prompt_features
from reinforce_ada_jax.planning import roofline
from reinforce_ada_jax.planning.roofline import Rows, Work
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.splash_attention import block_size
from reinforce_ada_jax.policy.transformer import Params, init, param_shardings, weight_shapes
from reinforce_ada_jax.sampling.engine import Engine, buckets
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training.checkpoint import abstract_state


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program of a run.

    Attributes:
      name: what it does.
      lower: gives the lowered program for its abstract arguments.
      work: of one `unit`.
      unit: what `work` counts: a call, or one turn of the loop inside.
      beside_bytes: what else a training run keeps on each device meanwhile.
      turns: of its outermost loop in one unit, where data ends it.
      necessary: FLOPs by the usual rule, to compare with.
      sent: bytes over links, counted by hand, for targets that don't show their compiled program.
    """

    name: str
    lower: Callable[[], Any]
    work: Work
    unit: str
    beside_bytes: int
    turns: int | None = None
    necessary: float | None = None
    sent: float | None = None


# ---- what is where -------------------------------------------------------------------------------------------------


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Abstract arrays that know where they are."""
    return jax.tree.map(lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), shapes, shardings)


@dataclasses.dataclass(frozen=True, eq=False)
class Abstract:
    """A run without arrays, and what of it stays on each device.

    Learner state and cache live as long as the run; so do the weights under adapters, and the reference's where there
    is a KL term. Decoding's own copy of the weights is made when a collection begins and dropped when it ends
    (`train.Run.collect`), unless they are the learner's very arrays. All minibatches of an iteration are placed before
    the first update.

    Attributes:
      config: its configuration.
      engine: its engine.
      learner: its learner.
      state: the learner's state.
      batch: one minibatch.
      base: the frozen weights under the adapters; None where all weights are trained.
    """

    config: Config
    engine: Engine
    learner: Learner
    state: Any
    batch: Batch
    base: Params | None

    @property
    def policy(self) -> Params:
        """The weights to score with and to decode from."""
        return self.learner.policy(self.state.params, self.base)

    @property
    def shared(self) -> bool:
        """Whether decoding reads the learner's own arrays; where adapters are trained it reads merged ones."""
        if self.base is not None:
            return False
        same = jax.tree.map(
            lambda x, there: x.dtype == there.dtype and x.sharding.is_equivalent_to(there.sharding, x.ndim),
            self.engine.abstract_weights(),
            self.state.params,
        )
        return all(jax.tree.leaves(same))

    @property
    def reference_bytes(self) -> int:
        """Of the frozen first weights, in the dtype of activations; under adapters they are there anyway."""
        if self.base is not None:
            return 0
        itemsize = jnp.dtype(self.config.model.compute_dtype).itemsize
        masters = jnp.dtype(self.config.model.parameter_dtype).itemsize
        held = bool(self.config.learning.kl_coefficient)
        return held * mesh_lib.shard_bytes(self.state.params) * itemsize // masters

    @property
    def cache_bytes(self) -> int:
        """Of the pages; what else the decode state has is less than a hundredth of them."""
        return self.engine.cache_bytes // self.engine.mesh.shape["tensor"]

    @property
    def learner_bytes(self) -> int:
        """Of weights and moments, and of the weights under adapters."""
        return mesh_lib.shard_bytes(self.state) + mesh_lib.shard_bytes(self.base)

    @property
    def resident_bytes(self) -> int:
        """What is there from the first iteration to the last."""
        return self.learner_bytes + self.cache_bytes + self.reference_bytes

    def rows(self) -> Rows:
        """What a minibatch has, as it is counted."""
        config, mesh, a, adapters = self.config, self.learner.mesh, self.engine.architecture, self.learner.lora
        return Rows(
            micro_batches=self.batch.tokens.shape[0],
            rows=self.learner.micro_rows,
            tokens=self.batch.tokens.shape[-1],
            head_tokens=self.batch.behaviour_logprobs.shape[-1],
            prompt_tokens=config.data.max_prompt_tokens,
            tile=self.learner.head_tile,
            block=block_size(self.batch.tokens.shape[-1]) if self.learner.attention == "splash" else None,
            remat=self.learner.remat,
            kernels=self.learner.head_backend == "pallas_tpu",
            row_shards=mesh.shape["data"] * mesh.shape["fsdp"],
            weight_shards=mesh.shape["fsdp"],
            tensor=mesh.shape["tensor"],
            itemsize=jnp.dtype(config.model.compute_dtype).itemsize,
            adapters=0 if adapters is None else lora.num_parameters(a, adapters) // a.num_layers,
        )


def abstract_run(config: Config, architecture: Architecture, options: EngineOptions, mesh: Mesh) -> Abstract:
    """The run's parts on a mesh whose devices need not be here."""
    learner = Learner(architecture, config, mesh)
    batch = abstract_batch(config, learner)
    state = with_shardings(*abstract_state(config, learner))
    base = None if learner.lora is None else abstract_base(config, learner)
    # Compiled ahead of time for its own chips alone, process 0 is taken for the whole slice, and refused: libtpu 0.0.51
    # goes by device 0. The last process has as many chips, in the same places of its host.
    last = max(device.process_index for device in mesh.devices.flat)
    engine = Engine(architecture, options, mesh=mesh, process=last)
    return Abstract(config, engine, learner, state, batch, base)


def abstract_base(config: Config, learner: Learner) -> Params:
    """The frozen weights under adapters, as `assembly.load_params` places them."""
    make = functools.partial(init, learner.architecture, dtype=jnp.dtype(config.model.compute_dtype))
    return with_shardings(jax.eval_shape(make, jax.random.key(0)), param_shardings(learner.architecture, learner.mesh))


def abstract_batch(config: Config, learner: Learner) -> Batch:
    """A minibatch as `Learner.put` places it, with as many rows as `Updates.batch_rows` pads it to."""
    most = strategies.build(config.collection).max_kept
    kept = config.collection.group_size if most is None else most
    micro_batches = -(-config.learning.prompts_per_update * kept // learner.micro_rows)
    micro = make_batch(
        [],
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        num_rows=learner.micro_rows,
        per_row=config.learning.responses_per_row,
    )
    if config.learning.kl_coefficient:
        micro = micro.replace(reference_logprobs=micro.old_logprobs)

    def place(x):
        there = mesh_lib.sharding(learner.mesh, (None, "rows", *[None] * (x.ndim - 1)))
        return jax.ShapeDtypeStruct((micro_batches, *x.shape), x.dtype, sharding=there)

    return jax.tree.map(place, micro)


# ---- programs ----------------------------------------------------------------------------------------------------


def engine_programs(run: Abstract, mean_context: float) -> list[Program]:
    """The engine's own jitted programs on the engine's mesh: the decode window, and prefill by bucket of length."""
    engine = run.engine
    a, o, tensor, lower = engine.architecture, engine.options, engine.mesh.shape["tensor"], engine.programs()
    beside = run.learner_bytes - run.shared * mesh_lib.shard_bytes(run.state.params) + run.reference_bytes

    def prefill(tokens):
        work = roofline.prefill_call(a, o, tensor, tokens)
        return Program(f"prefill {o.prefill_rows} x {tokens}", lower[f"prefill {tokens}"], work, "call", beside)

    work = roofline.decode_turn(a, o, tensor, mean_context)
    window = Program(f"decode window of {o.window}", lower["decode window"], work, "turn", beside, turns=1)
    return [window, *(prefill(tokens) for tokens in buckets(o.max_prompt_tokens))]


def learner_programs(run: Abstract) -> list[Program]:
    """Handing the weights over to decoding, the old policy's log-probabilities, and the update."""
    a, rows, config = run.engine.architecture, run.rows(), run.config
    moments = mesh_lib.shard_bytes(run.state) - mesh_lib.shard_bytes(run.state.params)
    own = mesh_lib.shard_bytes(run.engine.abstract_weights())
    always = run.cache_bytes + run.reference_bytes
    updates = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    other_batches = (updates - 1) * mesh_lib.shard_bytes(run.batch)
    programs = []
    if not run.shared:
        _, cast = run.engine._decode_weights  # the program that `Engine.decode_weights` runs
        work = Work(merge_flops(run), mesh_lib.shard_bytes(run.policy) + own)
        programs.append(Program("reshard", lambda: cast.lower(run.policy), work, "call", moments + always))
    if config.collection.strategy == "estimate" and config.estimator.kind == "value":
        programs.append(_features_program(run, moments + always + (0 if run.shared else own)))
    programs.append(Program(
        "score", lambda: run.learner.score.lower(run.policy, run.batch), roofline.score_call(a, rows), "call",
        moments + always + other_batches, turns=rows.micro_batches,
        sent=roofline.learner_sent(a, rows, update=False),
    ))  # fmt: skip
    masters = jnp.dtype(config.model.parameter_dtype).itemsize
    programs.append(Program(
        "update", lambda: run.learner.update.lower(run.state, run.batch, run.base),
        roofline.update_call(a, rows, masters), "call", always + other_batches, turns=rows.micro_batches,
        necessary=roofline.necessary_flops(a, rows), sent=roofline.learner_sent(a, rows, update=True),
    ))  # fmt: skip
    return programs


def merge_flops(run: Abstract) -> float:
    """Of making plain weights of adapters, 2 r for each weight that has one, on each device."""
    adapters, mesh = run.learner.lora, run.learner.mesh
    if adapters is None:
        return 0.0
    shapes = weight_shapes(run.engine.architecture)
    weights = sum(math.prod(shapes[lora.TARGETS[target]][0]) for target in adapters.targets)
    return 2 * adapters.rank * weights / (mesh.shape["fsdp"] * mesh.shape["tensor"])


def _features_program(run: Abstract, beside: int) -> Program:
    config, mesh, a = run.config, run.learner.mesh, run.engine.architecture
    rows = dataclasses.replace(run.rows(), micro_batches=1)
    size = -(-config.sampling.prefill_rows // rows.row_shards) * rows.row_shards
    tokens, length = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh_lib.sharding(mesh, axes))
        for shape, axes in (((size, rows.prompt_tokens), ("rows", None)), ((size,), ("rows",)))
    )
    dtype = jnp.dtype(config.model.compute_dtype)
    return Program(
        "value head's features", lambda: prompt_features.lower(a, run.policy, tokens, length, dtype=dtype),
        roofline.features_call(a, dataclasses.replace(rows, rows=size)), "call", beside,
    )  # fmt: skip
