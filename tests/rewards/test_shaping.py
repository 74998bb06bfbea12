from reinforce_ada_jax.rewards.shaping import Shaping, overlong_share
from reinforce_ada_jax.types import Verdict


def test_overlong_share_by_hand():
    # Limit 20, the last 8 tokens cost: free up to 12, then an eighth a token.
    shares = [overlong_share(length, 8, 20) for length in (1, 12, 13, 16, 20)]
    assert shares == [0.0, 0.0, 0.125, 0.5, 1.0]
    assert overlong_share(20, 0, 20) == 0.0


def test_a_penalty_makes_no_right_answer_wrong():
    shaping = Shaping(positive_threshold=0.7, overlong_tokens=8, max_response_tokens=20)
    # Full marks at full length: the answer stays right and its reward that of the outcome; 1 is kept apart.
    assert shaping(Verdict(True, 1.0), 20) == Verdict(True, 1.0, penalty=1.0)
    assert shaping(Verdict(True, 0.8), 16) == Verdict(True, 0.8, penalty=0.5)
    # What its grader thought of it does not matter: below the threshold it is wrong.
    assert shaping(Verdict(True, 0.7), 20) == Verdict(False, 0.7)


def test_a_wrong_answer_costs_the_same_at_every_length():
    # DAPO (2503.14476, section 3.4) would give -1 to -1/2: in an all-wrong group the short ones would be reinforced.
    shaping = Shaping(positive_threshold=0.7, overlong_tokens=8, max_response_tokens=20)
    verdicts = {shaping(Verdict(False, 0.0, "no_answer"), length) for length in (1, 16, 20)}
    assert verdicts == {Verdict(False, 0.0, "no_answer")}


def test_the_threshold_decides_what_is_correct():
    shaping = Shaping(positive_threshold=0.7)
    # At the threshold is not above it; what the checker thought of it does not matter, its reward does.
    verdicts = shaping.all([Verdict(True, 0.7), Verdict(False, 0.71), Verdict(True, 0.4)], [5, 5, 5])
    assert [verdict.correct for verdict in verdicts] == [False, True, False]
    assert [verdict.reward for verdict in verdicts] == [0.7, 0.71, 0.4]


def test_a_failure_is_never_correct():
    # Of rewards from -1 to 1, all above -1/2 are correct. A failure's 0 is no reward; a judgement of 0 is one.
    shaping = Shaping(positive_threshold=-0.5)
    reasons = ["", "no_answer", "timeout", "crash", "error", "max_turns", "truncated"]
    verdicts = [shaping(Verdict(False, 0.0, reason), 5) for reason in reasons]
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False, False, False, False]
    # A reward that a function gives with such a reason is its own.
    assert shaping(Verdict(True, 1.0, "truncated"), 5) == Verdict(True, 1.0, "truncated")
