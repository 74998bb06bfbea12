"""An update in a chain of programs is the update in one program, and can be given up between two of them."""

import jax
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import shard_bytes
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.training.compile_counter import CompileCounter
from tests.learning.test_learner import (
    ADAPTERS,
    ALL,
    PARAMS,
    UPDATES,
    assert_trees_close,
    assert_trees_equal,
    batch,
    fresh_state,
    learner,
    placed_base,
    updated,
    with_empty_rows,
    with_reference,
)


def unscored(rows):
    """Rows whose old log-probabilities the update computes itself, and the gap to the engine's."""
    return rows.replace(old_logprobs=None)


# (micro-batches, settings, rows, adapters); most of them have their programs in common with other tests.
SLOW = ("scored", "everything", "own scores, reference")
CASES = {
    "scored": (8, {}, batch, None),
    "everything": (*UPDATES["everything"], batch, None),
    "own scores, reference": (*UPDATES["k2"], lambda: unscored(with_reference(batch())), None),
    "adapters, own scores, reference": (
        8,
        {"rank": ALL.rank, **UPDATES["k2"][1]},
        lambda: unscored(with_reference(batch())),
        ADAPTERS,
    ),
}


def made(of, rows, adapters, between=None):
    """(state, metrics) after one update."""
    params = {} if adapters is None else {"params": adapters}
    base = None if adapters is None else placed_base(of)
    return of.update(fresh_state(of, **params), of.put(rows), base, np.int32(0), between)


@pytest.mark.parametrize(
    ("micro_batches", "settings", "rows", "adapters"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
)
def test_a_chain_is_one_program(micro_batches, settings, rows, adapters):
    one = made(learner(micro_batches, **settings), rows(), adapters)
    chain = made(learner(micro_batches, in_program=3, **settings), rows(), adapters)
    # The same sums in the same order; but the compiler fuses the loss otherwise, and that rounds.
    assert_trees_close(chain, one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # the tests around it compare a chain with one program
def test_the_length_of_the_programs_changes_no_bit():
    three, seven = (updated(learner(8, in_program=number)) for number in (3, 7))
    assert_trees_equal(three, seven)


def test_a_chain_over_eight_devices_is_one_program():
    rows, settings = batch(), {"mesh": (2, 2, 2), "gathers": True}
    asked = []
    chain = learner(2, in_program=1, **settings)
    assert chain.gathers_once
    state, metrics = made(chain, rows, None, lambda: asked.append(0))
    assert len(asked) == 2
    one_state, one_metrics = made(learner(2, **settings), rows, None)
    assert_trees_close(state, one_state, rtol=1e-5, atol=1e-6)
    assert_trees_close(metrics, one_metrics, rtol=1e-5, atol=1e-6)
    same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, one_state)
    assert all(jax.tree.leaves(same))
    # It comes back as it went in, so a second update compiles nothing.
    placed, compiles = chain.put(rows), CompileCounter()
    chain.update(state, placed, None, np.int32(0))
    assert compiles.since_last() == 0


def test_scores_of_a_chain_are_those_of_one_program():
    # Of eight micro-batches 3 are scored in a program, and then again 3 and 2.
    of, asked = learner(8, in_program=1), []
    scored = of.score(PARAMS, of.put(batch()), lambda: asked.append(0))
    assert len(asked) == 3
    assert_trees_close(scored, learner(8).score(PARAMS, learner(8).put(batch())), rtol=1e-6, atol=1e-6)


def test_programs_without_a_token_are_not_begun():
    of, asked = learner(8, in_program=3), []
    four = with_empty_rows(jax.tree.map(lambda x: x[:4], batch()), 8)
    made(of, four, None, lambda: asked.append(0))
    assert len(asked) == 2  # of three micro-batches, and of one


class GivenUp(Exception):
    """The host wants no more of the update."""


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_an_update_that_is_given_up_leaves_the_state(programs):
    of = learner(8, in_program=3)
    state, asked = fresh_state(of), []

    def between():
        asked.append(0)
        if len(asked) == programs:
            raise GivenUp

    with pytest.raises(GivenUp):
        of.update(state, of.put(batch()), None, None, between)
    assert len(asked) == programs
    assert_trees_equal(state, fresh_state(of))
    # Repeated from this very state, it is the update that nothing disturbed.
    assert_trees_equal(of.update(state, of.put(batch())), updated(of))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_chain_leaves_the_state_where_a_gradient_is_not_finite():
    of = learner(8, in_program=3)
    rows = batch()
    rows = rows.replace(advantages=np.where(rows.advantages == rows.advantages[-1, 0], np.nan, rows.advantages))
    state, metrics = updated(of, rows)
    assert not metrics.finite
    assert_trees_equal(state, fresh_state(of))


def test_a_chain_holds_one_gradient_and_one_state():
    """Beside its arguments a program holds no second gradient, and no copy of moments or weights."""
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=4)
    architecture = from_hf(dict(model_type="qwen2", **sizes))
    of = learner(8, in_program=3, architecture=architecture)
    state = of.init(transformer.init(architecture, jax.random.key(0), of.mesh))
    programs = of.update.programs(state, of.put(batch()), None)
    temporaries = {
        name: programs[name]().compile().memory_analysis().temp_size_in_bytes for name in ("update", "finish update")
    }
    assert max(temporaries.values()) < shard_bytes(state.params) / 2, temporaries
