"""The documents say what is so: commands and examples run, tables hold the defaults, links lead somewhere."""

import ast
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import pathlib
import re
import shlex
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from bench import predictions, selection_studies
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.analysis.enumeration import expectations
from reinforce_ada_jax.analysis.inputs import strategy_settings
from reinforce_ada_jax.collection import selection, strategies
from reinforce_ada_jax.collection.advantages import Group, make_group
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.config import CollectionConfig, aliases, collection_rules
from reinforce_ada_jax.data.prompts import load_problems
from reinforce_ada_jax.evaluation import scores
from reinforce_ada_jax.evaluation.response_store import GradedResponse
from reinforce_ada_jax.learning import token_losses
from reinforce_ada_jax.learning.learner import loss_config
from reinforce_ada_jax.learning.update import UpdateMetrics
from reinforce_ada_jax.types import FAILURES, Pool, Prompt, Verdict
from tests import running
from tests.launch.cloud import Cloud, check, git, make_checkout
from tests.running import ROOT, run_python
from tests.test_layers import LAYERS

DOCS = ROOT / "docs"
PACKAGE = pathlib.Path(config_lib.__file__).parents[1]


def code_block(document: str, containing: str) -> str:
    """The one Python block of a document that has `containing` in it."""
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
        if containing in block
    ]
    return block


def table_below(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table below `heading`, header and ruler left out."""
    lines = (DOCS / document).read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return table[2:]


# ---- docs/strategies.md ----------------------------------------------------------------------------------------------


def test_the_strategy_of_ones_own(tmp_path):
    file = tmp_path / "my_strategy.py"
    file.write_text(code_block("strategies.md", "def triple"))
    config = SimpleNamespace(strategy=f"{file}:triple", group_size=2, samples_per_round=8, max_rounds=4)
    # Rounds of 2 and 6. Right at once; right in the second; never; both right.
    rewards = np.array([[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0], [0] * 8, [1] * 8])
    pools = run_strategy(config, rewards)
    assert [len(pool.responses) for pool in pools] == [2, 8, 8, 2]
    assert [pool.met for pool in pools] == [True, True, False, True]
    groups = [make_group(pool, strategies.build(config)) for pool in pools]
    assert [group.kept.tolist() for group in groups] == [[0, 1], [0, 5], [0, 1], [0, 1]]
    np.testing.assert_array_equal(groups[1].advantages, [-0.25, 0.75])  # 2 of 8


def test_the_choice_of_prompts_of_ones_own(tmp_path):
    file = tmp_path / "my_selection.py"
    file.write_text(code_block("strategies.md", "class Mixed"))
    prompts = [Prompt(name, "", "", np.zeros(1, np.int32)) for name in "abcd"]
    config = CollectionConfig(selection=f"{file}:Mixed", prompts_per_iteration=2)
    verdicts = {"a": (True, True), "b": (False, True), "c": (False, False)}
    pools = [
        Pool(prompt, (), tuple(Verdict(right, float(right)) for right in verdicts[prompt.id]), 1, True)
        for prompt in prompts[:3]
    ]
    groups = [Group(pool, np.zeros(0, int), np.zeros(0)) for pool in pools]
    mixed, resumed = (selection.build(config, prompts, seed=0) for _ in range(2))
    assert mixed.observe(groups) == {"selection/known": 3}
    resumed.load_json(json.loads(json.dumps(mixed.to_json())))
    for iteration in range(8):  # d is unknown, b is mixed
        choices = [selection.choose(each, 2, seed=0, iteration=iteration).prompts for each in (mixed, resumed)]
        assert {prompt.id for prompt in choices[0]} == {"b", "d"} and choices[0] == choices[1]


def test_the_table_of_settings_has_the_defaults():
    settings = table_below("strategies.md", "## Settings")
    documented = {key.strip("`"): ast.literal_eval(default.strip("`")) for key, default, *_ in settings}
    collection = config_lib.defaults().collection.to_dict()
    # What is no strategy's: how many prompts, and how the loop over them runs.
    loop = ("prompts_per_iteration", "barrier", "deterministic", "speculative", "overlap", "max_staleness")
    for key in loop:
        del collection[key]
    assert documented == collection


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("keep", {"keep": "pool"}),
        ("unmet", {"unmet": "drop"}),
        ("objective_k", {"objective": "pass_at_k"}),
        ("correction", {"correction": "stratified"}),
    ],
)
def test_a_strategy_that_a_setting_does_not_name_refuses_it(key, changes):
    (named,) = (cell for name, _, cell, _ in table_below("strategies.md", "## Settings") if name == f"`{key}`")
    names, without = set(re.findall(r"`(\w+)`", named)), named.startswith("all but")
    accepted = set()
    for strategy in strategies.BUILT_IN:
        with contextlib.suppress(ValueError):
            collection_rules.check_collection(dataclasses.replace(CollectionConfig(), strategy=strategy, **changes))
            accepted.add(strategy)
    assert names and accepted == (set(strategies.BUILT_IN) - names if without else names)


@pytest.mark.parametrize(
    ("phrase", "changes"),
    [
        ("with overlap", {"collection.overlap": "finish"}),
        ("with `mesh.sampler` and staleness", {"mesh.sampler": 1}),
        ("in int8", {"sampling.kv_dtype": "int8"}),
    ],
)
def test_the_cap_of_importance_weights_is_set_by_what_the_table_says(phrase, changes):
    (row,) = (row for row in table_below("algorithms.md", "## The loss") if row[0] == "truncated importance weight")
    assert loss_config(running.tiny()).truncated_is_cap is None and row[3].startswith("none; 2 ")
    assert loss_config(running.tiny(**changes)).truncated_is_cap == 2.0 and phrase in row[3]


def test_the_table_of_fields_is_the_dataclass():
    documented = [
        (field.strip("`"), default.strip("`"))
        for field, default, _ in table_below("strategies.md", "## A strategy of your own")
    ]
    shown = {strategies.one: "1", strategies.always: "1", "pool": '"pool"'}
    fields = strategies.Strategy.__dataclass_fields__.values()
    expected = [
        (field.name, "" if field.default is field.default_factory else shown.get(field.default, str(field.default)))
        for field in fields
    ]
    assert documented == expected


def test_every_strategy_is_in_the_table():
    documented = table_below("strategies.md", "## Built-in strategies")
    assert [name.strip("`") for name, *_ in documented] == list(strategies.BUILT_IN)


# ---- README.md, docs/how_to/reward.md --------------------------------------------------------------------------------


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200


def test_the_reward_of_the_readme():
    names: dict = {}
    exec(code_block("../README.md", "def grade"), names)
    assert [names["grade"](text, "12") for text in ("5 + 7 = 12", "12, or 13", "no", "-12")] == [1.0, 0.5, 0.0, 0.0]


def test_the_reward_that_returns_a_verdict():
    names: dict = {}
    exec(code_block("how_to/reward.md", "def grade"), names)
    assert names["grade"]("5 + 7 = 12", "12") == Verdict(correct=True, reward=1.0)
    assert names["grade"]("5 + 7", "12") == Verdict(correct=False, reward=0.0)
    assert names["grade"]("none", "12") == Verdict(correct=False, reward=0.0, reason="no_answer")


def test_the_loss_of_ones_own(tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(code_block("how_to/loss.md", "def masked_ratio"))
    masked_ratio = token_losses.load(f"{file}:masked_ratio")
    ratios = np.array([[0.4, 1.5, 3.0]], np.float32)
    losses = masked_ratio(token_losses.LossConfig(0.2, 0.2, 10.0, "token-mean"), ratios, ratios, 2 * ratios).loss
    np.testing.assert_allclose(losses, [[0.0, -4.5, 0.0]])


def test_every_block_of_python_is_run_somewhere():
    with_blocks = {str(document.relative_to(ROOT)) for document in DOCUMENTS if "```python" in document.read_text()}
    run_here = {"README.md", "docs/problems.md", "docs/strategies.md", "docs/how_to/reward.md", "docs/how_to/loss.md"}
    assert with_blocks == run_here | {
        "docs/api.md",
        "docs/how_to/openai.md",
        "docs/how_to/serve.md",
        "docs/how_to/tinker.md",
    }  # test_public_api.py, test_openai.py, test_serve.py, test_tinker.py


# ---- docs/reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["reference", "diagrams"])
def test_pages_and_diagrams_are_made_from_the_code(script):
    result = run_python(f"dev/{script}.py", "--check")
    assert result.returncode == 0, result.stderr


METRIC = re.compile(
    r"frac_reward_zero_std|(rewards?|completions|selection|collection|update|validation|estimator|evaluation|time|memory|compile)/[\w*/]+"
)


def written_metrics() -> set[str]:
    """Keys of metrics.jsonl in the sources, with "*" for each inserted value."""
    keys = set()
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] == "reporting":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                keys.add("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                keys.add(node.value)
    keys = {key for key in keys if METRIC.fullmatch(key)} - {"update/*", "evaluation/*/*", "evaluation/*/avg"}
    drawn = {name: [GradedResponse(1, False, Verdict(True, 1.0))] for name in "ab"}
    statistics = scores.statistics(drawn.values()) | scores.difficulty_statistics(
        scores.by_difficulty({"a": 1.0}, drawn)
    )
    return (
        {key for key in keys if f"{key}*" not in keys and not key.endswith("_")}
        | {f"update/{name}" for name in UpdateMetrics._fields if name not in ("finite", "weights_finite", "gap")}
        | {f"evaluation/*/{re.sub('_1$', '_*', key)}" for key in statistics}
    )


def test_every_metric_is_documented():
    text, written = (DOCS / "reference" / "metrics.md").read_text(), written_metrics()
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    documented = {re.sub(r"<\w+>", "*", key) for key in re.findall(r"`([^`]+)`", cells)}
    assert len(written) > 50
    assert {key for key in written if not fnmatch.filter(documented, key)} == set()
    assert {key for key in documented if not any(fnmatch.fnmatch(key, pattern) for pattern in written)} == set()


# ---- docs/concepts/objectives.md -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "row", "objective", "correction"),
    [
        ("## What the published method climbs", 1, "identity", "none"),
        ("## What the published method climbs", 3, "log", "none"),
        ("Relative signal(p) for the objective `log`, from the same enumeration:", 1, "log", "stratified"),
        ("Relative signal(p) for the objective `log`, from the same enumeration:", 2, "log", "exact"),
    ],
)
def test_the_tables_of_what_is_climbed(heading, row, objective, correction):
    shown = table_below("concepts/objectives.md", heading)
    collection = config_lib.Config().collection
    config = dataclasses.replace(collection, strategy="balance", objective=objective, correction=correction)
    signal = expectations(config, np.array([0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9])).signal
    for cell, value in zip(shown[row][1:], signal / signal[4], strict=True):
        digits = len(cell.partition(".")[2])
        assert float(cell) == pytest.approx(value, abs=0.5 * 10.0**-digits + 1e-9)


# ---- docs/concepts/selection.md --------------------------------------------------------------------------------------


def test_the_table_of_what_unequal_probabilities_save():
    # The histogram that `prepare` prints in the tutorial: pass rate, problems.
    printed = re.findall(r"^ +(\d\.\d{3}) [ *] +(\d+)  #", (DOCS / "tutorial.md").read_text(), re.MULTILINE)
    rates, counts = np.array(printed, float).T
    assert counts.sum() == 1024
    tutorial = np.clip(rates, 1e-3, 1 - 1e-3), counts / counts.sum()
    text = (DOCS / "concepts" / "selection.md").read_text()
    histogram = [int(number) for number in text.split("16 of 16 draws:")[1].split(".")[0].split(",")]
    assert sum(histogram) == 1024 and len(histogram) == 17
    fitted, words = np.unique(predictions.fitted_rates(np.array(histogram)), return_counts=True)
    built_in = np.clip(fitted, 1e-3, 1 - 1e-3), words / words.sum()
    rows = table_below("concepts/selection.md", "## What it saves on paper")
    assert len(rows) == 5
    for entry, *shown in rows:
        section = strategy_settings(entry.strip("`"), CollectionConfig())
        populations = selection_studies.population(0.6, 1.2), tutorial, built_in
        found = [number for each in populations for number in selection_studies.savings(section, *each)]
        assert [float(cell) for cell in shown] == pytest.approx(found, abs=0.5e-2 + 1e-9)


# ---- docs/problems.md ------------------------------------------------------------------------------------------------


def test_a_data_set_made_elsewhere_becomes_a_file(tmp_path, monkeypatch):
    rows = [{"question": "q", "answer": "So\n#### 1,234", "level": 5}, {"question": "p", "answer": "#### 2"}]
    stand_in = SimpleNamespace(load_dataset=lambda name, subset, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.chdir(tmp_path)
    exec(code_block("problems.md", "load_problems"), {})
    first, second = load_problems("gsm8k_test.jsonl")
    assert [first["problem"], first["answer"], first["labels"]] == ["q", "1234", {"level": "5"}]
    assert first["columns"].items() > rows[0].items()
    ours = load_problems("hf:openai/gsm8k")
    assert [problem["id"] for problem in ours] == [first["id"], second["id"]]


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(document: pathlib.Path) -> set[str]:
    """Names that headings have as links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


DOCUMENTS = (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "launch" / "README.md", *sorted(DOCS.rglob("*.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: f"{document.parent.name}/{document.stem}")
def test_links_lead_somewhere(document):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{text}: {target}"
        assert not anchor or anchor in anchors(file), f"{text}: {target}"
        # A link to code names what to look for there.
        if file.suffix == ".py":
            names = {node.name for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "name")}
            for name in re.findall(r"`(\w+)`", text):
                assert name in names, f"{name} is not in {path}"


# ---- CONTRIBUTING.md -------------------------------------------------------------------------------------------------


def walks() -> dict[str, list[tuple[str, str]]]:
    """(file in the package, function) of each step, by the name of the walk."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Three walks through the code\n")[1].partition("\n## ")[0]
    parts = re.split(r"^\*\*(.+?)\*\*", section, flags=re.MULTILINE)[1:]
    steps = (re.findall(r"^\d+\. `(.+?):\d+`, `(.+?)`: ", part, re.MULTILINE) for part in parts[1::2])
    return dict(zip(parts[::2], steps, strict=True))


def names_in(file: str) -> set[str]:
    """Names of functions and classes of a file of the package, those of methods as "Class.method"."""
    tree = ast.parse((PACKAGE / file).read_text())
    top = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return top.keys() | {
        f"{name}.{node.name}" for name, each in top.items() for node in each.body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("walk", walks())
def test_a_walk_leads_through_few_rooms(walk):
    steps = walks()[walk]
    assert len(steps) > 5 and [step for step in steps if step[1] not in names_in(step[0])] == []
    rooms = [file.partition("/")[0].removesuffix(".py") for file, _ in steps]
    floors = [next(number for number, layer in enumerate(LAYERS) if room in layer) for room in rooms]
    climbs = sum(after > before for before, after in itertools.pairwise(floors))
    assert len(set(rooms)) <= 6 and climbs <= 2, (rooms, floors)


def test_a_name_that_is_not_there_is_found():
    assert {"choose", "Source"} <= names_in("training/drawing.py") and "Learner._loss" in names_in(
        "learning/learner.py"
    )
    assert "select" not in names_in("training/drawing.py") and len(walks()) == 3


# ---- docs/troubleshooting.md -----------------------------------------------------------------------------------------


def strings_of_the_program() -> set[str]:
    """Every string in its sources, and what stands between the braces of its f-strings."""
    return {
        node.value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_metric(key: str, strings: set[str]) -> bool:
    """Returns True if some code writes this key of metrics.jsonl."""
    if key.startswith("update/") and key.removeprefix("update/") in UpdateMetrics._fields:
        return True
    if key.startswith("collection/verdict_"):
        return key.removeprefix("collection/verdict_") in FAILURES
    return key in strings


def test_troubleshooting_names_keys_and_words_that_there_are():
    text = (DOCS / "troubleshooting.md").read_text()
    sections, strings = set(config_lib.defaults().to_dict()), strings_of_the_program()
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", text))
    settings = {name for name in named if name.split(".")[0] in sections}
    assert len(settings) > 20 and named - settings == {"metrics.jsonl"}
    flat = config_lib.flatten(config_lib.defaults().to_dict())
    assert settings <= flat.keys(), settings - flat.keys()
    metrics = {key for key in re.findall(r"`([a-z_]+/[a-z_]+)`", text)}
    assert len(metrics) > 15 and {key for key in metrics if not is_metric(key, strings)} == set()
    said = re.findall(r'"([^"]+)"', " ".join(text.split()))
    assert len(said) > 20
    for words in said:
        assert any(words in " ".join(string.split()) for string in strings), words


def test_a_metric_that_is_none_is_found():
    strings = strings_of_the_program()
    for key in ("update/entropi", "collection/verdict_timeouts", "collection/zero_signals", "time/verify"):
        assert not is_metric(key, strings), key


# ---- commands --------------------------------------------------------------------------------------------------------

MODULES = ("train", "sft", "prepare", "evaluate", "export", "serve", "plot", "simulate", "compile_check", "benchmark")
MEASUREMENTS = tuple(
    f"bench.{name}"
    for name in (
        "rollout", "adaptive", "update", "iteration", "split", "loss", "start", "preemption", "accelerator", "serve",
        "turns", "learning", "studies",
    )
)  # fmt: skip
PROGRAMS = MODULES + MEASUREMENTS
# Where each command of the documents is run: a test, CI, or by hand and why. One that isn't here is refused below.
RUN_BY = {
    "train": "tests/training/test_train.py::test_what_a_run_writes",
    "sft": "tests/training/test_sft.py::test_a_run_learns_and_its_export_loads",
    "prepare": "tests/evaluation/test_prepare.py::test_killed_twice_it_chooses_the_same_prompts",
    "evaluate": "tests/evaluation/test_evaluate.py::test_killed_twice_it_ends_with_the_same_table",
    "export": "tests/training/test_train.py::test_export_is_the_checkpoint",
    "serve": "tests/serving/test_serve.py::test_it_says_what_it_serves_and_where",
    "plot": "tests/reporting/test_plot.py::test_figures_and_page_are_written_and_the_page_is_named_last",
    "simulate": "tests/analysis/test_simulate.py::test_a_mistake_at_the_terminal",
    "compile_check": "tests/planning/test_compile_check.py::test_what_fits",
    "benchmark": "tests/test_benchmark.py::test_the_figures_of_a_run",
    "bench.rollout": "tests/bench/test_rollout.py::test_rollout",
    "bench.adaptive": "tests/bench/test_rollout.py::test_adaptive",
    "bench.update": "tests/bench/test_update.py::test_the_report",
    "bench.iteration": "tests/bench/test_iteration.py::test_one_iteration_by_its_phases",
    "bench.overlap": "tests/bench/test_overlap.py::test_responses_that_go_on_keep_the_slots_busy",
    "bench.split": "tests/bench/test_split.py::test_a_split_and_taking_turns_do_the_same_work",
    "bench.loss": "tests/learning/test_fused_logprobs.py::test_the_benchmark",
    "bench.start": "tests/bench/test_start.py::test_second_starts_are_quicker",
    "bench.preemption": "tests/bench/test_preemption.py::test_the_command_measures_each_phase_of_a_run",
    "bench.accelerator": "tests/bench/test_accelerator.py::test_the_command_runs_all_parts",
    "bench.serve": "tests/bench/test_serve.py::test_the_server_beside_its_engine",
    "bench.turns": "tests/bench/test_turns.py::test_turns_beside_one_turn",
    "bench.long_responses": "tests/bench/test_long_responses.py::test_costs_of_one_length",
    "bench.studies": "tests/bench/test_studies.py::test_what_strategies_climb",
    "bench.learning": "by hand: hours of two cores",
    "config": "tests/config/test_reference.py::test_the_page_is_the_one_in_docs",
    "environments": "tests/parity/test_verifiers.py::test_tasks_become_a_problem_file",
    "examples": "tests/test_tutorial.py",  # the same file, as a script
    "make setup": ".ci/run",  # test and lint begin with it
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make parity": ".ci/run",
    "make docs": ".ci/run",
    "make demo": "tests/test_demo.py::test_balance_learns_more_from_an_update_than_grpo",
    "make torture": "tests/test_torture.py::test_nothing_is_lost",
    "make slow": "by hand: minutes to hours",
    "make smollm2": "by hand: hours of two cores",
    "make audit": "by hand: it asks the package index",
    "make release-check": "by hand: it installs a wheel from the network",
    "tpu_vm.sh up": "tests/launch/test_tpu_node.py",
    "tpu_vm.sh watch": "tests/launch/test_watch.py",
    "tpu_vm.sh delete": "tests/launch/test_tpu_node.py",
    "tpu_pod.sh up": "tests/launch/test_tpu_node.py",
    "tpu_pod.sh watch": "tests/launch/test_watch.py",
    "tpu_pod.sh delete": "tests/launch/test_tpu_node.py",
}


class Command(NamedTuple):
    """A command as a document has it; `whole` where nothing of it is left out."""

    document: str
    program: str
    arguments: list[str]
    whole: bool = True

    @property
    def key(self) -> str:
        """Name in RUN_BY: the program, with its action if it has actions."""
        has_actions = self.program in ("make", "tpu_vm.sh", "tpu_pod.sh")
        return f"{self.program} {self.arguments[0]}" if has_actions else self.program


def typed(text: str) -> list[str]:
    """Returns the text that a document gives to be typed: lines of its blocks, and code within its sentences."""
    text = text.replace("\\\n", " ")
    blocks = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    console = "\n".join(block for language, block in blocks.findall(text) if language == "console")
    prose = blocks.sub("", text)
    lines = re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE) + re.findall(r"^\$ (.*)$", console, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ {4}.*$", "", prose, flags=re.MULTILINE))
    return [part for line in lines for part in re.split(r" && | & |; ", line)] + [" ".join(s.split()) for s in spans]


def commands(document: pathlib.Path) -> list[Command]:
    """Those of a document: `python -m`, a command's name with flags, `make`, and the scripts of launch/."""
    found, name = [], str(document.relative_to(ROOT))
    slices = re.search(r"`SLICE` is\s`python -m reinforce_ada_jax\.(compile_check) --topology=`", document.read_text())
    for text in typed(document.read_text()):
        python = r"(?:.*\s)?\S*(?:python -m reinforce_ada_jax\.|python -m (?=bench\.)|reinforce-ada )"
        module = re.match(rf"{python}((?:bench\.)?\w+)(.*)", text)
        short = re.match(rf"({'|'.join(map(re.escape, PROGRAMS))})((?: \w+)? --.*)", text)
        other = re.match(r"(?:launch/)?(make|tpu_vm\.sh|tpu_pod\.sh)( [a-z]+[a-z-]*\b(?: --? ?.*)?)(?:\s+#.*)?$", text)
        match = module or short or other
        if match:
            flags = re.sub(r"\[|\]|\s#.*", "", match[2])
            if flags.count('"') % 2:  # the whole command is in quotes
                flags = flags.rstrip().removesuffix('"')
            words = shlex.split(flags)
            kept = [word for word in words if word.strip(".") and not word.endswith(("=", "=..."))]
            whole = bool(words) and short is None and all(word in kept or not word.strip(".") for word in words)
            found.append(Command(name, match[1], kept, whole))
        elif slices and re.match(r"v\d\w*:[\dx]+ --config=", text):
            found.append(Command(name, slices[1], shlex.split(f"--topology={text}")))
    return found


ALL_COMMANDS = [command for document in DOCUMENTS for command in commands(document)]
# In a process of its own, which loads the package once and starts each command in a fork: with its own flags.
PARSER = """
import importlib, json, os, runpy, sys, tempfile
from absl import app, flags
from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib

def start(program, arguments, whole):
    without_arguments = []
    def run(main, groups=None):
        without_arguments.append(True)
        cli.run_with_arguments(main, groups)
    def parse(main, flags_parser):
        if not whole:
            names = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
            unknown = [name for name in names if name not in flags.FLAGS and not name.startswith("config.")]
            return cli.fail(f"unknown flags {unknown}") if unknown else None
        rest = flags_parser(sys.argv)[1:]
        if rest and without_arguments:
            cli.fail(f"unexpected arguments {rest}")
        needs_model = "config" in flags.FLAGS and program not in ("simulate", "bench.studies")
        if needs_model and flags.FLAGS.config is not None:
            config_lib.validate(flags.FLAGS.config)
    cli.run, app.run = run, parse
    name = program if program.startswith("bench.") else f"reinforce_ada_jax.{program}"
    sys.modules.pop(name)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__")

given, said = json.load(sys.stdin), []
for program in {program for program, *_ in given}:
    importlib.import_module(program if program.startswith("bench.") else f"reinforce_ada_jax.{program}")
for command_line in given:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(output.fileno(), 2)
                start(*command_line)
                code = 0
            except SystemExit as error:
                code = error.code
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code or 0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        said.append(output.read() or f"status {status}" if status else "")
print(json.dumps(said))
"""
TINY = ["--config=configs/tiny.py", "--workdir=runs/a"]
REFUSED = {
    "unknown flags ['adaptor']": Command("", "export", ["--adaptor"], whole=False),
    "Unknown command line flag 'colour'": Command("", "plot", ["runs/a", "--colour=red"]),
    "did you mean 'collection.strategy'": Command("", "train", [*TINY, "--config.collection.stratgy=grpo"]),
    "configs/none.py": Command("", "train", ["--config=configs/none.py", "--workdir=runs/a"]),
    "--workdir must have a value": Command("", "train", TINY[:1]),
    "unexpected arguments ['a']": Command("", "export", ["a", "--workdir=runs/a", "--output=b"]),
    "unexpected arguments ['fast']": Command("", "bench.rollout", ["fast"]),
    "must be a multiple of": Command("", "train", [*TINY, "--config.mesh.fsdp=3"]),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Messages of the package's own parser on each `python -m` command; empty if it accepts the command."""
    asked = [command for command in (*ALL_COMMANDS, *REFUSED.values()) if command.program in PROGRAMS]
    result = run_python("-c", PARSER, input=json.dumps([command[1:] for command in asked]))
    assert result.returncode == 0, result.stderr
    return {str(command[1:]): text for command, text in zip(asked, json.loads(result.stdout), strict=True)}


def test_commands_are_taken_by_their_programs(said):
    programs = [command for command in ALL_COMMANDS if command.program in PROGRAMS]
    assert len(programs) > 40 and {command.program for command in programs} == set(PROGRAMS)
    assert {key: text for command in programs if (text := said[key := str(command[1:])])} == {}


@pytest.mark.parametrize("message", REFUSED)
def test_a_command_that_would_be_refused_is_found(said, message):
    assert message in said[str(REFUSED[message][1:])]


def test_targets_of_make_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = {command.arguments[0] for command in ALL_COMMANDS if command.program == "make"}
    assert {"demo", "test"} <= asked <= set(targets)


def test_launch_commands_are_taken(tmp_path):
    make_checkout(tmp_path / "made")
    for number, command in enumerate(ALL_COMMANDS):
        if command.program.startswith("tpu_") and command.document != "launch/README.md":  # which has a test of its own
            (tmp_path / str(number)).mkdir()
            cloud = Cloud(tmp_path / str(number), tmp_path / "made")
            (cloud.folder / "setup.sh").touch()
            (cloud.checkout / "configs" / "qwen_1p5b.py").touch()
            git(cloud.checkout, "add", "configs")
            action, *flags = command.arguments
            check(cloud.run(action, "--dry-run", "--dirty", *flags, script=command.program))


def test_files_of_the_repository_that_commands_name_are_there():
    ours = r"(?:configs|bench/baselines|examples|launch|tests|docs)/[\w./-]+"
    named = {name for command in ALL_COMMANDS for word in command.arguments for name in re.findall(ours, word)}
    assert "configs/qwen_1p5b.py" in named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_command_is_run_somewhere():
    assert {command.key for command in ALL_COMMANDS} - RUN_BY.keys() == set(), "name a test that runs it, in RUN_BY"
    for key, place in RUN_BY.items():
        file, _, test = place.partition("::")
        if place == ".ci/run":
            assert key == "make setup" or re.search(rf"^make .*\b{key.split()[1]}\b", (ROOT / file).read_text(), re.M)
        elif not place.startswith("by hand: "):
            assert not test or f"\ndef {test}(" in (ROOT / file).read_text(), place
            assert (ROOT / file).exists(), place


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: f"{document.parent.name}/{document.stem}")
def test_settings_that_documents_name_are_there(document):
    text, keys = document.read_text(), set(config_lib.flatten(config_lib.defaults().to_dict()))
    if document.name == "coming_from.md":
        keys |= {prefix + name for name in aliases.ALIASES for prefix in ("", aliases.VERL_PREFIX)}
    sections = {key.split(".")[0] for key in keys if "." in key}
    flagged = set(re.findall(r"--config\.([a-z_]+(?:\.\w+)*)", text))
    named = {name for name in re.findall(r"`([a-z_]+\.\w+)(?: = [^`]*)?`", text) if name.split(".")[0] in sections}
    assert {name for name in flagged | named if name not in keys and not name.endswith(".json")} == set()
