"""Programs that runs, evaluations and servers in the process of the tests share: each was traced and loaded again."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.supervised import SupervisedLearner
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.sampling import engine, programs
from reinforce_ada_jax.training import startup, supervised
from tests import running

NOT_OF_A_LEARNER = (
    "iterations", "checkpoint", "code", "environment", "estimator", "evaluation", "judge", "logging", "reward", "sft",
)  # fmt: skip


# Of all tests of this process.
_MADE: dict[Hashable, Any] = {}


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Engines and learners of equal settings have the same programs, which take 2 s to trace and load if compiled."""
    made = _MADE
    make_adapters = AdapterLearner._make_programs

    def make_programs(architecture: Architecture, options: Any, mesh: Mesh, cast_shardings: Any) -> programs.Programs:
        leaves, structure = jax.tree.flatten(cast_shardings)
        same = architecture, mesh, tuple(leaves), structure
        if (options, same) not in made:
            own = programs.make_programs(architecture, options, mesh, cast_shardings)
            # The stop tokens are in the state; all other programs only know how many there are.
            sizes = dataclasses.replace(options, stop_ids=(-1,) * len(options.stop_ids), check_invariants=False)
            shared = made.setdefault(("sizes", sizes, same), own)
            made[options, same] = dataclasses.replace(shared, init_state=own.init_state)
        return made[options, same]

    def one_of(kind: type[Learner], architecture: Architecture, config: Config, mesh: Mesh, **more: Any) -> Learner:
        settings = json.loads(config_lib.to_json(config))
        settings = {name: value for name, value in settings.items() if name not in NOT_OF_A_LEARNER}
        settings["data"] = settings["data"]["max_prompt_tokens"]
        key = kind, architecture, json.dumps([settings, more]), mesh, platform.PROGRAM_S  # which a test changes
        if key not in made:
            made[key] = kind(architecture, config, mesh, **more)
        return made[key]

    def of_adapters(learner: AdapterLearner, chosen: Lora) -> Any:
        dtype = jax.tree.leaves(learner.base)[0].dtype
        key = learner.architecture, learner.mesh, learner._head, dtype, chosen
        if key not in made:
            made[key] = make_adapters(learner, chosen)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "make_programs", make_programs)
        patch.setattr(AdapterLearner, "_make_programs", of_adapters)
        for module in (startup, running):
            patch.setattr(module, "Learner", functools.partial(one_of, Learner))
        patch.setattr(supervised, "SupervisedLearner", functools.partial(one_of, SupervisedLearner))
        yield
