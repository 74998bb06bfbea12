"""Weights that a run trained: read from its checkpoints, or returned by `train`."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import adapter_files, huggingface, lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params, flatten, param_shardings
from reinforce_ada_jax.reporting.writers import read_metrics
from reinforce_ada_jax.training.components import Components, load_params
from reinforce_ada_jax.training.records import DamagedError, holds_checkpoint, read_run_id
from reinforce_ada_jax.training.run import Run
from reinforce_ada_jax.training.state import RunState, abstract_state

if TYPE_CHECKING:
    from reinforce_ada_jax.training.checkpoint import Checkpoints


@contextlib.contextmanager
def _opened(workdir: pathlib.Path, config: Config, iteration: int | None) -> Iterator[tuple["Checkpoints", int]]:
    """Yields the checkpoints of a run, and `iteration` or the newest one."""
    named = buckets.origin(workdir)
    if not holds_checkpoint(workdir):
        raise ValueError(f"{named} holds no checkpoint: train first, or name another --workdir.")
    from reinforce_ada_jax.training.checkpoint import Checkpoints  # noqa: PLC0415  (Orbax takes 0.2 s)

    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep, run_id=read_run_id(workdir))
    with contextlib.closing(checkpoints):
        for text in checkpoints.warnings():
            print(f"warning: {text}", file=sys.stderr)
        available = checkpoints.iterations()
        if not available:
            raise ValueError(f"{named} holds no finished checkpoint: train on, or name another --workdir.")
        iteration = available[-1] if iteration is None else iteration
        if iteration not in available:
            raise ValueError(
                f"{named} holds no finished checkpoint of iteration {iteration}; it has those of "
                f"{', '.join(map(str, available))}. Name one of them."
            )
        try:
            yield checkpoints, iteration
        except DamagedError as error:
            others = ", ".join(str(each) for each in available if each != iteration) or "none"
            raise ValueError(f"{error} Restore its folder from a copy. Other checkpoints there: {others}.") from error


def newest_iteration(workdir: pathlib.Path, config: Config) -> int:
    """Returns the iteration of the newest finished checkpoint; ValueError if there is none."""
    with _opened(workdir, config, None) as (_, newest):
        return newest


def read_trained(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None
) -> tuple[int, Params]:
    """Returns (iteration, trained weights or adapters) of a checkpoint, by default the newest.

    Raises ValueError where there is no such checkpoint, or the base of the adapters changed; `streamed` does, too.
    """
    with _opened(workdir, config, iteration) as (checkpoints, found):
        return found, checkpoints.restore_params(found, _target(config, components, checkpoints, found))


@contextlib.contextmanager
def streamed(
    workdir: pathlib.Path, config: Config, components: Components, iteration: int | None
) -> Iterator[tuple[int, Params, Callable[[str], jax.Array]]]:
    """Yields (iteration, shapes of the trained weights, function that reads one of them by its dotted name)."""
    with _opened(workdir, config, iteration) as (checkpoints, found):
        target = _target(config, components, checkpoints, found)

        def read(name: str) -> jax.Array:
            return flatten(checkpoints.restore_params(found, target, name))[name]

        yield found, target, read


def _target(config: Config, components: Components, checkpoints: "Checkpoints", iteration: int) -> Params:
    """Returns shapes and shardings of what was trained; ValueError if adapters have another base now."""
    learner = Learner(components.architecture, config, components.mesh)
    if learner.lora is not None:
        adapter_files.check_base(components.folder, checkpoints.record(iteration)["base"])
    return abstract_state(learner).params


def read_policy(workdir: pathlib.Path, config: Config, components: Components, iteration: int) -> Params:
    """Returns the weights of the policy; trained adapters are put over their base."""
    params = read_trained(workdir, config, components, iteration)[1]
    return _over_base(config, components, params, config.model.compute_dtype)


def merged(config: Config, components: Components, trained: Params) -> Params:
    """Returns plain weights: trained adapters are merged into their base, trained weights are returned as they are."""
    if not config.lora.rank:
        return trained
    merge = jax.jit(lora.merged, out_shardings=param_shardings(components.architecture, components.mesh))
    return merge(_over_base(config, components, trained, "float32"))


def _over_base(config: Config, components: Components, trained: Params, base_dtype: str) -> Params:
    adapters = lora.make(config.lora)
    if adapters is None:
        return trained
    return lora.adapted(load_params(config, components, base_dtype), trained, adapters)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRun:
    """A finished run."""

    workdir: pathlib.Path
    iteration: int  # number of finished iterations
    metrics: list[dict[str, float]]  # lines of metrics.jsonl, one an iteration
    architecture: Architecture
    params: Params  # trained weights on the devices; trained adapters are merged into their base
    model_folder: pathlib.Path  # the folder that the run began with, whose tokenizer `export` copies

    def export(self, folder: str | pathlib.Path) -> None:
        """Writes the weights as a Hugging Face folder; raises ValueError if `folder` is not empty."""
        huggingface.save(pathlib.Path(folder), self.architecture, self.params, tokenizer_from=self.model_folder)


def trained_run(run: Run, state: RunState) -> TrainedRun:
    """Returns the handle of a run that finished with `state`."""
    components, params = run.components, merged(run.config, run.components, state.learner.params)
    metrics = read_metrics(run.workdir)
    return TrainedRun(run.workdir, state.iteration, metrics, components.architecture, params, components.folder)
