"""Advice where slots stay idle during a collection: the setting that would fill them."""

import math

from reinforce_ada_jax.config import Config, collection_rules

ADVICE_AT = 3  # iteration of the advice; earlier ones may have few kept or prefetched responses
BUSY_ENOUGH = 0.6


def advice(config: Config, *, busy: float, slots: int, replicas: int, speculative: bool) -> str:
    """Returns a line that names the setting which would fill idle slots; "" where enough are busy.

    `busy` is the share of decode steps whose slot had a response, `slots` the slots of each of the `replicas`.
    """
    if busy >= BUSY_ENOUGH:
        return ""
    collection, num_slots = config.collection, slots * replicas
    plans = collection.strategy == "estimate"  # one round of planned draws, samples_per_round in the mean
    size = collection_rules.first_round(collection) or (
        collection.samples_per_round if plans else collection.group_size
    )
    started = collection.prompts_per_iteration * size
    may_overlap = collection.overlap == "none" and not config.mesh.sampler and not config.environment.path
    may_overlap &= not plans and collection.selection == "shuffled"
    if started < num_slots:
        of_update = config.learning.prompts_per_update
        prompts = math.ceil(num_slots / size / of_update) * of_update
        remedy = (
            f"an iteration begins with {collection.prompts_per_iteration} prompts * {size} = {started} responses. "
            f"collection.prompts_per_iteration={prompts} fills the slots, sampling.slots="
            f"{math.ceil(started / replicas)} leaves fewer idle"
        )
    elif collection.barrier:
        remedy = "collection.barrier=False starts the next round of a prompt before all others have ended theirs"
    elif not speculative and not plans and collection_rules.max_draws(collection) != size:
        remedy = "collection.speculative=True starts rounds before their verdicts, with the same samples"
    elif may_overlap:
        remedy = "collection.overlap=finish starts the next prompts in idle slots, with weights one iteration old"
    else:
        fewer = max(1, math.ceil(busy * slots * 1.25))
        remedy = f"sampling.slots={fewer} costs less for each token where the devices are slow"
    return f"{busy:.0%} of {num_slots} slots were busy in iteration {ADVICE_AT}: {remedy}."
