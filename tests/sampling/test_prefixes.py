"""Prefixes that open prompts share, and the pages that are free when one of them is closed."""

import dataclasses

import numpy as np

from reinforce_ada_jax.sampling.page_budget import PageBudget
from reinforce_ada_jax.sampling.prefixes import Prefixes
from reinforce_ada_jax.types import Prompt
from tests.sampling import tiny

OPTIONS = dataclasses.replace(tiny.OPTIONS, pages=40)  # pages of 4 tokens, prompts of at most 17


def tokens(*ids):
    return np.array(ids, np.int32)


def test_the_longest_prefix_in_whole_pages():
    prefixes = Prefixes(OPTIONS)
    prefixes.add(3, np.arange(9, dtype=np.int32), -1)  # stores 0 to 7: two pages
    prefixes.add(1, np.arange(6, dtype=np.int32), -1)
    assert prefixes.find(np.arange(17, dtype=np.int32), -1) == (3, 2)
    assert prefixes.find(tokens(0, 1, 2, 3, 4, 5, 6, 9, 9, 9), -1) == (3, 1)
    assert prefixes.find(tokens(0, 1, 2, 9, 4, 5, 6, 7, 8, 9), -1)[1] == 0
    # Keys and values of another adapter are others.
    assert prefixes.find(np.arange(17, dtype=np.int32), 0)[1] == 0
    prefixes.remove(3)
    assert prefixes.find(np.arange(17, dtype=np.int32), -1) == (1, 1)


def test_a_token_is_left_to_prefill():
    # Of 9 tokens 8 are stored. Were all of them shared, draws could begin before they are there.
    prefixes = Prefixes(OPTIONS)
    prefixes.add(0, np.arange(9, dtype=np.int32), -1)
    assert prefixes.find(np.arange(9, dtype=np.int32), -1) == (0, 1)
    assert prefixes.find(np.arange(10, dtype=np.int32), -1) == (0, 2)
    for length in (1, 2, 5):
        assert prefixes.find(np.arange(length, dtype=np.int32), -1)[1] == 0


def test_a_shared_page_is_free_when_its_last_prompt_is_closed():
    # 39 pages, of which one slot may hold 8: the others are guaranteed, unless prompts hold them.
    prompt = Prompt("p", "", "", np.zeros(17, np.int32))  # four pages
    budget = PageBudget(dataclasses.replace(OPTIONS, slots=1))
    budget.open_prompt(0, prompt)
    budget.open_prompt(1, prompt, like=0, shared=3)
    budget.open_prompt(2, prompt, like=1, shared=2)
    budget.submit_window([])
    assert budget.guaranteed_free_pages == 39 - 8 - (4 + 1 + 2)
    # Row 0 alone holds its fourth page; row 1 a fourth and, with row 0, the third; row 2 all that is left.
    for row, held in ((0, 6), (1, 4), (2, 0)):
        budget.close_prompt(row)
        budget.submit_window([])
        assert budget.guaranteed_free_pages == 39 - 8 - held
