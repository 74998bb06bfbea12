"""A run without arrays: its programs, lowered on demand for devices that need not exist, and the memory beside each.

`roofline.py` counts what a program does; `compilation.py` compiles it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.compilation import with_shardings
from reinforce_ada_jax.learning import layer_gather, value_head
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.learner import Learner, scores_in_update
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.planning import collectives, latency, roofline
from reinforce_ada_jax.planning.latency import Starts
from reinforce_ada_jax.planning.roofline import BatchLayout, ProgramCost
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.splash_attention import block_size
from reinforce_ada_jax.policy.transformer import Params, init, param_shardings, weight_shapes
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training.state import abstract_state
from reinforce_ada_jax.training.updates import abstract_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One compiled program of a run.

    Attributes:
      lower: returns the program lowered for its abstract arguments.
      cost: least work of one `unit`, a "call" or a "step" of the loop inside.
      beside_bytes: memory that a training run keeps on each device beside this program.
      calls: of the program in one unit, one after the other; cost, bytes and starts are those of all of them.
      trip_count: of its outermost loop in one call, where data ends the loop; the mean of all calls.
      necessary_flops: FLOPs by the usual rule, to compare with.
      sent_bytes: counted by hand: of a call for targets that don't show their compiled program, of a step always. The
        program of a step also has a prefill, passes of fewer slots, and branches for top-k and top-p.
      starts: kernels and collectives, counted by hand in the same cases.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    cost: ProgramCost
    unit: str
    beside_bytes: int
    calls: int = 1
    trip_count: float | None = None
    necessary_flops: float | None = None
    sent_bytes: float | None = None
    starts: Starts = Starts()  # noqa: RUF009  (frozen)


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractRun:
    """A run without arrays, and the memory that it keeps on each device.

    Learner state and cache live as long as the run; so do the weights under adapters, and the reference's where there
    is a KL term. What decoding copies of the weights lives during a collection.
    All minibatches of an iteration are placed before the first update.

    `base` are the frozen weights under the adapters; None where all weights are trained.
    """

    config: Config
    engine: Engine
    learner: Learner
    state: LearnerState
    batch: Batch
    base: Params | None

    @property
    def policy(self) -> Params:
        """The weights to score with and to decode from."""
        return self.learner.policy(self.state.params, self.base)

    @functools.cached_property
    def decode_copy(self) -> Params | None:
        """Copy of weights for decoding: None, adapters alone, or all, with adapters merged or beside their base."""
        return self.engine.abstract_copy(self.policy)

    @property
    def reference_bytes(self) -> int:
        """The frozen first weights in the dtype of activations; under adapters the base serves as reference."""
        if self.base is not None or not self.config.learning.kl_coefficient:
            return 0
        itemsize = jnp.dtype(self.config.model.compute_dtype).itemsize
        masters = jnp.dtype(self.config.model.parameter_dtype).itemsize
        return mesh_lib.shard_bytes(self.state.params) * itemsize // masters

    @property
    def cache_bytes(self) -> int:
        """The pages; the rest of the decode state is less than a hundredth of them."""
        return self.engine.cache_bytes // self.engine.mesh.shape["tensor"]

    @property
    def moment_bytes(self) -> int:
        """The learner's state without the trained weights."""
        return mesh_lib.shard_bytes(self.state) - mesh_lib.shard_bytes(self.state.params)

    @property
    def learner_bytes(self) -> int:
        """Weights and moments, and the weights under adapters."""
        return mesh_lib.shard_bytes(self.state) + mesh_lib.shard_bytes(self.base)

    @property
    def resident_bytes(self) -> int:
        """Memory in use from the first iteration to the last."""
        return self.learner_bytes + self.cache_bytes + self.reference_bytes

    def batch_layout(self) -> BatchLayout:
        """The minibatch as `roofline.py` counts it."""
        config, mesh, a, adapters = self.config, self.learner.mesh, self.engine.architecture, self.learner.lora
        row_tokens, attention = self.batch.tokens.shape[-1], self.learner.platform.attention
        return BatchLayout(
            micro_batches=self.batch.tokens.shape[0],
            micro_rows=self.learner.micro_rows,
            row_tokens=row_tokens,
            head_tokens=self.batch.behaviour_logprobs.shape[-1],
            prompt_tokens=config.data.max_prompt_tokens,
            head_tile=self.learner.platform.head_tile,
            head_kernels=self.learner.platform.head_backend == "pallas_tpu",
            remat=self.learner.platform.remat,
            attention_block={"splash": block_size(row_tokens), "cudnn": 128}.get(attention),
            attention_backward=5 if attention == "cudnn" else 7,
            row_shards=mesh.shape["data"] * mesh.shape["fsdp"],
            weight_shards=mesh.shape["fsdp"],
            tensor_shards=mesh.shape["tensor"],
            itemsize=jnp.dtype(config.model.compute_dtype).itemsize,
            adapter_weights=0 if adapters is None else lora.num_parameters(a, adapters) // a.num_layers,
            gathers_once=self.learner.gathers_once,
        )


def abstract_run(config: Config, architecture: Architecture, options: EngineOptions, mesh: Mesh) -> AbstractRun:
    """Returns the run's components on a mesh whose devices need not exist."""
    learner = Learner(architecture, config, mesh)
    return AbstractRun(
        config=config,
        engine=Engine(architecture, options, mesh=mesh),
        learner=learner,
        state=abstract_state(config, learner),
        batch=abstract_batch(config, strategies.build(config.collection, regularized=config.regularized), learner),
        base=None if learner.lora is None else _abstract_base(config, learner),
    )


def _abstract_base(config: Config, learner: Learner) -> Params:
    """The frozen weights under adapters, as `components.load_params` places them."""
    make = functools.partial(init, learner.architecture, dtype=jnp.dtype(config.model.compute_dtype))
    return with_shardings(jax.eval_shape(make, jax.random.key(0)), param_shardings(learner.architecture, learner.mesh))


# ---- its programs ------------------------------------------------------------------------------------------------


def engine_programs(run: AbstractRun, mean_context: float | int) -> list[Program]:
    """Returns the engine's jitted programs on its mesh: the decode window, which also prefills."""
    engine = run.engine
    # Weights of the learner that the window reads are among its own arguments.
    shared = mesh_lib.shard_bytes(engine.abstract_weights()) - mesh_lib.shard_bytes(run.decode_copy)
    beside = run.learner_bytes + run.reference_bytes - shared
    a, options, tensor = engine.architecture, engine.options, engine.mesh.shape["tensor"]
    platform = engine.mesh.devices.flat[0].platform
    cost = roofline.decode_step(a, options, tensor, mean_context, platform)
    sent = collectives.decode_sent_bytes(a, options.slots, tensor, engine.dtype.itemsize)
    starts = latency.decode_step(a.num_layers, tensor, sent, platform)
    name = f"decode window of {engine.options.window}"
    return [Program(name, engine.programs()["decode window"], cost, "step", beside, sent_bytes=sent, starts=starts)]


def learner_programs(run: AbstractRun) -> list[Program]:
    """Returns the programs of an iteration beside decoding: reshard, value features, score and update.

    With one update an iteration only a reference is scored: the update computes the policy's own log-probabilities.
    The last ones are those of the update: one, or the three of its chain.
    """
    layout, config = run.batch_layout(), run.config
    copied = mesh_lib.shard_bytes(run.decode_copy)
    always = run.cache_bytes + run.reference_bytes
    updates = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    other_batches = (updates - 1) * mesh_lib.shard_bytes(run.batch)
    programs = []
    if run.decode_copy is not None:
        is_whole = jax.tree.structure(run.decode_copy) == jax.tree.structure(run.engine.abstract_weights())
        read, unread = (run.policy, None) if is_whole else (run.state.params, run.base)
        cost = ProgramCost(merge_flops(run), mesh_lib.shard_bytes(read) + copied)
        beside = run.moment_bytes + always + mesh_lib.shard_bytes(unread)
        programs.append(Program("reshard", lambda: run.engine.lower_cast(run.policy), cost, "call", beside))
    if strategies.build(config.collection).estimates and config.estimator.kind == "value":
        programs.append(_features_program(run, layout, run.moment_bytes + always + copied))
    if not scores_in_update(config) or config.learning.kl_coefficient:
        programs += _score_programs(run, layout, run.moment_bytes + always + other_batches)
    return programs + _update_programs(run, layout, always + other_batches)


def _copied_bytes(run: AbstractRun) -> int:
    """Returns the bytes of the layers' copy on each device; 0 where there is none."""
    learner = run.learner
    dtype = run.config.model.compute_dtype
    return layer_gather.copy_bytes(learner.architecture, learner.mesh, dtype) if learner.gathers_once else 0


def _score_programs(run: AbstractRun, layout: BatchLayout, beside: int) -> list[Program]:
    """Returns the programs of a scoring pass, with `beside` bytes beside the weights and the minibatch."""
    a, learner = run.engine.architecture, run.learner
    lowered, calls = learner.score_programs(run.policy, run.batch), learner.scoring_programs(run.batch)
    sent = collectives.learner_sent_bytes(a, layout, update=False)
    summed = collectives.learner_summed_bytes(a, layout, update=False)
    loop = Program(
        "score", lowered["score"], roofline.score_call(a, layout), "call", beside,
        calls=calls, trip_count=layout.micro_batches / calls, sent_bytes=sent,
        starts=latency.learner_call(a.num_layers, layout, summed, update=False),
    )  # fmt: skip
    if calls == 1:
        return [loop]
    gathered, copied = collectives.gathered_once_bytes(a, layout), _copied_bytes(run)
    unread = mesh_lib.shard_bytes(run.batch) + (0 if copied else mesh_lib.shard_bytes(run.policy))
    begin = Program(
        "begin scores", lowered["begin scores"], ProgramCost(0, copied), "call", beside + unread, sent_bytes=gathered
    )
    return [begin, dataclasses.replace(loop, sent_bytes=sent - gathered)]


def _update_programs(run: AbstractRun, layout: BatchLayout, beside: int) -> list[Program]:
    """Returns the programs of an update, with `beside` bytes beside the learner's state and the minibatch."""
    a, update = run.engine.architecture, run.learner.update
    masters = jnp.dtype(run.config.model.parameter_dtype).itemsize
    lowered = update.programs(run.state, run.batch, run.base)
    step = roofline.optimizer_call(a, layout, masters)
    sent = collectives.learner_sent_bytes(a, layout, update=True)
    summed = collectives.learner_summed_bytes(a, layout, update=True)
    calls = -(-layout.micro_batches // update.micro_batches_per_program)
    loop = Program(
        "update", lowered["update"], roofline.gradient_call(a, layout, masters), "call", beside,
        calls=calls, trip_count=layout.micro_batches / calls, necessary_flops=roofline.necessary_flops(a, layout),
        sent_bytes=sent, starts=latency.learner_call(a.num_layers, layout, summed, update=True),
    )  # fmt: skip
    if calls == 1:
        return [dataclasses.replace(loop, cost=roofline.update_call(a, layout, masters))]
    # Only the first program gathers weights. What a program does not read is no argument of it.
    params = mesh_lib.shard_bytes(run.state.params)
    copied = _copied_bytes(run)
    gathered, unread = collectives.gathered_once_bytes(a, layout), mesh_lib.shard_bytes((run.batch, run.base))
    return [
        Program(
            "begin update",
            lowered["begin update"],
            ProgramCost(0, copied + params),
            "call",
            beside + run.moment_bytes + unread + (0 if copied else params),
            sent_bytes=gathered,
        ),
        dataclasses.replace(loop, beside_bytes=beside + run.moment_bytes, sent_bytes=sent - gathered),
        Program("finish update", lowered["finish update"], step, "call", beside + unread, sent_bytes=0.0),
    ]


def merge_flops(run: AbstractRun) -> float:
    """FLOPs of merging adapters of rank r into plain weights, 2 r for each weight that has one, on each device."""
    adapters, mesh = run.learner.lora, run.learner.mesh
    if adapters is None or run.engine.options.adapters is not None:
        return 0.0
    shapes = weight_shapes(run.engine.architecture)
    weights = sum(math.prod(shapes[lora.TARGETS[target]][0]) for target in adapters.targets)
    return 2 * adapters.rank * weights / (mesh.shape["fsdp"] * mesh.shape["tensor"])


def _features_program(run: AbstractRun, layout: BatchLayout, beside: int) -> Program:
    config, mesh, a = run.config, run.learner.mesh, run.engine.architecture
    rows = -(-value_head.PROMPTS_AT_A_TIME // layout.row_shards) * layout.row_shards
    tokens, length = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh_lib.sharding(mesh, axes))
        for shape, axes in (((rows, layout.prompt_tokens), ("rows", None)), ((rows,), ("rows",)))
    )
    dtype = jnp.dtype(config.model.compute_dtype)
    return Program(
        "value head's features", lambda: value_head.prompt_features.lower(a, run.policy, tokens, length, dtype=dtype),
        roofline.features_call(a, dataclasses.replace(layout, micro_batches=1, micro_rows=rows)), "call", beside,
    )  # fmt: skip
