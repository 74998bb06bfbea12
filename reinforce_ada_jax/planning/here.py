"""Time of an iteration on this machine, from timed matrix products of the model's sizes."""

import functools
import math
import timeit

import jax
import jax.numpy as jnp

from reinforce_ada_jax.collection import slot_choice
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.learning.learner import scores_in_update
from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.training.components import Components

WEIGHTS = 2**24  # of a timed matrix: larger than caches, as a model's are
DENSE_ROWS = 512  # of a product at the full rate
# Seconds of a unit, its name, and the time from which the next unit is used.
UNITS = ((1, "s", 60), (60, "min", 3600), (3600, "h", 48 * 3600), (86400, "days", math.inf))


def product_seconds(rows: int, columns: int, dtype: str) -> float:
    """Returns the seconds of a product with `rows` tokens, for each weight; `columns` is the hidden size."""
    left, right = jnp.ones((rows, columns), dtype), jnp.ones((columns, WEIGHTS // columns), dtype)
    # Sums are float32, as in the policy: for a result in bfloat16, CPUs would run another, slower product.
    product = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    # The first one compiles.
    taken = timeit.repeat(lambda: product(left, right).block_until_ready(), number=1, repeat=4)
    return min(taken) / right.size


def iteration_line(config: Config, components: Components, strategy: Strategy) -> str:
    """Returns the line of a dry run on the time of an iteration where all responses have full length."""
    architecture, engine, prompts = components.architecture, components.engine, config.collection.prompts_per_iteration
    response, dtype = config.sampling.max_response_tokens, config.model.compute_dtype
    weights, devices = architecture.active_parameters, components.mesh.size
    step = _step_seconds(config, components)
    token = weights * product_seconds(DENSE_ROWS, architecture.hidden_size, dtype) / DENSE_ROWS / devices
    slots = engine.options.slots * num_replicas(engine.mesh)
    _, rounds = slot_choice.simulated(strategy, slot_choice.spread(prompts), slots)
    scale = max(1.0, prompts / slot_choice.MOST_PROMPTS)
    collect = scale * rounds * response * step + prompts * config.data.max_prompt_tokens * token
    # The forward pass has these products once, the backward pass twice, and once more if it computes layers again.
    chosen = platform.of_mesh(components.mesh, config.learning, architecture, jnp.dtype(dtype))
    group_size = config.collection.group_size
    shares = platform.row_layout(components.mesh, config, architecture).shares_prompts
    of_group = group_size * response + (1 if shares else group_size) * config.data.max_prompt_tokens
    passes = 3 if chosen.remat == "dots" else 4
    passes += (not scores_in_update(config)) + bool(config.learning.kl_coefficient)  # scoring of policy and reference
    update = passes * prompts * of_group * token
    both = collect + update
    return (
        f"time        about {_time(both)} an iteration here: {_time(collect)} to draw, {_time(update)} to update, if "
        f"responses have {response:,} tokens; {_time(both * config.iterations)} for all iterations"
    )


def drawing_line(config: Config, components: Components, responses: int, max_tokens: int) -> str:
    """Returns the line of a dry run on the time of draws where all responses have full length."""
    engine = components.engine
    steps = -(-responses // (engine.options.slots * num_replicas(engine.mesh))) * max_tokens
    taken = _time(steps * _step_seconds(config, components))
    return f"time        about {taken} here to draw {responses:,} responses, if all have {max_tokens:,} tokens"


def _step_seconds(config: Config, components: Components) -> float:
    """Returns the seconds that the products of a decode step take."""
    architecture, engine = components.architecture, components.engine
    taken = product_seconds(engine.options.slots, architecture.hidden_size, config.model.compute_dtype)
    return architecture.active_parameters * taken / engine.mesh.shape["tensor"]


def _time(seconds: float) -> str:
    """Returns a time with two significant digits, or as a whole number if it has more."""
    size, unit = next((size, unit) for size, unit, most in UNITS if seconds < most)
    value = seconds / size
    return f"{value:.2g} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
