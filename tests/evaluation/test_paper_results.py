"""The paper's results: averages of columns, and the row that a run with the same settings is compared with."""

import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import values
from reinforce_ada_jax.evaluation import paper_results
from reinforce_ada_jax.training import components as components_lib
from tests.running import CONFIGS, load, tiny


def test_weighted_averages_are_those_of_their_columns():
    # A slip in a digit would show: each average is that of four rounded averages weighted by problems, up to 0.16. Of
    # three rows the paper's own averages are farther off.
    tables = {"easy": paper_results.AVERAGES, "hard": paper_results.ON_HARD_PROMPTS}
    assert [len(rows) for rows in tables.values()] == [17, 6]
    off = {
        (name, *key): round(float(np.average(columns, weights=list(paper_results.SETS.values())) - average), 2)
        for name, rows in tables.items()
        for key, (*columns, average) in rows.items()
    }
    assert {key: value for key, value in off.items() if abs(value) > 0.16} == {
        ("easy", "Qwen2.5-Math-7B", "positive", 4): -0.18,
        ("hard", "Qwen2.5-Math-1.5B", "positive", 4): -0.3,
        ("hard", "Qwen2.5-Math-1.5B", "balance", 4): 0.23,
    }


def published(name="qwen_1p5b", **changes):
    """A configuration of configs/, which trains as the published run did, with changes."""
    return config_lib.replaced(config_lib.resolve(load(CONFIGS / f"{name}.py").get_config()), changes)


EASY = {"data.prompts": "hf:RLHFlow/reinforce_ada_simple_prompt_1-5b"}
GRPO = {"collection.strategy": "grpo"}
ESTIMATE = {"collection.strategy": "estimate", "collection.objective": "log"}


@pytest.mark.parametrize(
    ("name", "changes", "row", "math500"),
    [
        ("qwen_1p5b", {}, "paper, hard prompts", 0.747),
        ("qwen_1p5b", EASY, "paper", 0.774),
        ("qwen_1p5b", {"data.prompts": EASY["data.prompts"] + ":train"}, "paper", 0.774),
        ("qwen_1p5b", EASY | GRPO | {"collection.group_size": 16}, "paper", 0.769),
        ("qwen_1p5b", EASY | ESTIMATE, "paper", 0.761),
        ("qwen_7b", {}, "paper, hard prompts", 0.831),
        ("qwen_7b", {"collection.strategy": "positive"}, "paper, hard prompts", 0.824),
        # The main table's runs of these two are on hard prompts.
        ("llama_3b", {}, "paper", 0.532),
        ("qwen3_4b", {}, "paper", 0.917),
    ],
)
def test_a_published_run_has_its_row(name, changes, row, math500):
    found = paper_results.comparison(published(name, **changes))
    assert (found.name, found.averages["math500"], found.differences) == (row, pytest.approx(math500), ())


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"collection.objective": "log"}, "collection.objective is 'log', the paper's 'identity'"),
        ({"collection.correction": "stratified"}, "collection.correction is 'stratified', the paper's 'none'"),
        ({"collection.samples_per_round": 4}, "collection.samples_per_round is 4, the paper's 8"),
        ({"collection.k_pos": 1}, "collection.k_pos is 1, the paper's 2"),
        ({"collection.keep": "pool"}, "collection.keep is 'pool', the paper's 'group'"),
        ({"collection.baseline": "leave_one_out"}, "collection.baseline is 'leave_one_out', the paper's 'pool'"),
        ({"data.prompts": "prompts.jsonl"}, "data.prompts is 'prompts.jsonl', the paper's 'hf:RLHFlow/"),
        ({"reward.kind": "math"}, "reward.kind is 'math', the paper's 'reference'"),
        ({"lora.rank": 32}, "lora.rank is 32, the paper's 0"),
        (EASY | ESTIMATE | {"estimator.kind": "value"}, "estimator.kind is 'value', the paper's 'ema'"),
        (EASY | ESTIMATE | {"collection.max_draws": 16}, "collection.max_draws is 16, the paper's 32"),
        (EASY | ESTIMATE | {"collection.objective": "power"}, "collection.objective is 'power', the paper's 'log'"),
    ],
)
def test_a_setting_that_differs_is_named_in_place_of_a_row(changes, difference):
    found = paper_results.comparison(published(**changes))
    assert found.averages == {}
    assert any(each.startswith(difference) for each in found.differences), found.differences


def test_a_run_that_the_paper_lacks_has_neither(tmp_path):
    for config in (tiny(), published(**{"collection.strategy": "ngu"}), published(**{"collection.group_size": 8})):
        assert paper_results.comparison(config) == paper_results.Comparison()
    assert paper_results.comparison_of_run(tmp_path) == paper_results.Comparison()


def test_the_configuration_of_a_run_decides(tmp_path):
    (tmp_path / "config.json").write_text(config_lib.to_json(published("qwen_7b")))
    assert paper_results.comparison_of_run(tmp_path) == paper_results.comparison(published("qwen_7b"))


def test_published_configurations_evaluate_as_the_paper_does():
    for name in ("qwen_1p5b", "qwen_7b", "qwen3_4b", "llama_3b"):
        config = published(name)
        evaluation = config.evaluation
        assert (evaluation.every, evaluation.samples, evaluation.temperature) == (50, 32, 1.0)
        assert (evaluation.max_response_tokens, evaluation.top_k, evaluation.top_p) == (4096, 0, 1.0)
        # Each of the four sets is found by its name, with its grader; together they give the weighted average.
        graders = components_lib.benchmark_graders(config)
        columns = {paper_results.column(benchmark): grader for benchmark, grader in graders.items()}
        assert columns == paper_results.GRADERS and len(graders) == 4
        assert config.learning.weight_decay == 0.0 and config.learning.warmup_updates == 10


def test_columns():
    """A benchmark's name finds its column of the paper."""
    assert paper_results.column("weqweasdas_aime_hmmt_brumo_cmimc_amc23") == "aime_like"
    assert paper_results.column("aime_like_160") == paper_results.column("aime_like") == "aime_like"
    assert paper_results.column("weqweasdas_minerva_math") == paper_results.column("minerva_math") == "minerva_math"
    assert paper_results.column("aime24") is None


def test_every_kind_of_reward_has_a_grader():
    # Programs and a judge: tests/rewards. Any other kind grades this response; these find it right, or wrong.
    mathematics = ("math", "minerva", "gsm8k", "reference", "reference_evaluation", "reference_minerva")
    expected = dict.fromkeys(mathematics, True) | {"cipher": False}
    for kind in set(values.REWARDS) - {"code", "judge"}:
        config = tiny(**{"reward.kind": kind, "reward.workers": 0})
        with components_lib.verifier_pool(config) as verifiers:
            (verdict,) = verifiers.grade_all([(r"so it is \boxed{5}", "5")])
        assert verdict.reason not in ("error", "crash") and verdict.correct == expected.get(kind, verdict.correct)
