from reinforce_ada_jax.rewards.cipher import grade
from reinforce_ada_jax.types import Verdict


def test_exact_match():
    """A response is right if it is the answer, but for spaces at its ends."""
    assert grade("aB3+", "aB3+") == Verdict(True, 1.0)
    assert grade(" aB3+\n", "aB3+") == Verdict(True, 1.0)
    for wrong in ("", "aB3", "aB3++", "ab3+", "aB 3+"):
        assert grade(wrong, "aB3+") == Verdict(False, 0.0)
