"""Lengths of prompts: those that an engine takes, and those for which a prefill of whole prompts is compiled."""

from reinforce_ada_jax.sampling.state import EngineOptions

SHORTEST_BUCKET = 16


def buckets(longest: int) -> list[int]:
    """Returns the prefill lengths: powers of two from 16 to the first that holds `longest`."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def check_prompt(options: EngineOptions, length: int) -> None:
    """Raises ValueError unless a prompt of this many tokens can be opened."""
    if not 1 <= length <= options.max_prompt_tokens:
        raise ValueError(
            f"a prompt has {length} tokens, and the engine takes 1 to {options.max_prompt_tokens}. Send a shorter one, "
            "or raise data.max_prompt_tokens: prompts are never cut."
        )
