import itertools
import json
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from reinforce_ada_jax import cli, evaluate
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.evaluation import paper_results
from reinforce_ada_jax.evaluation import scores as figures
from reinforce_ada_jax.evaluation.response_store import Graded
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.types import Verdict
from tests.running import ROOT, cipher_file, environment, killed_after, tiny


def problem(correct: str, truncated: int = 0, reasons: str = "") -> list[Graded]:
    """A problem's responses from "1001": which are correct; the first few are truncated, and have these reasons."""
    words = {"n": "no_answer", "t": "timeout", "l": "too_long"}
    padded = reasons.ljust(len(correct))
    return [
        Graded(10 * (draw + 1), draw < truncated, Verdict(digit == "1", float(digit), words.get(reason, "")))
        for draw, (digit, reason) in enumerate(zip(correct, padded, strict=True))
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_any_and_all_of_k_are_shares_of_the_draws_of_k(num_samples):
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        correct = [index < num_correct for index in range(num_samples)]
        draws = list(itertools.combinations(correct, k))
        assert figures.pass_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([any(x) for x in draws]))
        assert figures.all_correct_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([all(x) for x in draws]))


def test_statistics_by_hand():
    # One and three of four are correct: averages 1/4 and 3/4, standard deviation sqrt(1/8), error sqrt(1/8 / 2) = 1/4.
    # Of the six pairs three hold the one correct response, and all six one of the three: (1/2 + 1) / 2 = 3/4. No pair
    # is correct in the first, and three of six in the second: 1/4.
    assert evaluate.statistics([problem("0100", truncated=3, reasons="nnlt"), problem("1101", reasons="n")]) == {
        "problems": 2,
        "avg": 0.5,
        "avg_standard_error": pytest.approx(0.25),
        "pass_at_1": 0.5,
        "pass_at_2": 0.75,
        "pass_at_4": 1.0,
        "all_correct_at_1": 0.5,
        "all_correct_at_2": 0.25,
        "all_correct_at_4": 0.0,
        "truncated_share": 3 / 8,
        "no_answer_share": 3 / 8,
        "failure_share": 1 / 8,
        "tokens_mean": 25.0,
    }


def test_one_problem_has_no_error_and_the_samples_are_a_k_too():
    result = evaluate.statistics([problem("010100")])
    assert result["avg_standard_error"] == 0.0
    assert [key for key in result if key.startswith("pass")] == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]


def test_averages_by_label():
    labels = {
        "a": {"level": "5", "source": "x"},
        "b": {"level": "2", "source": "x"},
        "c": {"level": "5", "source": "x"},
        "d": {},
    }
    drawn = {name: problem(correct) for name, correct in zip("abcd", ["01", "11", "00", "11"], strict=True)}
    # A single source says nothing, and 17 values of a label are no table.
    assert figures.by_label(labels, drawn) == {"level": {"2": (1, 1.0), "5": (2, 0.25)}}
    many = {str(number): {"type": str(number)} for number in range(17)}
    assert figures.by_label(many, {name: problem("1") for name in many}) == {}


def test_the_weighted_average():
    # (3 * 0.5 + 1 * 0.1) / 4 = 0.4; the error sqrt((3 * 0.1)^2 + (1 * 0.4)^2) / 4 = 0.125.
    results = {
        "a": {"problems": 3, "avg": 0.5, "avg_standard_error": 0.1},
        "b": {"problems": 1, "avg": 0.1, "avg_standard_error": 0.4},
    }
    assert figures.weighted(results) == (4, pytest.approx(0.4), pytest.approx(0.125))


def test_table():
    results = {
        "heldout": evaluate.statistics([problem("0100"), problem("1101")]),
        "b": evaluate.statistics([problem("1111", truncated=2, reasons="nt")]),
    }
    labelled = {"b": {"level": {"2": (1, 1.0)}}}
    shown = figures.table(results, samples=4, temperature=1.0, max_response_tokens=8, labelled=labelled)
    assert shown.splitlines() == [
        "| benchmark        | problems |         avg@4 | pass@4 | all@4 | truncated | no answer | failed | tokens |",
        "| ---------------- | -------: | ------------: | -----: | ----: | --------: | --------: | -----: | -----: |",
        "| heldout          |        2 | 0.500 ± 0.250 |  1.000 | 0.000 |     0.000 |     0.000 |  0.000 |     25 |",
        "| b                |        1 | 1.000 ± 0.000 |  1.000 | 1.000 |     0.500 |     0.250 |  0.250 |     25 |",
        "| weighted average |        3 | 0.667 ± 0.167 |        |       |           |           |        |        |",
        "",
        "| k               |     1 |     2 |     4 |",
        "| --------------- | ----: | ----: | ----: |",
        "| heldout, pass@k | 0.500 | 0.750 | 1.000 |",
        "| heldout, all@k  | 0.500 | 0.250 | 0.000 |",
        "| b, pass@k       | 1.000 | 1.000 | 1.000 |",
        "| b, all@k        | 1.000 | 1.000 | 1.000 |",
        "",
        "| b, level | problems |   avg |",
        "| -------- | -------: | ----: |",
        "| 2        |        1 | 1.000 |",
    ]


def test_a_bar_in_a_label_does_not_end_its_cell():
    assert figures.markdown(["x", "n"], [["|a|", "1"]]).splitlines()[2] == r"| \|a\| | 1 |"


# ---- published figures -----------------------------------------------------------------------------------------------


def test_published_averages_are_those_of_their_columns():
    # A slip in a digit would show: each average is that of four rounded figures weighted by problems, up to 0.16. Of
    # three rows the paper's own averages are farther off.
    tables = {"easy": paper_results._FIGURES, "hard": paper_results._ON_HARD_PROMPTS}
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


def full_size(**problems: int) -> dict[str, dict[str, float]]:
    """Statistics of benchmarks with so many problems."""
    return {name: evaluate.statistics([problem("10")]) | {"problems": count} for name, count in problems.items()}


def test_published_figures_stand_beside_those_that_they_can_be_compared_with():
    rows = paper_results.rows("Qwen2.5-Math-1.5B", "balance", 4)
    assert [row.name for row in rows] == ["published", "published, hard prompts"]
    settings = {"samples": 2, "temperature": 1.0, "max_response_tokens": 4096, "rows": rows}
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like_160=160, gsm8k_test=1319)
    lines = figures.table(results, **settings).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[4:6]] for line in lines[2:8]}
    assert cells == {
        "math500": ["0.774", "0.747"],
        "minerva_math": ["0.365", "0.337"],
        "olympiadbench": ["0.405", "0.387"],
        "aime_like_160": ["(0.175)", "(0.176)"],
        "gsm8k_test": ["", ""],
        "weighted average": ["", ""],  # of five sets
    }
    assert "- (0.175) is of 230 problems, here are 160: not comparable." in lines
    assert (
        "- The published figures are avg@32 at temperature 1 and 4,096 tokens, these avg@2 at temperature 1 and 4,096 "
        "tokens: not comparable."
    ) in lines
    del results["gsm8k_test"]
    lines = figures.table(results, **settings).splitlines()
    assert "| 0.500 ± 0.000 |   (0.476) |" in lines[6]
    assert "- (0.476) is of 1,677 problems, here are 1,607: not comparable." in lines
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like=230)
    shown = figures.table(results, **settings | {"rows": rows[:1]})
    assert "|     0.476 |" in shown.splitlines()[6] and "is of" not in shown


def test_what_was_not_published_has_no_row():
    assert paper_results.rows("Qwen2.5-Math-1.5B", "ngu", 4) == paper_results.rows("cipher", "balance", 4) == []
    (row,) = paper_results.rows("Qwen2.5-Math-1.5B", "grpo", 16)
    assert row.figures["math500"] == pytest.approx(0.769)


def test_a_run_stands_beside_what_it_was_trained_as(tmp_path):
    assert evaluate.published_rows(tmp_path) == []
    changes = {"model.path": "models/Qwen2.5-Math-7B", "collection.strategy": "estimate"}
    (tmp_path / "config.json").write_text(config_lib.to_json(tiny(**changes)))
    assert evaluate.published_rows(tmp_path) == paper_results.rows("Qwen2.5-Math-7B", "estimate", 4) != []


# ---- parts of the command --------------------------------------------------------------------------------------------


def test_other_benchmarks_stay_in_the_file(tmp_path):
    evaluate.save(tmp_path, 7, {"evaluation/a/avg": 0.1, "evaluation/a/pass_at_16": 0.9, "evaluation/b/avg": 0.2})
    # With fewer samples there is no pass@16 any more: the old one must not stand beside the new average.
    file = evaluate.save(tmp_path, 7, {"evaluation/a/avg": 0.3})
    assert file == tmp_path / "evaluations" / "000007.json"
    assert json.loads(file.read_text()) == {"iteration": 7, "evaluation/b/avg": 0.2, "evaluation/a/avg": 0.3}
    assert list(file.parent.iterdir()) == [file]


def test_benchmarks_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(Components, "prompts", lambda self, source, config: [])
    config = tiny(**{"evaluation.benchmarks": ("x/aime.jsonl", "y/aime.jsonl")})
    with pytest.raises(ValueError, match="two benchmarks are called 'aime': rename"):
        evaluate.load_benchmarks(object.__new__(Components), config)
    config = tiny(**{"evaluation.benchmarks": ("x/aime.jsonl", "cipher:heldout")})
    assert list(evaluate.load_benchmarks(object.__new__(Components), config)) == ["aime", "heldout"]


def test_benchmarks_with_a_rule_of_their_own_are_graded_by_it():
    config = tiny(**{"evaluation.benchmarks": ("data/gsm8k_test.jsonl", "math500.jsonl")})
    components = types.SimpleNamespace(verify_fn=lambda verifiers, shaping, grader: (shaping.overlong_tokens, grader))
    assert evaluate.verify_fns(components, None, config) == {"gsm8k_test": (0, "gsm8k"), "math500": (0, "")}
    # The pool has the graders that are named so, and a pair goes to the one that its benchmark has.
    config.reward.kind, config.reward.workers = "math", 0
    with components_lib.verifier_pool(config) as verifiers:
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


# ---- the whole command -----------------------------------------------------------------------------------------------

MODEL = "package:cipher"


def run(benchmark, output, *, samples=2, again=False, **changes):
    evaluate.main(tiny(**changes), None, MODEL, [benchmark], samples, str(output), again)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(output, more flags) -> the running command, on 192 problems with 4 slots: kills are in time."""
    folder = tmp_path_factory.mktemp("shared")
    benchmark = cipher_file(folder / "words.jsonl", 192)
    flags = ["--config=configs/tiny.py", f"--model={MODEL}", f"--benchmarks={benchmark}", "--samples=8"]
    flags += ["--config.sampling.slots=4", "--config.sampling.window=4"]

    def start(output, *more):
        return subprocess.Popen(
            [sys.executable, "-m", "reinforce_ada_jax.evaluate", *flags, f"--output={output}", *more],
            cwd=ROOT, text=True, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def test_killed_twice_it_ends_with_the_same_table(start, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole))
    stored = broken / "words.jsonl"
    killed_after(start(broken), stored, 100)
    first = stored.read_bytes().count(b"\n")
    process = start(broken)
    err = killed_after(process, stored, first + 200, signal.SIGINT)
    assert process.returncode == cli.INTERRUPTED and "Traceback" not in err
    last = err.splitlines()[-1]
    assert last == "error: interrupted. What is graded is kept; the same command again goes on from there."
    assert 300 <= stored.read_bytes().count(b"\n") < 192 * 8
    with stored.open("ab") as file:
        file.write(b'{"prompt": "heldout-0191", "dr')  # as a kill in the middle of a line leaves it
    out = finish(start(broken))
    assert "of them stored)" in out
    for name in ("table.md", "results.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(stored.read_bytes().splitlines()) == sorted((whole / "words.jsonl").read_bytes().splitlines())


REWARD = """
import time

def grade(response, answer):
    if answer == "raises":
        raise RuntimeError(response)
    if answer == "hangs":
        time.sleep(1000)
    return {"not a number": float("nan"), "fine": 1.0}[answer]
"""


def four_answers(file):
    """A benchmark of four problems whose answers say what the reward function above does."""
    answers = ("raises", "not a number", "hangs", "fine")
    problems = zip(cipher.problems("heldout"), answers, strict=False)
    lines = [json.dumps(problem | {"answer": answer, "level": len(answer)}) for problem, answer in problems]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def none_needed(*arguments):
    raise AssertionError("neither model nor engine is needed")


def test_rewards_that_fail_are_counted_and_can_be_graded_again(tmp_path, monkeypatch, capsys):
    reward, output = tmp_path / "mine.py", tmp_path / "out"
    reward.write_text(REWARD)
    benchmark = four_answers(tmp_path / "four.jsonl")
    changes = {"reward.path": f"{reward}:grade", "reward.workers": 2, "reward.time_limit_s": 0.5}
    run(benchmark, output, **changes)
    rows = [json.loads(line) for line in (output / "four.jsonl").read_text("utf-8").splitlines()]
    reasons = {(row["prompt"][-1], row["reason"], row["correct"]) for row in rows}
    assert len(rows) == 8
    assert reasons == {("0", "error", False), ("1", "error", False), ("2", "timeout", False), ("3", "", True)}
    results = json.loads((output / "results.json").read_text())
    assert results["evaluation/four/avg"] == 0.25 and results["evaluation/four/failure_share"] == 0.75
    shown = capsys.readouterr().out
    assert "| four, level | problems |   avg |" in shown and "| 4           |        1 | 1.000 |" in shown

    # Once more there is nothing to draw, and no weight is read.
    before = (output / "table.md").read_text("utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(evaluate.huggingface, "load", none_needed)
        run(benchmark, output, **changes)
    assert before in capsys.readouterr().out and before == (output / "table.md").read_text("utf-8")

    # The function is mended: what is stored isn't its verdict any more.
    reward.write_text("def grade(response, answer): return answer != 'fine'")
    with pytest.raises(SystemExit, match=str(cli.BAD_INPUT)):
        run(benchmark, output, **changes)
    message = capsys.readouterr().err
    assert "graded otherwise" in message and "file: " in message and "--regrade" in message

    for place, name in ((components_lib, "build"), (evaluate.huggingface, "load"), (evaluate, "Rollouts")):
        monkeypatch.setattr(place, name, none_needed)
    run(benchmark, output, again=True, **changes)
    assert "| four      |        4 | 0.750 ± 0.250 |" in capsys.readouterr().out
    now = [json.loads(line) for line in (output / "four.jsonl").read_text("utf-8").splitlines()]
    assert [row["response"] for row in now] == [row["response"] for row in rows]
    assert [row["correct"] for row in now] == [row["prompt"][-1] != "3" for row in now]
    assert json.loads((output / "results.json").read_text())["evaluation/four/failure_share"] == 0.0

    # Half of it: no table of that.
    (output / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in now[:5]))
    with pytest.raises(SystemExit, match=str(cli.STOPPED)):
        run(benchmark, output, again=True, **changes)
    assert "(four 2 of 4): the same command without --regrade draws the others" in capsys.readouterr().err


def refusal(capsys, *arguments, **options) -> str:
    """What the command says that ends for the user's fault."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments, **options)
    assert ended.value.code == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) < 15 and "Traceback" not in err
    return err


def bad_files(folder):
    good = cipher.problems("heldout")[0]
    contents = {
        "malformed": [json.dumps(good), "{"],
        "twice": [json.dumps(good), json.dumps(good)],
        "unanswered": [json.dumps({"id": "a", "problem": "А="})],
        "empty": [],
        "long": [json.dumps(good | {"problem": "А" * 30})],
    }
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("malformed", "malformed.jsonl, line 2: not valid JSON"),
        ("twice", "twice.jsonl, lines 1 and 2: both have id 'heldout-0000'"),
        ("unanswered", "unanswered.jsonl, line 1: no 'answer' among"),
        ("empty", "empty.jsonl is empty"),
        ("long", "1 prompts have 31 to 31 tokens, limit 8: raise data.max_prompt_tokens"),
    ],
)
def test_benchmarks_that_cannot_be_read(tmp_path, capsys, name, message):
    bad_files(tmp_path)
    assert message in refusal(capsys, str(tmp_path / f"{name}.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_else_is_refused(tmp_path, capsys):
    benchmark, output = cipher_file(tmp_path / "words.jsonl", 2), tmp_path / "out"
    unknown = refusal(capsys, benchmark, output, **{"data.template": "fancy"})
    assert "data.template is 'fancy'; it must be one of plain, qwen_math, chat" in unknown
    misspelt = refusal(capsys, benchmark, output, **{"evaluation.graders": ("wrods=math",)})
    assert "no benchmark is called 'wrods': did you mean 'words'?" in misspelt
    nothing = refusal(capsys, benchmark, output, again=True)
    assert f"there are no stored responses {output / 'words.jsonl'}: evaluate without --regrade first" in nothing
    folder = shutil.copytree(components_lib.ASSETS / "cipher", tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"]["€"] = 133
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(SystemExit, match=str(cli.BAD_INPUT)):
        evaluate.main(tiny(), None, str(folder), [benchmark], 1, str(output))
    assert "has 134 tokens, the model's embedding only 133 rows" in capsys.readouterr().err
    assert not output.exists()


def test_a_graders_entry_of_a_benchmark_that_is_not_evaluated_now_is_fine(tmp_path):
    config = tiny(**{"evaluation.graders": ("heldout=gsm8k", "words=cipher")})
    evaluate._choose(config, [str(tmp_path / "words.jsonl")], 3)
    assert config.evaluation.graders == ("words=cipher",) and config.evaluation.samples == 3


def test_a_run_is_evaluated_with_its_own_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text(config_lib.to_json(tiny()))

    def said(again=False, **changes):
        with pytest.raises(SystemExit, match=str(cli.BAD_INPUT)):
            evaluate.main(tiny(**changes), str(tmp_path), None, [], None, None, again)
        return capsys.readouterr().err

    different = said(**{"seed": 1, "data.template": "chat", "reward.kind": "math", "mesh.data": 2, "model.path": "x"})
    assert "holds a run of another configuration (saved -> now):\n" in different
    assert [line.strip() for line in different.splitlines()[1:-1]] == [
        "data.template: plain -> chat",
        "model.path: package:cipher -> x",
        "reward.kind: cipher -> math",
        "seed: 0 -> 1",
    ]
    # Slots, mesh and whatever else only decides how fast: the next thing that is wrong is that nothing was saved.
    free = {"mesh.data": 2, "sampling.slots": 3, "learning.learning_rate": 1.0, "evaluation.temperature": 0.5}
    assert "holds no checkpoint" in said(**free)
    # Another reward is what --regrade is for.
    assert "holds no stored responses" in said(again=True, **{"reward.kind": "math"})
