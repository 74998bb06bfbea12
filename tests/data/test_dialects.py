"""Rows as users of TRL, verl, tunix and OpenAI write them: all files of dialects/ hold the same four problems."""

import decimal
import importlib.util
import json
import pathlib
import sys

import pytest

from reinforce_ada_jax.data.files import json_values
from reinforce_ada_jax.data.problems import description
from reinforce_ada_jax.data.prompts import benchmark_name, load_problems
from reinforce_ada_jax.data.rows import Columns, to_problems

FOLDER = pathlib.Path(__file__).parent / "dialects"
PROBLEMS = [("рСУш..=", "z1SW"), ("ВпЦыгЪ=", "LPajDo"), ("ЦрИмдт=", "az+hAY"), ("южМкЫС=", "iTlEy1")]
FILES = {
    "own.jsonl": "problem from 'problem', answer from 'answer'",
    "trl_text.jsonl": "problem from 'prompt', answer from 'ground_truth'",
    "trl_chat.jsonl": r"problem from the messages in 'prompt', answer from 'solution' (in \boxed{})",
    "tunix_gsm8k.jsonl": "problem from 'question', answer from 'answer'",
    "openai_reinforcement.jsonl": "problem from the messages in 'messages', answer from 'reference_answer'",
    "openai_chat.jsonl": "problem from the messages in 'messages', answer from 'answer'",
    "math.jsonl": r"problem from 'problem', answer from 'solution' (in \boxed{})",
    "reinforce_ada.jsonl": "problem from 'problem', answer from 'gt'",
    "gsm8k.jsonl.gz": "problem from 'question', answer from 'answer' (after '####')",
    "verl.jsonl": "problem from the messages in 'prompt', answer from 'reward_model.ground_truth'",
}
with_parquet = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
with_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def read(row, **columns):
    ((problem),) = to_problems([(1, row)], "set", Columns(**columns))
    return problem["problem"], problem["answer"]


@pytest.mark.parametrize("name", FILES)
def test_a_file(name):
    """Rows as other programs write them become the same problems."""
    source = str(FOLDER / name)
    problems = load_problems(source)
    assert [(problem["problem"], problem["answer"]) for problem in problems] == PROBLEMS
    assert description(source, problems) == f"{source}: 4 rows; {FILES[name]}"
    assert len({problem["id"] for problem in problems}) == 4
    system = [message["content"] for problem in problems for message in problem.get("prompt", [])[:-1]]
    assert system == ["Decipher."] * (4 if name in ("trl_chat.jsonl", "openai_reinforcement.jsonl") else 0)


@with_parquet
def test_parquet_is_read_like_jsonl():
    problems = load_problems(str(FOLDER / "verl.parquet"))
    assert problems == load_problems(str(FOLDER / "verl.jsonl"))
    assert problems[3]["columns"]["extra_info"]["index"] == 3
    assert problems[3]["origin"].place.endswith("verl.parquet, row 4")


@with_parquet
def test_parquet_that_is_cut_off(tmp_path):
    (tmp_path / "cut.parquet").write_bytes((FOLDER / "verl.parquet").read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"cut.parquet can't be read as Parquet .*Write it again"):
        load_problems(str(tmp_path / "cut.parquet"))


def test_parquet_without_the_package(monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"verl.parquet is Parquet, which needs pyarrow.*pip install '\.\[hub\]'"):
        load_problems(str(FOLDER / "verl.parquet"))


@with_datasets
@pytest.mark.filterwarnings("ignore:Cannot locate reference")  # of the package that `datasets` pickles with
@pytest.mark.parametrize("saved", [False, True])
def test_a_folder(tmp_path, monkeypatch, saved):
    """A folder of a data set is read as its file."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (FOLDER / "verl.jsonl").read_text(encoding="utf-8").splitlines()]
    if saved:
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "train.jsonl").write_bytes((FOLDER / "verl.jsonl").read_bytes())
    problems = load_problems(str(tmp_path / "set"))
    assert problems == load_problems(str(FOLDER / "verl.jsonl"))
    assert problems == load_problems(f"hf:{tmp_path}/set:train")


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"answer": 72}, "72"),
        ({"answer": 72.0}, "72"),
        ({"answer": -0.0}, "0"),
        ({"answer": 0.25}, "0.25"),
        ({"answer": 5e-05}, "0.00005"),  # not 5e-05, with which math grades 0.00005 as wrong
        ({"answer": -1.5e23}, "-150000000000000000000000"),  # not the digits of the nearest double
        ({"answer": 10**400}, "1" + 400 * "0"),
        ({"answer": 0.5}, "0.5"),
        ({"answer": -1e-7}, "-0.0000001"),
        ({"answer": "(1, 2)"}, "(1, 2)"),
        ({"answer": "#### 1,234"}, "1234"),
        ({"answer": "So\n#### (1, 2)\n"}, "(1, 2)"),
        # A heading in the middle is no answer.
        ({"answer": "#### Step 1\nIt is 2"}, "#### Step 1\nIt is 2"),
        ({"answer": "So\n#### 72", "short_answer": "1,072"}, "1072"),
        ({"answer": r"\boxed{72}"}, r"\boxed{72}"),
        ({"solution": r"$\boxed{1}$, so \boxed{\frac{1}{\sqrt{2}}}."}, r"\frac{1}{\sqrt{2}}"),
        ({"solution": r"\boxed{1}, then \boxed{2 is cut"}, "1"),
        ({"solution": r"\boxed{\{1,2\}} } \boxed {5}"}, "5"),
        ({"solution": r"$x = \fbox{C}$"}, "C"),
        ({"solution": r"so $x = \boxed 5$."}, "5"),
        ({"solution": r"so \boxed 5 it is"}, r"so \boxed 5 it is"),
        ({"solution": "It is 72."}, "It is 72."),
        ({"solution": r"\boxed{7", "answer": None}, r"\boxed{7"),
        ({"solution": r"\boxed{7}", "answer": "8"}, "8"),
        ({"ground_truth": "8", "answer": "It is 8."}, "8"),
        ({"reward_model": {"ground_truth": ["8", "9"]}, "answer": "8"}, '["8", "9"]'),
        ({"ground_truth": ["8", "9"], "answer": "8"}, '["8", "9"]'),
        ({"reward_model": {"style": "rule"}, "answer": "8"}, "8"),
    ],
)
def test_answers(answer, expected):
    """The answer is found in each of its columns."""
    assert read({"problem": "q", **answer}) == ("q", expected)


def test_decimals_of_parquet_have_no_exponent():
    assert json_values({"answer": [decimal.Decimal("5E-8"), decimal.Decimal("72.00")]}) == {
        "answer": ["0.00000005", "72.00"]
    }


def test_named_columns():
    """Columns that are named come before those that are known."""
    row = {"Question": "p?", "question": "q?", "Final": 3, "answer": "4", "extra_info": {"question": "r?"}}
    assert read(row) == ("q?", "4")
    assert read(row, problem="Question", answer="Final") == ("p?", "3")
    assert read(row, problem="extra_info.question") == ("r?", "4")
    assert read(row | {"tests": ["1 == 1"]}, answer="tests") == ("q?", '["1 == 1"]')
    assert read({"problem": "q?"}, answer="none") == ("q?", "")
    assert read({"chat": [{"role": "user", "content": "p?"}], "answer": "4"}, problem="chat") == ("p?", "4")
    # A benchmark may be without the column.
    assert read({"question": "q?", "answer": "4"}, problem="Question", required=False) == ("q?", "4")
    with pytest.raises(ValueError, match="set, row 1: no column 'Question', which data.problem_column names, among a"):
        read({"question": "q?", "answer": "4"}, problem="Question")


def test_rows_of_two_dialects_are_counted():
    rows = [{"problem": "p", "answer": "1"}, {"question": "q", "answer": "2"}, {"question": "r", "answer": "3"}]
    line = description("set", to_problems(enumerate(rows, start=1), "set"))
    assert line == "set: 3 rows; problem from 'problem' (1) and 'question' (2), answer from 'answer'"


def test_ids_of_a_file_must_differ_and_made_ids_are_numbered(tmp_path):
    file = tmp_path / "some.jsonl"
    row = {"question": "1+1?", "answer": 2}
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, row, row | {"id": 7})))
    # sha256 of '["1+1?", "2"]'
    assert [problem["id"] for problem in load_problems(str(file))] == ["82831a5898978c02", "82831a5898978c02-2", "7"]


def test_the_name_of_a_packed_benchmark():
    assert benchmark_name("data/math500.jsonl.gz") == benchmark_name("data/math500.parquet") == "math500"
