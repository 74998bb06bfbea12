"""Data, programs and frozen weights of a run."""

import dataclasses
import pathlib

from reinforce_ada_jax.collection import selection as selection_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.selection import Selection
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.compilation import Ready, always_ready
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.value_head import ValueHead
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.kept_responses import KeptResponses
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.training.updates import Updates
from reinforce_ada_jax.types import Prompt


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """Data, programs and frozen weights of a run.

    Attributes:
      config: of the run.
      workdir: its work directory.
      components: model folder, tokenizer, mesh and engine.
      prompts: the training set.
      strategy: stopping rule and choice of responses.
      selection: choice of prompts; its state is in `RunState.selection`.
      learner: the compiled scoring and update.
      updates: minibatches and their checks.
      rollouts: the engine's decode state.
      estimator: of pass rates, where the strategy plans with them; its state is in `RunState.estimator`.
      base: frozen weights under the adapters; None if all weights are trained.
      reference: weights that the KL term compares with; None without one.
      ready_to_update: waits until the programs of the updates are compiled.
      kept: responses of iterations that no checkpoint holds yet; None: none are kept.
    """

    config: Config
    workdir: pathlib.Path
    components: Components
    prompts: list[Prompt]
    strategy: Strategy
    selection: Selection
    learner: Learner
    updates: Updates
    rollouts: Rollouts
    estimator: Ema | ValueHead | None = None
    base: Params | None = None
    reference: Params | None = None
    ready_to_update: Ready = always_ready
    kept: KeptResponses | None = None

    def policy(self, state: RunState) -> Params:
        """Returns the current weights, to score with and to decode from. The next update donates them."""
        return self.learner.policy(state.learner.params, self.base)


def make_trainer(
    config: Config, workdir: pathlib.Path, components: Components, prompts: list[Prompt], params: Params | None
) -> Trainer:
    """Builds the trainer of a run; `params` are the weights of the model folder, read again where they are needed."""
    strategy = strategies.build(config.collection, regularized=config.regularized)
    selection = selection_lib.build(config.collection, prompts, config.seed, extra_batches=strategy.extra_batches)
    learner = Learner(components.architecture, config, components.mesh)
    base = reference = None
    if learner.lora is not None:
        base = components_lib.load_params(config, components) if params is None else params
    if config.learning.kl_coefficient:  # adapters begin as no change, so their base is the reference
        dtype = config.model.compute_dtype
        reference = components_lib.load_params(config, components, dtype) if base is None else base
    estimator = components_lib.make_estimator(config, components) if strategy.estimates else None
    return Trainer(
        config, workdir, components, prompts, strategy, selection, learner,
        updates=Updates(config, strategy, learner, workdir),
        rollouts=Rollouts(components.engine),
        estimator=estimator,
        base=base,
        reference=reference,
    )  # fmt: skip
