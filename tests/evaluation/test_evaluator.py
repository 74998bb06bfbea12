"""Evaluations of a run: one file each, addresses of their own, and the graders of their benchmarks."""

import collections
import concurrent.futures
import json
from unittest.mock import Mock

import numpy as np
import pytest

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.evaluation import evaluator, fixed_draws
from reinforce_ada_jax.evaluation.response_store import GradedResponse
from reinforce_ada_jax.rewards import cipher
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.run import Run, TrainingStopped
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Prompt, Verdict
from tests.running import cipher_file, tiny


def test_other_benchmarks_stay_in_the_file(tmp_path):
    file = evaluator.results_file(tmp_path, 7)
    assert file == tmp_path / "evaluations" / "000007.json"
    first = {"evaluation/a/avg": 0.1, "evaluation/a/pass_at_16": 0.9, "evaluation/b/avg": 0.2}
    evaluator.save_results(file, {"iteration": 7}, first)
    # With fewer samples there is no pass@16 any more: the old one must not stay with the new average.
    evaluator.save_results(file, {"iteration": 7}, {"evaluation/a/avg": 0.3})
    assert json.loads(file.read_text()) == {"iteration": 7, "evaluation/b/avg": 0.2, "evaluation/a/avg": 0.3}
    assert list(file.parent.iterdir()) == [file]


def test_evaluations_that_end_together_keep_each_others_results(tmp_path):
    file, metrics = evaluator.results_file(tmp_path, 7), [f"evaluation/set{number}/avg" for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(len(metrics)) as threads:
        list(threads.map(lambda metric: evaluator.save_results(file, {"iteration": 7}, {metric: 0.5}), metrics))
    assert json.loads(file.read_text()) == {"iteration": 7, **dict.fromkeys(metrics, 0.5)}
    assert list(file.parent.iterdir()) == [file]


def test_an_evaluation_is_done_when_its_file_has_every_benchmark(tmp_path):
    run, made = Mock(spec=Run, workdir=tmp_path), evaluator.Evaluator({"heldout": [], "math500": []})
    assert not made.is_done(run, 0)
    file = evaluator.results_file(tmp_path, 0)
    evaluator.save_results(file, {"iteration": 0}, {"evaluation/heldout/avg": 0.5})
    assert not made.is_done(run, 0), "one of them is missing"
    evaluator.save_results(file, {"iteration": 0}, {"evaluation/math500/avg": 0.25})
    assert made.is_done(run, 0) and not made.is_done(run, 1)
    file.write_text("")
    with pytest.raises(ValueError, match=r"000000\.json is not JSON .*Remove it, then run the same command\."):
        made.is_done(run, 0)


def test_a_benchmark_whose_problems_were_replaced_is_said(tmp_path):
    def problems(**texts):
        prompts = {name: [Prompt("1", text, "2", np.array([1], np.int32))] for name, text in texts.items()}
        return evaluator.hashes(prompts)

    first = problems(a="1 + 1?", b="2 + 2?")
    assert evaluator.other_problems(tmp_path, 0, first) == ""
    evaluator.save_results(evaluator.results_file(tmp_path, 3), {"iteration": 3}, {"evaluation/a/avg": 0.5} | first)
    later = evaluator.results_file(tmp_path, 9)  # of a run that was longer before it was resumed
    evaluator.save_results(later, {"iteration": 9}, {"evaluation/a/avg": 0.5} | problems(a="5 + 5?"))
    assert evaluator.other_problems(tmp_path, 6, first | problems(c="new")) == ""
    said = evaluator.other_problems(tmp_path, 6, problems(a="1 + 1?", b="2 + 3?"))
    assert said.startswith("warning: b had other problems after iteration 3,")
    evaluator.results_file(tmp_path, 3).write_bytes(b"\x80")
    assert evaluator.other_problems(tmp_path, 6, first) == "", "nothing is known, and the run goes on"


@pytest.fixture(scope="module")
def components() -> Components:
    """Those of the built-in task."""
    return components_lib.build(tiny(), components_lib.model_folder("package:cipher"))


def test_benchmarks_of_one_name_are_refused(components, tmp_path):
    files = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        files.append(cipher_file(tmp_path / folder / "aime.jsonl", 2))
    with pytest.raises(ValueError, match="two benchmarks are called 'aime': rename"):
        evaluator.load_benchmarks(components, tiny(**{"evaluation.benchmarks": tuple(files)}))
    found = evaluator.load_benchmarks(components, tiny(**{"evaluation.benchmarks": (files[0], "cipher:heldout")}))
    assert list(found) == ["aime", "heldout"] and len(found["aime"]) == 2


def test_benchmarks_with_equal_ids_are_drawn_independently(components, monkeypatch, tmp_path):
    def from_policy(params, rollouts, settings, stream, config, components, verify_fn):
        def draw(prompts, **_):
            for prompt in prompts:
                addresses[stream, prompt.id] += 1
            return {prompt.id: [GradedResponse(1, False, Verdict(False, 0.0))] for prompt in prompts}

        return draw

    monkeypatch.setattr(fixed_draws, "from_policy", from_policy)
    ids = {"alone": "ab", "second": "ac", "third": "c", "apart": "d"}
    benchmarks = {
        name: [Prompt(each, "", "", np.zeros(1, np.int32)) for each in letters] for name, letters in ids.items()
    }
    addresses, config = collections.Counter(), tiny(**{"evaluation.samples": 1, "evaluation.benchmarks": tuple(ids)})
    rollouts = Mock(spec=Rollouts)
    verifiers = VerifierPool(cipher.grade, workers=0, time_limit_s=1.0)
    run = Mock(spec=Run, components=components, config=config, workdir=tmp_path, rollouts=rollouts, verifiers=verifiers)
    run.policy = lambda state: {}
    for iteration in range(3):
        evaluator.Evaluator(benchmarks)(run, Mock(spec=RunState, iteration=iteration))
    # Every problem of every benchmark and iteration has an address of its own, and none is one of training.
    assert len(addresses) == 3 * 6 and addresses.total() == 3 * 6
    assert all(0 <= stream < 2**32 and stream % 2 == 1 for stream, _ in addresses)
    # Those that meet no id of an earlier benchmark keep theirs.
    assert {(1, "a"), (1, "b"), (1, "d"), (3, "a"), (5, "d")} <= set(addresses)


def test_a_damaged_file_of_the_same_iteration_ends_the_run_with_the_remedy(components, tmp_path):
    file = evaluator.results_file(tmp_path, 2)
    file.parent.mkdir()
    file.write_text("{")
    verifiers = VerifierPool(cipher.grade, workers=0, time_limit_s=1.0)
    run = Mock(spec=Run, components=components, config=tiny(), workdir=tmp_path, rollouts=Mock(spec=Rollouts))
    run.verifiers, run.policy = verifiers, lambda state: {}
    with pytest.raises(TrainingStopped, match=r"000002\.json is not JSON .*Remove it, then run the same command\."):
        evaluator.Evaluator({})(run, Mock(spec=RunState, iteration=2))


def test_benchmarks_with_a_rule_of_their_own_are_graded_by_it(components, monkeypatch):
    def verify_fn(self, verifiers, shaping, grader):
        return lambda pairs: (shaping.overlong_tokens, grader)

    monkeypatch.setattr(Components, "verify_fn", verify_fn)
    benchmarks = ("data/gsm8k_test.jsonl", "math500.jsonl")
    config = tiny(**{"evaluation.benchmarks": benchmarks, "reward.kind": "math", "reward.workers": 0})
    with components_lib.verifier_pool(config) as verifiers:
        functions = evaluator.verify_fns(components, verifiers, config)
        assert {name: function([]) for name, function in functions.items()} == {
            "gsm8k_test": (0, "gsm8k"),
            "math500": (0, ""),
        }
        # The pool has the graders that are named so, and a pair goes to the one that its benchmark has.
        pairs = [("The total is 1,200 apples.", "1200")]
        assert [verifiers.grade_all(pairs, grader)[0].correct for grader in ("gsm8k", "")] == [True, False]


def test_a_grader_that_names_no_benchmark_is_told():
    # Those of config.py name files that needn't be there; anybody's own must.
    sources = ("data/gsm8k_test.jsonl", "math500.jsonl")
    components_lib.check_graders(Config(), sources)
    mine = tiny(**{"evaluation.graders": ("math500=gsm8k", "gsm8k_test=gsm8k")})
    components_lib.check_graders(mine, sources)
    misspelt = tiny(**{"evaluation.graders": ("gms8k_test=gsm8k",)})
    with pytest.raises(ValueError, match=r"'gms8k_test=gsm8k', but no benchmark is called .*did you mean 'gsm8k_test'"):
        components_lib.check_graders(misspelt, sources)
    with pytest.raises(ValueError, match=r"called 'gms8k_test'; there are none"):
        components_lib.check_graders(misspelt, ())
