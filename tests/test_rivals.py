"""Published methods as files of users: their rules on verdicts worked by hand, and an iteration with each."""

import ast
import dataclasses
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.selection import choose
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.collection.strategies import PromptProgress
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training.loop import Ending
from reinforce_ada_jax.types import Pool, Prompt, Verdict
from tests.running import ROOT, cipher_file, load, reproducible, responses_kept, tiny, train
from tests.scripted_rng import ScriptedRng

RIVALS = ROOT / "examples" / "rivals"


def prompts_of(*pass_rates):
    return [Prompt(str(i), "", "", np.zeros(1, np.int32), pass_rate=rate) for i, rate in enumerate(pass_rates)]


def ids(prompts):
    return [prompt.id for prompt in prompts]


def group_of(prompt, *rounds):
    """The group of a prompt with these verdicts in its rounds."""
    verdicts = tuple(Verdict(bool(right), float(right)) for each in rounds for right in each)
    pool = Pool(prompt, (), verdicts, len(rounds), True, round_sizes=tuple(map(len, rounds)))
    return Group(pool, np.zeros(0, int), np.zeros(0))


def resumed(selection, prompts, config=None):
    """Another selection with the same state, as a checkpoint has it."""
    other = type(selection)(prompts, config or CollectionConfig())
    other.load_json(json.loads(json.dumps(selection.to_json())))
    assert json.dumps(other.to_json()) == json.dumps(selection.to_json())
    return other


def test_each_is_short_and_uses_what_users_have():
    for file in RIVALS.glob("*.py"):
        source = file.read_text()
        assert len(source.splitlines()) <= 80
        imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        rooms = {module.split(".")[1] for module in imported if module.startswith("reinforce_ada_jax.")}
        assert rooms <= {"collection", "config", "types"}


# ---- sgpo.py ---------------------------------------------------------------------------------------------------------


def test_sgpo():
    """Draws follow from the pass rates of prompts, and unsolved ones come last."""
    sgpo = load(RIVALS / "sgpo.py")
    strategy = sgpo.sgpo(CollectionConfig(samples_per_round=8, max_rounds=4))
    prompts = prompts_of(0.125, 0.2, 0.75, 0.875, *[0.0] * 11)
    sizes = [strategy.next_draws(PromptProgress(prompt, 0, 0, 0)) for prompt in prompts]
    assert sizes == [8, 4, 2, 2, *[32] * 11]  # 1 / 0.2 = 5, 1 / 0.75 = 1.33
    (rare,) = prompts_of(0.01)
    assert strategy.next_draws(PromptProgress(rare, 0, 0, 0)) == 32  # 64 would be more than 8 * 4
    assert strategy.next_draws(PromptProgress(prompts[0], 1, 8, 0)) == 0

    selection = sgpo.EasyToHard(prompts, CollectionConfig())
    rng = np.random.default_rng(0)
    # Without the one above 0.75; of the eleven unsolved ones the first and the eleventh.
    assert ids(selection.choose(4, rng).prompts) == ["2", "1", "0", "4"]
    selection.observe([group_of(prompt, [1]) for prompt in selection.choose(3, rng).prompts])
    assert ids(resumed(selection, prompts).choose(3, rng).prompts) == ["4", "14", "2"]
    with pytest.raises(ValueError, match="prompt '0' has no pass_rate"):
        sgpo.EasyToHard(prompts_of(None), CollectionConfig())


# ---- mopps.py --------------------------------------------------------------------------------------------------------


def test_mopps():
    """Verdicts are counted, older ones less, and draws from the counts choose prompts."""
    prompts = prompts_of(None, None, None, None)
    selection = load(RIVALS / "mopps.py").MoPPS(prompts, CollectionConfig())
    selection.observe([group_of(prompts[0], [1] * 8), group_of(prompts[1], [1, 0] * 4)])
    # 0.5 * 1 + 0.5 * 1 + 8 correct draws, and none wrong.
    assert selection.to_json() == {"0": (9.0, 1.0), "1": (5.0, 5.0)}
    selection.observe([group_of(prompts[0], [0] * 8)])
    assert selection.to_json()["0"] == (0.5 * 9 + 0.5, 0.5 * 1 + 0.5 + 8)
    other = resumed(selection, prompts)
    # 5 / 14, and 1/2 for the others, in the order of the data.
    assert ids(other.choose(3, ScriptedRng()).prompts) == ["1", "2", "3"]
    # Thompson draws: a prompt of Beta(1, 1) is near 1/2 less often than one of Beta(400, 400).
    other.load_json({"0": (400.0, 400.0), "1": (1.0, 400.0)})
    first = [choose(other, 1, 0, iteration).prompts[0].id for iteration in range(200)]
    assert first.count("0") > 150 and "1" not in first and {"2", "3"} < set(first)


# ---- greso.py --------------------------------------------------------------------------------------------------------


def test_greso():
    """Prompts without signal are skipped by probabilities that adapt."""
    prompts, config = prompts_of(None, None, None, None), CollectionConfig(max_extra_batches=1)
    selection = load(RIVALS / "greso.py").GRESO(prompts, config)
    easy, hard, mixed = (group_of(prompts[i], verdicts) for i, verdicts in enumerate(([1, 1], [0, 0], [1, 0])))
    assert [selection.skip_probability(prompt) for prompt in prompts] == [0.0] * 4
    # 1/3 easy and 1/3 hard are above the targets 1/12 and 1/6, so both e fall from 0.5 by 0.01.
    assert selection.observe([easy, hard, mixed]) == pytest.approx({"selection/e_easy": 0.49, "selection/e_hard": 0.49})
    # 1/2 easy, none hard.
    assert selection.observe([easy, mixed]) == pytest.approx({"selection/e_easy": 0.48, "selection/e_hard": 0.5})
    wanted = [1 - 0.48**2, 1 - 0.5, 0.0, 0.0]
    assert [selection.skip_probability(prompt) for prompt in prompts] == pytest.approx(wanted)
    # 0.6 skips the first prompt and not the second; skipped ones come last.
    choice = resumed(selection, prompts, config).choose(2, ScriptedRng([0, 1, 2, 3], 0.6))
    assert ids(choice.prompts) == ["1", "2"] and ids(choice.replacements) == ["3", "0"]
    # Another kind of group begins another run, and a group with a signal ends it.
    selection.observe([group_of(prompts[0], [0, 0]), group_of(prompts[1], [1, 0])])
    e_hard = 0.49  # 1/2 hard
    assert [selection.skip_probability(prompt) for prompt in prompts[:2]] == pytest.approx([1 - e_hard, 0.0])
    for _ in range(20):
        selection.observe([easy])
    assert selection.skip_probability(prompts[0]) == 0.99


# ---- knapsack.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "most"), [(12, 8), (16, 5), (20, 16)])
def test_knapsack_has_the_largest_value_of_all_allocations(budget, most):
    knapsack = load(RIVALS / "knapsack.py")
    rates = np.array([0.1, 0.5, 0.9, 0.02])

    def value(draws):
        signal = 1 - rates ** np.array(draws) - (1 - rates) ** np.array(draws)
        return float(signal @ (rates * (1 - rates) ** 2))

    found = knapsack.allocate(rates, list("abcd"), budget, most)
    every = [draws for draws in itertools.product(range(2, most + 1), repeat=4) if sum(draws) == budget]
    assert found.sum() == budget and value(found) == pytest.approx(max(map(value, every)), rel=1e-12)


def test_knapsack_by_hand():
    knapsack = load(RIVALS / "knapsack.py")
    # One more than two draws adds 0.25 * 0.125 at p = 1/2, and 0.1875 * 0.140625 = 0.0264 at p = 1/4; one more than
    # three adds 0.125 * 0.125 = 0.0156 at 1/2.
    assert knapsack.gain(0.5, 2) == 0.25 * 0.125 and knapsack.gain(0.25, 2) == 0.1875 * 0.140625
    assert knapsack.allocate(np.array([0.5, 0.25]), ["a", "b"], 5, 8).tolist() == [3, 2]
    assert knapsack.allocate(np.array([0.5, 0.25]), ["a", "b"], 6, 8).tolist() == [3, 3]
    # More than all may have.
    assert knapsack.allocate(np.array([0.5, 0.25]), ["a", "b"], 99, 8).tolist() == [8, 8]
    # Equal prompts share equally, in the collection loop.
    config = CollectionConfig(
        strategy=f"{RIVALS}/knapsack.py:knapsack", group_size=3, samples_per_round=4, max_rounds=2
    )
    assert [len(pool.responses) for pool in run_strategy(config, np.zeros((2, 8)))] == [3, 3]


# ---- pilot_commit.py -------------------------------------------------------------------------------------------------


def test_pilot_commit():
    """Pilot draws decide which prompts get more."""
    module = load(RIVALS / "pilot_commit.py")
    config = CollectionConfig(
        strategy=f"{RIVALS}/pilot_commit.py:pilot_commit", samples_per_round=8, max_extra_batches=1
    )
    right = np.array([0, 1, 6, 7, 8])  # correct ones of eight pilot responses: 1/8 and 6/8 are committed
    rewards = np.array([[1.0] * count + [0.0] * (32 - count) for count in right])
    pools = run_strategy(config, rewards)
    assert [len(pool.responses) for pool in pools] == [8, 32, 32, 8, 8]
    keep = module.pilot_commit(config).keep
    assert [len(keep(pool.correct)) for pool in pools] == [0, 32, 32, 0, 0]

    prompts = prompts_of(None, None, None, None)
    selection = module.Unsolved(prompts, config)
    observed = selection.observe(
        [group_of(prompts[0], [1] * 8), group_of(prompts[1], [1, 0] * 4, [1] * 24), group_of(prompts[3], [0] * 8)]
    )
    assert observed == {"selection/solved": 1.0}
    choice = resumed(selection, prompts, config).choose(2, ScriptedRng([0, 3, 1, 2]))
    assert ids(choice.prompts) == ["2", "3"] and ids(choice.replacements) == ["1", "0"]


# ---- ar3po.py --------------------------------------------------------------------------------------------------------


def with_label(pool, **labels):
    """The pool of a prompt with these labels."""
    return dataclasses.replace(pool, prompt=dataclasses.replace(pool.prompt, labels=labels))


def test_ar3po():
    """Rounds end at the first success, and earlier successes are kept."""
    module = load(RIVALS / "ar3po.py")
    config = CollectionConfig(strategy=f"{RIVALS}/ar3po.py:ar3po", samples_per_round=4, max_rounds=2)
    strategy = module.ar3po(config)
    rewards = np.array([[0, 1, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0], [0] * 8], float)
    solved, late, unsolved = run_strategy(config, rewards)
    assert [len(pool.responses) for pool in (solved, late, unsolved)] == [4, 8, 8]
    # Mean 1/4, standard deviation 1/2: (3/4, -1/4, -1/4, -1/4) * 2 / 4.
    assert make_group(solved, strategy).advantages == pytest.approx([-0.125, 0.375, -0.125, -0.125], rel=1e-5)
    assert make_group(unsolved, strategy).kept.size == 0
    # A stored correct response is one of the eight: mean 1/8, deviation sqrt(1/8). Seven wrong ones are rows.
    group = make_group(with_label(unsolved, solved="yes"), strategy)
    assert group.kept.tolist() == list(range(7))
    assert group.advantages == pytest.approx([-0.125 / 0.125**0.5 / 8] * 7, rel=1e-5)
    # Where one is correct, nothing is taken from the store.
    assert np.array_equal(
        make_group(with_label(solved, solved="yes"), strategy).advantages, make_group(solved, strategy).advantages
    )


def test_ar3po_remembers_who_was_solved():
    prompts = prompts_of(None, None, None)
    selection = load(RIVALS / "ar3po.py").Reusing(prompts, CollectionConfig())
    assert [prompt.labels for prompt in selection.choose(3, ScriptedRng([2, 0, 1])).prompts] == [{}] * 3
    selection.observe([group_of(prompts[0], [0, 1]), group_of(prompts[1], [0, 0])])
    selection.observe([group_of(prompts[0], [0, 0])])  # once solved, always solved
    chosen = resumed(selection, prompts).choose(3, ScriptedRng([1, 0, 2])).prompts
    assert [(prompt.id, prompt.labels) for prompt in chosen] == [("2", {}), ("1", {}), ("0", {"solved": "yes"})]


def test_what_a_selection_tells_the_strategy_outlives_a_kill(tmp_path):
    """After a kill in an update its responses are stored, and the labels of their prompts are those of the choice."""
    files = {"collection.strategy": "ar3po.py:ar3po", "collection.selection": "ar3po.py:Reusing"}
    config = tiny(
        **{name: f"{RIVALS}/{file}" for name, file in files.items()},
        **{
            "iterations": 3, "checkpoint.every": 2, "evaluation.every": 0, "logging.trackers": "",
            "data.prompts": cipher_file(tmp_path / "prompts.jsonl", 8), "collection.prompts_per_iteration": 8,
            "learning.prompts_per_update": 8, "collection.samples_per_round": 3, "collection.max_rounds": 1,
            "sampling.slots": 32,
        },
    )  # fmt: skip
    with responses_kept():
        assert train(config, tmp_path / "unbroken").ending is Ending.FINISHED
    # A prompt that is solved again has 3 rows, one that was solved before has 2.
    assert writers.read_metrics(tmp_path / "unbroken")[2]["collection/kept"] % 3
    shutil.copytree(tmp_path / "unbroken", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "3")
    assert train(config, tmp_path / "resumed").ending is Ending.FINISHED
    assert reproducible(tmp_path / "resumed") == reproducible(tmp_path / "unbroken")


# ---- vip.py ----------------------------------------------------------------------------------------------------------


def words_of(*tokens):
    return [Prompt(str(i), "", "", np.array(each, np.int32)) for i, each in enumerate(tokens)]


def test_vip_shares_the_budget():
    module = load(RIVALS / "vip.py")
    config = CollectionConfig(group_size=9, samples_per_round=8, max_rounds=2)
    prompts, strategy = words_of([0], [1]), module.vip(config)
    selection = module.VIP(prompts, config)

    def draws(*rates):
        selection.predict = lambda names: np.array(rates)
        chosen = selection.choose(2, ScriptedRng([0, 1])).prompts
        return [strategy.next_draws(PromptProgress(prompt, 0, 0, 0)) for prompt in chosen]

    # 18 draws; sqrt(p (1 - p)) is 0.5 and 0.3, so n - 1 are 10 and 6.
    assert draws(0.5, 0.1) == [11, 7]
    # 0.5 and 0.0316 would be 15.05 and 0.95: at most 16, at least 2.
    assert draws(0.5, 0.001) == [16, 2]
    assert strategy.next_draws(PromptProgress(prompts[0], 1, 11, 3)) == 0
    (pool,) = run_strategy(CollectionConfig(strategy=f"{RIVALS}/vip.py:vip"), np.tile([1.0, 0.0], (1, 16)))
    # 1 - 0 and 0 - 1, the reward of the other one, halved.
    assert make_group(pool, strategy).advantages.tolist() == [0.5, -0.5]


def test_vip_predicts_by_likeness():
    prompts = words_of([0, 0, 0], [0, 0, 1], [2, 2, 2])
    selection = load(RIVALS / "vip.py").VIP(prompts, CollectionConfig())
    assert selection.predict(["0", "1", "2"]).tolist() == [0.5] * 3
    selection.observe([group_of(prompts[0], [1] * 4), group_of(prompts[2], [0] * 4)])
    # The variances of the counts are 14/9, 2/9 and 2, so the mean squared distance is 68/9: that of 0, 2, 2, 18, 18,
    # 14, 14, 0, 0. Prompt 1 has the squared distances 2 and 14 from the others: their kernels are 4 exp(-d / (136/9)).
    near, far, across = 4 * np.exp(-2 * 9 / 136), 4 * np.exp(-14 * 9 / 136), 4 * np.exp(-18 * 9 / 136)
    # Logits +-log(4.5 / 0.5), of noise 1/4.5 + 1/0.5 = 20/9. By symmetry the two weights are opposite numbers.
    weight = np.log(9) / (4 + 20 / 9 - across)
    expected = 1 / (1 + np.exp(-weight * np.array([4 - across, near - far, across - 4])))
    assert resumed(selection, prompts).predict(["0", "1", "2"]) == pytest.approx(expected)


# ---- aero.py ---------------------------------------------------------------------------------------------------------


def test_aero():
    """Wrong groups get more draws, some wrong responses are left out, and a prior gives equal rewards advantages."""
    config = CollectionConfig(strategy=f"{RIVALS}/aero.py:aero", samples_per_round=4, max_rounds=2)
    strategy = load(RIVALS / "aero.py").aero(config)
    rewards = np.zeros((5, 8))
    for row, right in enumerate(([0], [5], [], [1, 3], range(8))):
        rewards[row, list(right)] = 1.0
    groups = [make_group(pool, strategy) for pool in run_strategy(config, rewards)]
    # All wrong: two more at a time, until one is correct.
    assert [len(group.pool.responses) for group in groups] == [4, 6, 8, 4, 4]
    # The prior has one correct and one wrong draw, as the estimate is 1/2. 1 of 4: p = 2/6, deviation sqrt(2)/3. One of
    # three wrong responses is a row.
    assert groups[0].kept.tolist() == [0, 1]
    assert groups[0].advantages == pytest.approx([2**0.5 / 2, -(2**0.5) / 4])
    # 1 of 6: p = 2/8, deviation sqrt(3)/4.
    assert groups[1].kept.tolist() == [0, 5]
    assert groups[1].advantages == pytest.approx([-(3**-0.5) / 2, 3**0.5 / 2])
    # Groups that are all alike have advantages: p = 1/10, deviation 3/10; p = 5/6, deviation sqrt(5)/6.
    assert groups[2].advantages == pytest.approx([-1 / 3 / 8] * 8)
    assert groups[4].advantages == pytest.approx([5**-0.5 / 4] * 4)
    # Half are correct: all are rows.
    assert groups[3].advantages.tolist() == [-0.25, 0.25, -0.25, 0.25]
    # An estimate of 1/4, from earlier iterations: (2/4 + 0) / (2 + 8) = 1/20.
    pool = dataclasses.replace(groups[2].pool, estimate=0.25)
    assert make_group(pool, strategy).advantages == pytest.approx([-0.05 / (0.05 * 0.95) ** 0.5 / 8] * 8)


# ---- pcl.py ----------------------------------------------------------------------------------------------------------


def test_pcl():
    """A model of prompts learns from verdicts, and the prompt nearest to 1/2 is chosen."""
    prompts = words_of([0, 0], [1], [2], [0], [1, 1], [2, 2])
    selection = load(RIVALS / "pcl.py").PCL(prompts, CollectionConfig())
    # V is 1/2. Features are unit vectors, so the step is 4 * (2 * 1/2 * 1/4) / 2 = 1/2, up and down.
    observed = selection.observe([group_of(prompts[0], [1, 1]), group_of(prompts[1], [0, 0])])
    assert observed == {"selection/value_error": 0.5}
    assert selection.to_json() == {"weights": [0.5, -0.5, 0.0]}
    other = resumed(selection, prompts)
    assert other.values(np.arange(4)) == pytest.approx([0.62246, 0.37754, 0.5, 0.62246], abs=1e-5)
    # Of the first four of a random order, the nearest to 1/2.
    assert ids(other.choose(1, ScriptedRng([0, 1, 2, 3, 4, 5])).prompts) == ["2"]
    assert ids(other.choose(1, ScriptedRng([1, 0, 3, 4, 2, 5])).prompts) == ["1"]


# ---- training --------------------------------------------------------------------------------------------------------

TRAINED = {
    "sgpo": {"strategy": "sgpo.py:sgpo", "selection": "sgpo.py:EasyToHard"},
    "mopps": {"strategy": "grpo", "selection": "mopps.py:MoPPS"},
    "greso": {"strategy": "dapo", "selection": "greso.py:GRESO"},
    "knapsack": {"strategy": "knapsack.py:knapsack"},
    "ar3po": {"strategy": "ar3po.py:ar3po", "selection": "ar3po.py:Reusing"},
    "vip": {"strategy": "vip.py:vip", "selection": "vip.py:VIP"},
    "aero": {"strategy": "aero.py:aero"},
    "pcl": {"strategy": "grpo", "selection": "pcl.py:PCL"},
    "pilot_commit": {"strategy": "pilot_commit.py:pilot_commit", "selection": "pilot_commit.py:Unsolved"},
}


def test_all_are_trained():
    """Each file of examples is trained here."""
    assert sorted(TRAINED) == sorted(file.stem for file in RIVALS.glob("*.py"))


# A strategy with a selection. All rules are tried above, and a run with labels of prompts; test_sharded_collection.py
# has replacement prompts.
FAST = ("sgpo",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in TRAINED]
)
def test_an_iteration_is_trained(tmp_path: pathlib.Path, name):
    rates = itertools.cycle((0.0, 0.25, 0.5, 1.0))
    lines = [problem | {"pass_rate": rate} for problem, rate in zip(cipher.problems("train")[:16], rates, strict=False)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {
        f"collection.{key}": f"{RIVALS}/{value}" if ".py" in value else value for key, value in TRAINED[name].items()
    }
    changes = {
        "iterations": 1, "data.prompts": str(tmp_path / "prompts.jsonl"), "logging.trackers": "",
        "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4, "evaluation.every": 0,
        "sampling.slots": 32,
    }  # fmt: skip
    assert train(tiny(**changes | files), tmp_path / "run").ending is Ending.FINISHED
    (line,) = writers.read_metrics(tmp_path / "run")
    assert line["collection/responses"] >= 8 and line["iteration"] == 1
