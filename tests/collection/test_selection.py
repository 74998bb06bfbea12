"""Selections of prompts: shuffled epochs in their order, and the interface for a user's own."""

import dataclasses
import json

import numpy as np
import pytest

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection import selection as selection_lib
from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.selection import (
    Choice,
    PromptCursor,
    Proportional,
    Shuffled,
    next_prompts,
    prompts_after,
)
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.collection.test_inclusion import points
from tests.scripted_rng import ScriptedRng


def make_prompts(count):
    return [Prompt(str(i), "", "", np.zeros(1, np.int32)) for i in range(count)]


def batches(prompts, cursor, count, number):
    """Ids of the next `number` batches, and the cursor after them."""
    taken = []
    for _ in range(number):
        batch, cursor = next_prompts(prompts, cursor, count)
        taken.append([prompt.id for prompt in batch])
    return taken, cursor


def test_an_epoch_is_a_permutation():
    prompts = make_prompts(12)
    (first, second, third), cursor = batches(prompts, PromptCursor(seed=3), 4, 3)
    everyone = [prompt.id for prompt in prompts]
    assert sorted(first + second + third, key=int) == everyone != first + second + third
    assert cursor == PromptCursor(seed=3, epoch=0, position=12)
    again, cursor = batches(prompts, cursor, 4, 3)
    assert cursor == PromptCursor(seed=3, epoch=1, position=12)
    assert sorted((i for batch in again for i in batch), key=int) == everyone
    assert again != [first, second, third]
    assert batches(prompts, PromptCursor(seed=4), 4, 3)[0] != [first, second, third]


def test_the_order_never_changes():
    # numpy's PCG64 seeded with [seed, epoch] = [0, 0]. Another order would be another run under the same seed.
    (ids,), _ = batches(make_prompts(8), PromptCursor(seed=0), 8, 1)
    assert ids == list("24365017")


def test_a_short_tail_is_dropped_and_no_batch_has_a_prompt_twice():
    prompts = make_prompts(10)
    taken, cursor = batches(prompts, PromptCursor(seed=0), 4, 2 * 2000)
    assert all(len(set(batch)) == 4 for batch in taken)
    assert cursor == PromptCursor(seed=0, epoch=1999, position=8)
    # Nobody is favoured: 2,000 epochs of 8 of 10 give each prompt 1,600 +- 18 turns.
    turns = np.bincount([int(i) for batch in taken for i in batch])
    assert np.abs(turns - 1600).max() < 4 * 18


def test_resuming_from_json_continues_the_same_sequence():
    prompts = make_prompts(10)
    unbroken, _ = batches(prompts, PromptCursor(seed=7), 3, 11)
    start, cursor = batches(prompts, PromptCursor(seed=7), 3, 5)
    restored = PromptCursor(**json.loads(json.dumps(dataclasses.asdict(cursor))))
    assert restored == cursor
    assert start + batches(prompts, restored, 3, 6)[0] == unbroken


def test_a_whole_epoch_at_a_time():
    prompts = make_prompts(5)
    taken, cursor = batches(prompts, PromptCursor(seed=0), 5, 3)
    assert all(sorted(batch) == list("01234") for batch in taken)
    assert (cursor.epoch, cursor.position) == (2, 5)


@pytest.mark.parametrize("count", [0, 6])
def test_more_than_there_are(count):
    with pytest.raises(ValueError, match=f"takes {count} different prompts; there are 5.*prompts_per_iteration"):
        next_prompts(make_prompts(5), PromptCursor(seed=0), count)


def test_prompts_after_are_those_of_the_same_order():
    prompts = make_prompts(10)
    epoch, _ = next_prompts(prompts, PromptCursor(seed=0), 10)
    now, cursor = next_prompts(prompts, PromptCursor(seed=0), 3)
    replacements = prompts_after(prompts, cursor, 4, {prompt.id for prompt in now})
    assert [prompt.id for prompt, _ in replacements] == [prompt.id for prompt in epoch[3:7]]
    # Going on after the second of them: what would have been the third replacement comes next.
    assert next_prompts(prompts, replacements[1][1], 2)[0] == epoch[5:7]


def test_prompts_after_reach_into_the_next_epoch_and_never_repeat():
    prompts = make_prompts(6)
    now, cursor = next_prompts(prompts, PromptCursor(seed=0), 4)
    replacements = prompts_after(prompts, cursor, 5, {prompt.id for prompt in now})
    # Two are left, and in the next epoch all others are taken: no more than that, however many are asked for.
    names = [prompt.id for prompt, _ in replacements]
    assert len(names) == len(set(names)) == 2 and not set(names) & {prompt.id for prompt in now}
    assert prompts_after(prompts, cursor, 0, set()) == []
    # From the end of an epoch on they come in the order of the next one.
    following = prompts_after(prompts, PromptCursor(seed=0, position=6), 3, set())
    assert [prompt for prompt, _ in following] == next_prompts(prompts, PromptCursor(seed=0, epoch=1), 3)[0]
    assert following[2][1] == PromptCursor(seed=0, epoch=1, position=3)


# ---- the selection of shuffled epochs --------------------------------------------------------------------------------


def ids(prompts):
    return [prompt.id for prompt in prompts]


def groups(count):
    return [Group(Pool(prompt, (), (), 0, True), np.zeros(0, int), np.zeros(0)) for prompt in make_prompts(count)]


@pytest.mark.parametrize("overlap", ["none", "finish"])
def test_replacements_are_never_prompts_that_an_overlap_begins(overlap):
    config = CollectionConfig(prompts_per_iteration=4, overlap=overlap)
    prompts = make_prompts(40)
    order = ids(next_prompts(prompts, PromptCursor(seed=0), 40)[0])
    selection = selection_lib.build(config, prompts, 0, extra_batches=2)
    choice = selection_lib.choose(selection, 4, seed=0, iteration=1)
    assert ids(choice.prompts) == order[:4] and not choice.weights
    selection.observe(groups(4 + 3))
    after = selection_lib.choose(selection, 4, seed=0, iteration=2)
    if overlap == "none":  # the data goes on behind what was used
        assert ids(choice.replacements) == order[4:12] and not choice.upcoming.prompts
        assert ids(after.prompts) == order[7:11]
        return
    # The next iteration has 4 to 7, begun or not, and however many were replaced; those come from 8 on.
    assert ids(choice.upcoming.prompts) == order[4:8] and ids(choice.replacements) == order[8:16]
    assert ids(after.prompts) == order[4:8]


@pytest.mark.parametrize("used", [0, 1, 2])
def test_the_cursor_passes_the_replacements_that_were_used(used):
    prompts = make_prompts(10)
    selection = Shuffled(prompts, 3, extra_batches=1)
    selection_lib.choose(selection, 2, seed=3, iteration=1)
    assert selection.to_json() == {"seed": 3, "epoch": 0, "position": 0}, "what was chosen may not be drawn"
    selection.observe(groups(2 + used))
    assert selection.to_json() == {"seed": 3, "epoch": 0, "position": 2 + used}
    other = Shuffled(prompts, 3, extra_batches=1)
    other.load_json(json.loads(json.dumps(selection.to_json())))
    again = [selection_lib.choose(one, 2, seed=3, iteration=2) for one in (selection, other)]
    assert ids(again[0].prompts) == ids(again[1].prompts)


# ---- a selection of the user's ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Scripted:
    """Returns what it is told to."""

    choice: Choice
    drawn: list[float] = dataclasses.field(default_factory=list)

    def choose(self, count, rng):
        self.drawn.append(rng.random())
        return self.choice

    def observe(self, groups):
        return {}

    def to_json(self):
        return {}

    def load_json(self, saved):
        del saved


def test_a_state_keeps_its_values_and_has_the_keys_of_json():
    """A record of {2: ..., 10: ...} has another order of keys, and so another checksum, once it is read."""
    counts, scripted = {2: [1], 10: [1]}, Scripted(Choice(()))
    scripted.to_json = lambda: counts
    state = selection_lib.state_of(scripted, "proportional")
    counts[2].append(7)  # the next `observe`
    assert state == {"2": [1], "10": [1]}


def test_randomness_follows_from_the_seed_and_the_iteration():
    scripted = Scripted(Choice(make_prompts(2)))
    for seed, iteration in ((0, 1), (0, 1), (0, 2), (1, 1)):
        selection_lib.choose(scripted, 2, seed, iteration)
    first, again, *others = scripted.drawn
    assert first == again and len({first, *others}) == 3
    # The order of an epoch is drawn from [seed, epoch], and numpy takes [seed, epoch, 0] for the same seed.
    assert first != np.random.default_rng([0, 1]).random() == np.random.default_rng([0, 1, 0]).random()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(make_prompts(3)), "chose 3 prompts, 3 of them different, for iteration 7; it must choose 2"),
        (Choice(make_prompts(1) * 2), "chose 2 prompts, 1 of them different"),
        (Choice(make_prompts(2), [1.0]), "gave 1 weights"),
        (Choice(make_prompts(2), [1.0, 0.0]), "gave 2 weights, the least 0"),
        (Choice(make_prompts(2), [1.0, np.nan]), "gave 2 weights, the least nan"),
    ],
)
def test_a_choice_is_checked(choice, message):
    with pytest.raises(ValueError, match=message):
        selection_lib.choose(Scripted(choice), 2, seed=0, iteration=7)


def test_a_class_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from reinforce_ada_jax.collection.selection import Choice\n"
        "class First:\n"
        "    def __init__(self, prompts, config):\n"
        "        self.prompts, self.size = prompts, config.group_size\n"
        "    def choose(self, count, rng):\n"
        "        return Choice(self.prompts[:count], [self.size] * count)\n"
        "    def observe(self, groups):\n"
        "        return {'selection/pools': len(groups)}\n"
        "    def to_json(self):\n"
        "        return {}\n"
        "    def load_json(self, saved):\n"
        "        pass\n"
        "def nothing(prompts, config):\n"
        "    return None\n"
        "three = 3\n"
    )

    def build(name):
        config = CollectionConfig(selection=f"{file}:{name}", prompts_per_iteration=2, group_size=5)
        return selection_lib.build(config, make_prompts(4), 0)

    choice = selection_lib.choose(build("First"), 2, seed=0, iteration=1)
    assert ids(choice.prompts) == ["0", "1"] and choice.weight_of() == {"0": 5, "1": 5}
    for name, message in (
        ("Second", "defines no 'Second'"),
        ("three", "which is 3; it must be a function or a class"),
        ("nothing", "made None; it must have choose, observe, to_json and load_json"),
    ):
        with pytest.raises(ValueError, match=f"collection.selection is '{file}:{name}'.*{message}"):
            build(name)


@pytest.mark.parametrize(
    ("returned", "message"),
    [("{'selection/seen': 'many'}", "the metric 'selection/seen' is 'many'; it must be a number"),
     ("{}[groups]", r"TypeError: unhashable type: 'list' \(.*mine.py, line 2\)")],
)  # fmt: skip
def test_what_a_class_observes_must_be_numbers(tmp_path, returned, message):
    file = tmp_path / "mine.py"
    file.write_text(f"def observe(groups):\n    return {returned}\n")
    selection = Shuffled(make_prompts(4), 0)
    selection.observe = user_code.run(file).observe
    with pytest.raises(ValueError, match=f"collection.selection is '{file}:Mine', which failed: {message}"):
        selection_lib.observe(selection, [], f"{file}:Mine")


def test_what_a_class_observes_may_be_numbers_of_numpy():
    """metrics.jsonl is JSON, which has no float32 and no integers of numpy."""
    selection = Shuffled(make_prompts(4), 0)
    selection.observe = lambda groups: {"half": np.float32(0.5), "count": np.int64(3), "exact": 2**60 + 1}
    found = selection_lib.observe(selection, [], "mine.py:Mine")
    assert json.dumps(found) == '{"half": 0.5, "count": 3, "exact": 1152921504606846977}'


# ---- the selection of unequal probabilities --------------------------------------------------------------------------


def group_of(prompt, verdicts, advantages=(1.0,), weight=1.0, logprob=0.0, tokens=2):
    """A group with a response for each verdict, whose tokens have this log-probability; its first rows are kept."""
    responses = tuple(
        Response(prompt.id, draw, np.ones(tokens, np.int32), np.full(tokens, logprob, np.float32), False)
        for draw in range(len(verdicts))
    )
    pool = Pool(prompt, responses, tuple(Verdict(right, float(right)) for right in verdicts), len(verdicts), True)
    return Group(pool, np.arange(len(advantages)), weight * np.array(advantages), weight=weight)


def expected_factors(selection, count, size, order):
    """The expected factor of each prompt, divided by `count`: its weight in the mean over the iteration's prompts."""
    expected, plain = np.zeros(size), np.zeros(size)
    for point, probability in points(selection.probabilities(count), order):
        choice = selection.choose(count, ScriptedRng(order, point))
        for prompt, weight in zip(choice.prompts, choice.weights, strict=True):
            expected[int(prompt.id)] += probability * weight / count
            plain[int(prompt.id)] += probability / count
    return expected, plain


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_objective_stays_the_mean_over_the_data(count):
    prompts = [dataclasses.replace(prompt, pass_rate=int(prompt.id) / 12) for prompt in make_prompts(12)]
    rng, selection = np.random.default_rng(1), Proportional(prompts)

    def drawn(prompt, weight):
        verdicts = (rng.random(6) < prompt.pass_rate).tolist()
        return group_of(prompt, verdicts, [float(prompt.id)], weight, logprob=-0.5)

    selection.observe([drawn(prompt, 1.0) for prompt in prompts])
    for iteration in range(3):  # the probabilities follow from what was observed
        choice = selection_lib.choose(selection, count, 0, iteration)
        selection.observe([drawn(*each) for each in zip(choice.prompts, choice.weights, strict=True)])
        for _ in range(3):
            expected, plain = expected_factors(selection, count, 12, rng.permutation(12))
            np.testing.assert_allclose(expected, 1 / 12, rtol=1e-9)
            # Without the division a prompt would count as often as it is drawn.
            assert np.abs(plain * 12 - 1).max() > 1e-2


def test_probabilities_by_hand():
    prompts = make_prompts(4)
    selection = Proportional(prompts)
    np.testing.assert_allclose(selection.probabilities(2), 0.5)  # nothing is known
    # Nothing was known of both: they are in the bin of 1/2.
    hard = group_of(prompts[0], [False] * 8, [1.0], weight=2.0, logprob=np.log(0.5))
    easy = group_of(prompts[1], [True] * 8, [3.0], weight=0.5, logprob=np.log(0.5))
    observed = selection.observe([hard, easy])
    # First rounds of one draw: (2 * 0 + 0.5 * 1) / 2; factors 2 and 0.5: 2.5^2 / (2 * 4.25).
    assert observed == pytest.approx(
        {"selection/pass_rate": 0.25, "selection/weight_max": 2.0, "selection/effective_share": 6.25 / 8.5}
    )
    np.testing.assert_allclose(selection.probabilities(2), 0.5)  # all bins have the mean of the one
    # Now the pass rates 0.5 / 9 and 8.5 / 9 are expected: bins 0 and 9. A token of probability 1/2 has (1 - 1/2)^2, a
    # response of two tokens 1/2, so the noise is 1/2 * 1^2 and 1/2 * 3^2, whatever the weights are; 16 tokens each.
    selection.observe([hard, easy])
    # In the bin of 1/2 are 0.95 of the first two. The mean of the four: noise (0.95 * 5 + 5) / 3.9 = 2.5, 16 tokens.
    # Bin 0: (0.5 + 8 * 2.5) / (16 * 9); bin 9: (4.5 + 8 * 2.5) / (16 * 9); unseen prompts: 2.5 / 16.
    sizes = np.sqrt(np.array([20.5 / 9, 24.5 / 9, 2.5, 2.5]) / 16)
    np.testing.assert_allclose(selection.probabilities(2), (0.75 * sizes / sizes.mean() + 0.25) / 2, rtol=1e-12)


@pytest.mark.parametrize(
    ("changed", "noise", "tokens"),
    [
        ({"tokens": 8}, 4, 4),  # each token has its own score
        ({"logprob": np.log(0.9)}, 0.04, 1),  # (1 - 0.9)^2 instead of (1 - 0.5)^2
        pytest.param({"advantages": [1.0] * 4}, 4, 1, marks=pytest.mark.slow),
        ({"verdicts": [True] * 20}, 1, 2.5),
    ],
)
def test_noise_and_cost_are_measured(changed, noise, tokens):
    # After many visits the bins of the hard and of the easy prompt have their own means.
    prompts = [dataclasses.replace(prompt, pass_rate=float(prompt.id)) for prompt in make_prompts(2)]
    selection = Proportional(prompts, uniform=1e-6)
    usual = {"verdicts": [True] * 8, "logprob": np.log(0.5)}
    for _ in range(200):
        hard = group_of(prompts[0], **usual | {"verdicts": [False] * 8})
        easy = group_of(prompts[1], **usual | changed)
        selection.observe([hard] * 100 + [easy] * 100)
    pi = selection.probabilities(1)
    assert pi[1] / pi[0] == pytest.approx((noise / tokens) ** 0.5, rel=3e-2)


def test_a_pass_rate_of_the_data_counts_as_one_draw():
    rates = zip(make_prompts(3), (0.1, None, 1.0), strict=True)
    prompts = [dataclasses.replace(prompt, pass_rate=rate) for prompt, rate in rates]
    selection = Proportional(prompts)
    # (0.1 + 0.5) / 2 = 0.3 and (1 + 0.5) / 2 = 0.75, as the state has them.
    assert selection.to_json()["pass_rates"] == {"counts": {"0": [1.0, 0.1], "2": [1.0, 1.0]}}


def test_a_resumed_selection_chooses_the_same():
    prompts = make_prompts(6)
    selection, resumed = (Proportional(prompts) for _ in range(2))
    for iteration in range(3):
        choice = selection_lib.choose(selection, 3, 0, iteration)
        selection.observe([group_of(prompt, [True, False, iteration > 1], logprob=-0.3) for prompt in choice.prompts])
    resumed.load_json(json.loads(json.dumps(selection.to_json())))
    assert resumed.to_json() == selection.to_json()
    np.testing.assert_array_equal(resumed.probabilities(3), selection.probabilities(3))


def test_no_unequal_probabilities_where_prompts_are_replaced():
    config = CollectionConfig(selection="proportional", prompts_per_iteration=2, strategy="mine.py:f")
    with pytest.raises(ValueError, match="replaces the prompts that it drops.*selection shuffled"):
        selection_lib.build(config, make_prompts(4), 0, extra_batches=1)
    assert isinstance(selection_lib.build(config, make_prompts(4), 0), Proportional)
