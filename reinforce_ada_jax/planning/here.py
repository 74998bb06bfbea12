"""Time of an iteration on this machine, from products with the model's sizes that are timed here."""

import functools
import timeit

import jax
import jax.numpy as jnp

from reinforce_ada_jax.collection import slot_choice
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.training.components import Components

WEIGHTS = 2**24  # of a timed matrix: larger than caches, as a model's are
DENSE_ROWS = 512  # of a product at the full rate


def product_seconds(rows: int, columns: int, dtype: str) -> float:
    """Returns the seconds that a product of `rows` tokens takes for each weight of a model with this hidden size."""
    left, right = jnp.ones((rows, columns), dtype), jnp.ones((columns, WEIGHTS // columns), dtype)
    # Sums are float32, as in the policy: on CPUs a result in bfloat16 would take another, slower product.
    product = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    taken = timeit.repeat(
        lambda: product(left, right).block_until_ready(), number=1, repeat=4
    )  # the first one compiles
    return min(taken) / right.size


def iteration_line(config: Config, components: Components, strategy: Strategy) -> str:
    """Returns the line of a dry run on the time of an iteration where all responses have full length."""
    architecture, engine, prompts = components.architecture, components.engine, config.collection.prompts_per_iteration
    response, dtype = config.sampling.max_response_tokens, config.model.compute_dtype
    weights, devices = architecture.active_parameters, components.mesh.size
    step = weights * product_seconds(engine.options.slots, architecture.hidden_size, dtype)
    step *= engine.replicas / engine.mesh.size
    token = weights * product_seconds(DENSE_ROWS, architecture.hidden_size, dtype) / DENSE_ROWS / devices
    _, rounds = slot_choice.simulated(strategy, slot_choice.spread(prompts), engine.options.slots * engine.replicas)
    scale = max(1.0, prompts / slot_choice.MOST_PROMPTS)
    collect = scale * rounds * response * step + prompts * config.data.max_prompt_tokens * token
    # Products of the forward pass once, of the backward pass twice, and once more where layers are computed again.
    chosen = platform.of_mesh(components.mesh, config.learning, architecture, jnp.dtype(dtype))
    row_tokens = prompts * config.collection.group_size * (config.data.max_prompt_tokens + response)
    update = (3 if chosen.remat == "dots" else 4) * row_tokens * token
    both = collect + update
    return (
        f"time        about {_time(both)} an iteration here: {_time(collect)} to draw, {_time(update)} to update, if "
        f"responses have {response:,} tokens; {_time(both * config.iterations)} for all iterations"
    )


def _time(seconds: float) -> str:
    size, unit = (1, "s") if seconds < 60 else (60, "min") if seconds < 3600 else (3600, "h")
    return f"{seconds / size:.2g} {unit}"
