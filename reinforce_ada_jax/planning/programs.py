"""A run without arrays: its programs, lowered on demand for devices that need not exist, and the memory beside each.

`roofline.py` counts what a program does; `compilation.py` compiles it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import layer_gather, value_head
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.learning.learner import Learner, scores_in_update
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.planning import roofline
from reinforce_ada_jax.planning.roofline import BatchLayout, ProgramCost
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training.state import abstract_base, abstract_state
from reinforce_ada_jax.training.updates import abstract_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program of a run: how to lower it, its least work, and the memory beside it."""

    name: str
    lower: Callable[[], jax.stages.Lowered]  # returns the program lowered for its abstract arguments
    cost: ProgramCost  # least work of a `unit`: a "call", or a "step" of its loop; for a chain, of all its calls
    unit: str
    beside_bytes: int  # memory that a training run keeps on each device beside this program


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractRun:
    """A run without arrays, and the memory that it keeps on each device.

    The learner's state exists as long as the run; so do the weights under adapters and, with a KL term, those of the
    reference. The cache exists until the end of a collection, and the copy of the weights for decoding during it. All
    minibatches of an iteration are on the devices before the first update.

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
        return mesh_lib.shard_bytes(self.state.params) * itemsize // 4  # of float32

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
        """Memory in use in all of a collection."""
        return self.learner_bytes + self.cache_bytes + self.reference_bytes

    def batch_layout(self) -> BatchLayout:
        """The minibatch as `roofline.py` counts it."""
        mesh, a, adapters = self.learner.mesh, self.engine.architecture, self.learner.lora
        return BatchLayout(
            micro_batches=self.batch.tokens.shape[0],
            micro_rows=self.learner.micro_rows,
            row_tokens=self.batch.tokens.shape[-1],
            head_tokens=(self.batch.behaviour_logprobs if mesh.shape["context"] == 1 else self.batch.tokens).shape[-1],
            row_shards=mesh_lib.parts(mesh, "parts") * mesh_lib.num_slices(mesh),
            weight_shards=mesh_lib.parts(mesh, "embed"),
            tensor_shards=mesh.shape["tensor"],
            itemsize=jnp.dtype(self.config.model.compute_dtype).itemsize,
            adapter_weights=0 if adapters is None else lora.num_parameters(a, adapters) // a.num_layers,
        )


def abstract_run(config: Config, architecture: Architecture, options: EngineOptions, mesh: Mesh) -> AbstractRun:
    """Returns the run's components on a mesh whose devices need not exist."""
    learner = Learner(architecture, config, mesh)
    return AbstractRun(
        config=config,
        engine=Engine(architecture, options, mesh=mesh),
        learner=learner,
        state=abstract_state(learner),
        batch=abstract_batch(config, strategies.build(config.collection, regularized=config.regularized), learner),
        base=abstract_base(config, learner),
    )


# ---- its programs ------------------------------------------------------------------------------------------------


def engine_programs(run: AbstractRun, mean_context: float | int) -> list[Program]:
    """Returns the engine's jitted programs on its mesh: the decode window, which also prefills."""
    engine = run.engine
    # The learner's weights that the window reads are its own arguments, so they are not beside it.
    shared = mesh_lib.shard_bytes(engine.abstract_weights()) - mesh_lib.shard_bytes(run.decode_copy)
    beside = run.learner_bytes + run.reference_bytes - shared
    cost = roofline.decode_step(engine.architecture, engine.options, engine.mesh.shape["tensor"], mean_context)
    name = f"decode window of {engine.options.window}"
    return [Program(name, engine.programs()["decode window"], cost, "step", beside)]


def learner_programs(run: AbstractRun) -> list[Program]:
    """Returns the programs of an iteration except decoding: reshard, value features, score and update.

    With one update an iteration only a reference is scored: the update computes the policy's own log-probabilities.
    The last programs are those of the update: one, or the three of its chain.
    """
    layout, config = run.batch_layout(), run.config
    copied = mesh_lib.shard_bytes(run.decode_copy)
    always, cache = run.reference_bytes, run.cache_bytes
    updates = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    other_batches = (updates - 1) * mesh_lib.shard_bytes(run.batch)
    programs = []
    if run.decode_copy is not None:
        is_whole = jax.tree.structure(run.decode_copy) == jax.tree.structure(run.engine.abstract_weights())
        read, unread = (run.policy, None) if is_whole else (run.state.params, run.base)
        cost = ProgramCost(0, mesh_lib.shard_bytes(read) + copied)
        beside = run.moment_bytes + always + cache + mesh_lib.shard_bytes(unread)
        programs.append(Program("reshard", lambda: run.engine.lower_cast(run.policy), cost, "call", beside))
    if strategies.build(config.collection).estimates and config.estimator.kind == "value":
        programs.append(_features_program(run, layout, run.moment_bytes + always + cache + copied))
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
    learner = run.learner
    lowered, cost = learner.score_programs(run.policy, run.batch), roofline.learner_call
    loop = Program("score", lowered["score"], cost(learner.architecture, layout, update=False), "call", beside)
    if learner.scoring.num_programs(run.batch) == 1:
        return [loop]
    copied = _copied_bytes(run)
    unread = mesh_lib.shard_bytes(run.batch) + (0 if copied else mesh_lib.shard_bytes(run.policy))
    begin = Program("begin scores", lowered["begin scores"], ProgramCost(0, copied), "call", beside + unread)
    return [begin, loop]


def _update_programs(run: AbstractRun, layout: BatchLayout, beside: int) -> list[Program]:
    """Returns the programs of an update, with `beside` bytes beside the learner's state and the minibatch."""
    a, update = run.engine.architecture, run.learner.update
    lowered = update.programs(run.state, run.batch, run.base)
    gradient, step = roofline.learner_call(a, layout, update=True), roofline.optimizer_call(a, layout)
    if not update.is_chain(run.batch):
        return [Program("update", lowered["update"], gradient + step, "call", beside)]
    # Arrays that a program does not read are no arguments of it: they are beside it.
    params, copied = mesh_lib.shard_bytes(run.state.params), _copied_bytes(run)
    unread = mesh_lib.shard_bytes((run.batch, run.base))
    begin_beside = beside + run.moment_bytes + unread + (0 if copied else params)
    return [
        Program("begin update", lowered["begin update"], ProgramCost(0, copied + params), "call", begin_beside),
        Program("update", lowered["update"], gradient, "call", beside + run.moment_bytes),
        Program("finish update", lowered["finish update"], step, "call", beside + unread),
    ]


def _features_program(run: AbstractRun, layout: BatchLayout, beside: int) -> Program:
    config, mesh, a = run.config, run.learner.mesh, run.engine.architecture
    shards = mesh_lib.parts(mesh, "rows")
    rows = -(-value_head.PROMPTS_AT_A_TIME // shards) * shards
    prompt_tokens, dtype = config.data.max_prompt_tokens, jnp.dtype(config.model.compute_dtype)
    tokens, length = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh_lib.sharding(mesh, axes))
        for shape, axes in (((rows, prompt_tokens), ("rows", None)), ((rows,), ("rows",)))
    )
    prompts = dataclasses.replace(
        layout, micro_batches=1, micro_rows=rows, row_tokens=prompt_tokens, head_tokens=0, row_shards=shards
    )
    return Program(
        "value head's features", lambda: value_head.prompt_features.lower(a, run.policy, tokens, length, dtype=dtype),
        roofline.learner_call(a, prompts, update=False), "call", beside,
    )  # fmt: skip
