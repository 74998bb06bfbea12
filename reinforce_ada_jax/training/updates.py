"""From groups to new weights: minibatches, the check of their log-probabilities, and one optimiser step for each."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.averages import Averages
from reinforce_ada_jax.collection.groups import deal
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config, collection_rules
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.compilation import Lower, abstract
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.learner import Learner, scores_in_update
from reinforce_ada_jax.learning.logprob_gap import ALARMING_LOGPROB_GAP, gap_limits
from reinforce_ada_jax.learning.update import EXPERT_METRICS, NEED_RESPONSES, LearnerState, UpdateMetrics
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.training.run import Inputs, Run, TrainingStopped, check_weights
from reinforce_ada_jax.training.state import RunState

# Metrics of an iteration in which no minibatch was compared.
NO_GAP = {"update/logprob_gap": 0.0, "update/logprob_gap_max": 0.0}


@dataclasses.dataclass(frozen=True, eq=False)
class Minibatch:
    groups: list[Group]  # groups whose kept responses are in the batch
    batch: Batch  # the responses, on the devices
    finite: bool = True  # all log-probabilities are finite; if not, there is no update


def expected_rounds(config: Config, strategy: Strategy, averages: Averages) -> float:
    """Returns the expected rounds of a prompt: their mean so far, or in the first iteration the most that are allowed.

    So the first gradients are too small, not too large: Adam's second moment would remember large ones. If nothing
    limits the draws, or if first rounds have no fixed size, the first iteration takes 1.
    """
    size, most = collection_rules.first_round(config.collection), strategy.max_draws
    return averages.mean("rounds", 1.0 if size is None or most is None else most / size)


def coefficient_factor(config: Config, groups: Sequence[Group], rounds: float) -> float:
    """Returns the factor of a minibatch's coefficients that gives its gradient a constant divisor.

    The gradient is the sum of a_i s_i over the prompts, divided by prompts_per_update * rounds * max_response_tokens.
    The divisor depends on no outcome or length of this iteration, so prompts and responses have exact weights. The loss
    is a mean over the tokens or rows of the minibatch; the factor cancels their number. `rounds` is that of
    `expected_rounds`.
    """
    counted = sum(len(group.kept) for group in groups)
    if config.learning.aggregation == "token-mean":
        counted = sum(group.pool.responses[draw].num_sampled for group in groups for draw in group.kept.tolist())
    if config.learning.aggregation == "seq-mean-token-sum-norm":
        counted *= config.sampling.max_response_tokens
    return counted / (config.learning.prompts_per_update * rounds * config.sampling.max_response_tokens)


def examples(group: Group, factor: float) -> list[Example]:
    """Returns the kept responses of a group with their advantages.

    Coefficients (`Group.per_prompt`) are multiplied by `coefficient_factor`. The entropy and the KL term have the same
    factor. They are means over the M draws of each prompt's first round, which no outcome decides: later draws have
    only the policy term.
    """
    pool = group.pool
    draws = zip(group.kept.tolist(), group.advantages.tolist(), strict=True)
    if not group.per_prompt:
        return [Example(pool.prompt.tokens, pool.responses[draw], advantage) for draw, advantage in draws]
    size = pool.round_sizes[0]
    return [
        Example(
            pool.prompt.tokens, pool.responses[draw], factor * coefficient, factor * group.weight * (draw < size) / size
        )
        for draw, coefficient in draws
    ]


def batch_rows(config: Config, strategy: Strategy, learner: Learner, responses: int = 0) -> int:
    """Returns the number of rows that a minibatch is padded to: constant in a run, so nothing recompiles.

    Each response may be as long as the limit. If a strategy may keep any number of responses, there is room for twice
    as many until `responses` fit. Padding costs memory, not time.
    """
    of_prompt = config.collection.group_size if strategy.max_kept is None else strategy.max_kept
    most = config.learning.prompts_per_update * of_prompt
    while strategy.max_kept is None and most < responses:
        most *= 2
    return learner.layout.num_rows(most, config.row_tokens, learner.micro_rows)


def _batch(
    config: Config, strategy: Strategy, learner: Learner, given: Sequence[Example], rows: int, micro_rows: int | None
) -> Batch:
    """Returns a batch of responses in the shapes of a run; with `micro_rows` some may be left out (`make_batch`)."""
    return make_batch(
        given,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampling.max_response_tokens,
        num_rows=rows,
        layout=learner.layout,
        micro_rows=micro_rows,
        # With coefficients the entropy and the KL term are means over the first rounds, not over all rows.
        regularized=config.regularized and strategy.coefficients is not None,
        architecture=learner.architecture,
    )


def abstract_batch(config: Config, strategy: Strategy, learner: Learner) -> Batch:
    """Returns a minibatch as the update gets it, without arrays, to lower programs for."""
    micro = _batch(config, strategy, learner, [], learner.micro_rows, None)
    if config.learning.kl_coefficient:
        micro = dataclasses.replace(micro, reference_logprobs=micro.behaviour_logprobs)
    if scores_in_update(config):
        micro = dataclasses.replace(micro, old_logprobs=None)
    micro_batches = batch_rows(config, strategy, learner) // learner.micro_rows

    def abstract(x: np.ndarray) -> jax.ShapeDtypeStruct:
        sharding = mesh_lib.sharding(learner.mesh, (None, "batch", *[None] * (x.ndim - 1)))
        return jax.ShapeDtypeStruct((micro_batches, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map(abstract, micro)


# ---- minibatches -----------------------------------------------------------------------------------------------------


def score_groups(run: Run, state: RunState, groups: Sequence[Group]) -> tuple[list[Minibatch], dict[str, float]]:
    """Returns the minibatches of an iteration, scored and checked, and their metrics."""
    begin = time.monotonic()
    minibatches, gaps = check_logprobs(run, state, make_minibatches(run, state, groups))
    return minibatches, {"time/score_s": time.monotonic() - begin} | gaps


def make_minibatches(run: Run, state: RunState, groups: Sequence[Group]) -> list[Minibatch]:
    """Deals the iteration's groups to one minibatch per update, and adds log-probabilities.

    Those of the policy are computed before the first update and stay fixed (the `old` policy of PPO); with one update
    an iteration the update itself computes them. Responses whose advantage is 0 are left out of the rows where they
    contribute nothing to the gradient. They contribute through an entropy or KL term, and through a user's loss that
    has terms without the advantage. Those left out still count in the denominators of the gradient.

    Before each program of the scoring, all processes agree that the run goes on. They first wait for the scores before,
    because a checkpoint would have to wait for queued programs.
    """
    config = run.config
    count = config.collection.prompts_per_iteration // config.learning.prompts_per_update
    rounds = expected_rounds(config, run.strategy, state.averages)
    minibatches = []
    for places in deal([len(group.kept) for group in groups], count):
        dealt = [groups[place] for place in places if groups[place].kept.size]
        if not dealt:
            continue
        factor = coefficient_factor(config, dealt, rounds)
        sequences = [example for group in dealt for example in examples(group, factor)]
        rows = batch_rows(config, run.strategy, run.learner, len(sequences))
        micro_rows = None if config.regularized or run.learner.loss_needs_all else run.learner.micro_rows
        batch = _batch(config, run.strategy, run.learner, sequences, rows, micro_rows)
        if minibatches:
            before = minibatches[-1].batch
            jax.block_until_ready((before.old_logprobs, before.reference_logprobs))
        run.stop.agree()
        minibatches.append(Minibatch(dealt, _scored(run, state, batch)))
    return minibatches


def _scored(run: Run, state: RunState, batch: Batch) -> Batch:
    """Returns the batch on the devices, with the log-probabilities that the update does not compute itself."""
    learner, agree = run.learner, run.stop.agree
    if scores_in_update(run.config):
        batch = learner.put(dataclasses.replace(batch, old_logprobs=None))
    else:
        batch = learner.put(batch)
        batch = dataclasses.replace(batch, old_logprobs=learner.score(run.policy(state), batch, agree))
    if run.reference is None:
        return batch
    scored = learner.score(run.reference, dataclasses.replace(batch, experts=None), agree)  # its own experts
    return dataclasses.replace(batch, reference_logprobs=scored)


def update_programs(
    inputs: Inputs, state: LearnerState, base: Params | None, reference: Params | None
) -> dict[str, Lower]:
    """Returns the programs of an iteration's updates, lowered on demand for the arguments that they will get.

    `state` is that of the learner before the first update; the others are fields of `Run`.
    """
    config, learner = inputs.config, inputs.learner
    scored = abstract_batch(config, inputs.strategy, learner)
    batch = dataclasses.replace(scored, reference_logprobs=None)
    without_experts = dataclasses.replace(batch, experts=None)
    policy = learner.policy(state.params, base)
    state, policy, base, reference = abstract((state, policy, base, reference))
    programs = learner.update.programs(state, scored, base)
    of_policy = None if scores_in_update(config) else policy
    for name, weights, rows in (("reference", reference, without_experts), ("policy", of_policy, batch)):
        if weights is not None:
            scores = learner.score_programs(weights, rows)
            programs |= {f"{program} of the {name}": lower for program, lower in scores.items()}
    return programs


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_logprobs(
    run: Run, state: RunState, minibatches: Sequence[Minibatch]
) -> tuple[list[Minibatch], dict[str, float]]:
    """Compares the engine's log-probabilities of its own tokens with the learner's, under the same weights.

    Prefetched responses were drawn from earlier weights and are not compared. With one update an iteration
    `make_updates` compares instead.

    Returns:
      The minibatches, with `finite` set, and the metrics. There are no metrics if all finite responses were
      prefetched; they are 0 if no minibatch is finite. Raises TrainingStopped if they disagree by more than rounding.
    """
    if scores_in_update(run.config):
        return list(minibatches), {}
    total, largest, num_tokens, checked = 0.0, 0.0, 0, []
    names = ("response_mask", "policy_version", "behaviour_logprobs", "old_logprobs")
    for minibatch in minibatches:
        mask, version, behaviour, old = (processes.fetch(getattr(minibatch.batch, name)) for name in names)
        gaps = np.abs(old - behaviour)
        finite = bool(np.isfinite(gaps[mask]).all())
        checked.append(dataclasses.replace(minibatch, finite=finite))
        if finite:
            fresh = mask & (version == state.iteration)
            total, largest = total + float(gaps[fresh].sum()), max(largest, float(gaps[fresh].max(initial=0.0)))
            num_tokens += int(fresh.sum())
    metrics, stopped = _compared(run, total / max(num_tokens, 1), largest, num_tokens, state.iteration + 1)
    if stopped is not None:
        raise stopped
    return checked, metrics if any(minibatch.finite for minibatch in checked) else NO_GAP


def _skip_or_stop(
    run: Run, minibatch: Minibatch, iteration: int, number: int, where: str, in_a_row: int
) -> TrainingStopped | None:
    """Writes down the data of an update that is not finite; returns why the run must end, or None to skip it."""
    file = run.workdir / "non_finite" / f"{iteration:06d}-{number}.json"
    if processes.is_writer():
        file.parent.mkdir(exist_ok=True)
        text = json.dumps(described(minibatch) | {"iteration": iteration, "update": number}, indent=1)
        write_atomically(file, text)
    message = f"iteration {iteration}, {where} finite. Its data are in {buckets.origin(file)}."
    learning = run.config.learning
    if in_a_row > learning.max_skipped:
        return TrainingStopped(
            f"{message} The update was not applied. That makes {in_a_row} in a row; learning.max_skipped is "
            f"{learning.max_skipped}, and a larger number would go on without it."
        )
    run.progress.say(f"{message} It is skipped.")
    return None


# ---- updates ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatesDone:
    learner: LearnerState  # the new state; the one before the update that stopped the run, if one did
    skipped_in_a_row: int  # updates skipped because they were not finite, since the last one that was made
    metrics: dict[str, float]  # means over the updates made, and their number
    stopped: TrainingStopped | None  # why the run must end; None if it goes on


def make_updates(run: Run, state: RunState, minibatches: Sequence[Minibatch]) -> UpdatesDone:
    """Makes one optimiser step per minibatch; after one that must stop the run, the others are left out.

    A step that is not finite is skipped, or stops the run (`learning.max_skipped`).

    `state.learner` is donated at the end of the first update. Until then the state is whole, and the run may end
    between any two programs. After that it ends, before a program, only if there is no time for the other updates.

    Raises:
      Interrupted: the run was asked to end during the first update; or there is no time, and the state is lost.
      TrainingStopped: the new weights are not finite, and the state is lost.
      NotSavedError: the last save failed.
    """
    run.begin_update()
    learner, in_a_row, iteration = state.learner, state.skipped_in_a_row, state.iteration + 1
    begin, results, stopped = time.monotonic(), [], None
    gaps = NO_GAP if scores_in_update(run.config) else {}
    done, count = 0, sum(minibatch.finite for minibatch in minibatches)
    for number, minibatch in enumerate(minibatches, start=1):
        what = "a log-probability is"
        if minibatch.finite:
            between = run.stop.agree
            if done:
                now = time.monotonic()
                end = now + (count - done) * (now - begin) / done
                between = functools.partial(_end_if_late, run.stop, end)
                between()
            learner, result = run.learner.update(learner, minibatch.batch, run.base, np.int32(state.iteration), between)
            result, done = jax.device_get(result), done + 1
            if result.finite and (gap := result.gap) is not None:
                mean = float(gap.total / max(gap.num_tokens, 1))
                gaps, stopped = _compared(run, mean, float(gap.largest), int(gap.num_tokens), iteration)
                if stopped is not None:
                    break
            if result.finite:
                check_weights(result, f"iteration {iteration}, update {number} of {len(minibatches)}")
                results.append(result)
                in_a_row = 0
                continue
            if result.gap is None or not result.gap.num_not_finite:
                what = f"loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}:"
        where = f"update {number} of {len(minibatches)}: {what} not"
        stopped = _skip_or_stop(run, minibatch, iteration, number, where, in_a_row + 1)
        if stopped is not None:
            break
        in_a_row += 1
    metrics = update_means(results) | gaps | {"time/update_s": time.monotonic() - begin}
    return UpdatesDone(learner, in_a_row, metrics, stopped)


def _end_if_late(stop: Stop, end: float) -> None:
    """Raises Interrupted if there is no time for the updates, which are expected to end at `end`."""
    if not stop.has_time(max(0.0, end - time.monotonic())):
        raise Interrupted


def update_means(results: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Returns the means of the metrics over updates, and the number of updates.

    An update that computed no response, because every advantage was 0, has no value of `NEED_RESPONSES`. Without an
    update (every group was dropped) all means are 0. Metrics of experts are left out where they have no value.
    """
    metrics: dict[str, float] = {}
    for name in UpdateMetrics._fields:
        if name not in ("finite", "weights_finite", "gap"):
            exact = name not in NEED_RESPONSES
            values = [getattr(result, name) for result in results if result.computed_share > 0 or exact]
            values = [value for value in values if value is not None]
            if values or name not in EXPERT_METRICS:
                metrics[f"update/{name}"] = float(np.mean(values or [0.0]))
    return metrics | {"update/count": len(results)}


def _compared(
    run: Run, mean: float, largest: float, num_tokens: int, iteration: int
) -> tuple[dict[str, float], TrainingStopped | None]:
    """Returns metrics of the comparison of engine and learner, and why the run must end, or None.

    It must end if they differ by more than rounding; otherwise large gaps are a warning. `mean` and `largest` are
    absolute differences of the log-probability of a sampled token. Without a token there are no metrics.
    """
    limits = gap_limits(run.config)
    metrics = {"update/logprob_gap": mean, "update/logprob_gap_max": largest} if num_tokens else {}
    if limits is not None and not limits.hold(mean, largest):
        numbers = "in float32" if limits.largest else "with invariant numerics"
        return metrics, TrainingStopped(
            f"engine and learner disagree by {mean:.2g} on the log-probability of a sampled token on average, and by "
            f"{largest:.2g} at most; {numbers} rounding explains {limits.mean:g} and {limits.largest:g}. Samples and "
            "gradients don't belong together."
        )
    if limits is None and mean > ALARMING_LOGPROB_GAP:
        causes = (
            "Likely causes: model.compute_dtype is too coarse for this model, sampling.attention chose a kernel that "
            "rounds more than the learner's, or the weights have grown. learning.truncated_is_cap = 2.0 would bound "
            "the effect."
        )
        if run.config.draws_in_int8:
            causes = "int8 is too coarse for this model: set sampling.weight_dtype or sampling.kv_dtype to model."
        run.progress.say(
            f"iteration {iteration}: engine and learner differ by {mean:.2g} a token on average; the ratio of the "
            f"update is off by as much. {causes}"
        )
    return metrics, None


def described(minibatch: Minibatch) -> dict[str, list[dict[str, float | int | str]]]:
    """Returns prompt, lengths, reward and advantage of each response of a minibatch, as JSON."""

    def number(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)  # JSON has no other numbers

    rows = []
    for group in minibatch.groups:
        for draw, advantage in zip(group.kept.tolist(), group.advantages.tolist(), strict=True):
            response = group.pool.responses[draw]
            rows.append({
                "prompt": group.pool.prompt.id, "draw": draw, "prompt_tokens": len(group.pool.prompt.tokens),
                "response_tokens": response.num_sampled, "reward": number(float(group.pool.rewards[draw])),
                "advantage": number(advantage), "least_logprob": number(float(response.logprobs.min())),
            })  # fmt: skip
    return {"responses": rows}
