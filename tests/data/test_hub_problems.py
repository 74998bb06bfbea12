"""Problems through Hugging Face's `datasets`: a stand-in for it, and itself where installed. Nothing is fetched."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from reinforce_ada_jax.data.problems import json_hash
from reinforce_ada_jax.data.prompts import load_problems
from reinforce_ada_jax.data.rows import to_problems

# As in RLHFlow's prompt sets: no id, and the verifier's answer is `gt`.
ROWS = [{"problem": "1+1?", "gt": "2", "answer": "It is 2."}, {"problem": "2+2?", "gt": "4", "answer": "So 4."}]


def from_columns(rows, source):
    return to_problems(enumerate(rows, start=1), source)


@pytest.fixture
def datasets(monkeypatch):
    """A `datasets` that knows one split, and notes what is asked of it."""
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if split != "train":
            raise ValueError(f'Unknown split "{split}". Should be one of ["train"].')
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_set_of_the_hub(datasets):
    problems = load_problems("hf:RLHFlow/reinforce_ada_hard_prompt")
    assert [(problem["problem"], problem["answer"]) for problem in problems] == [("1+1?", "2"), ("2+2?", "4")]
    assert problems == load_problems("hf:RLHFlow/reinforce_ada_hard_prompt:train")
    assert datasets == [("RLHFlow/reinforce_ada_hard_prompt", None, "train")] * 2
    assert load_problems("hf:openai/gsm8k:main:train") == problems
    assert datasets[-1] == ("openai/gsm8k", "main", "train")
    with pytest.raises(ValueError, match=r"hf:some/set:test can't be loaded .*Unknown split"):
        load_problems("hf:some/set:test")
    with pytest.raises(ValueError, match="hf:a:b:c:d has too many parts.* hf:NAME:SUBSET:SPLIT"):
        load_problems("hf:a:b:c:d")


def test_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:some/set needs .*pip install '\.\[hub\]'.* JSONL file"):
        load_problems("hf:some/set")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_the_real_package_on_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [problem["answer"] for problem in load_problems(f"hf:{folder}")] == ["2", "4"]
    with pytest.raises(ValueError, match="can't be loaded"):
        load_problems(f"hf:{folder}:test")


def test_ids_are_made_of_the_text():
    # sha256 of '["1+1?", "2"]', as any JSON program writes it.
    assert json_hash(["1+1?", "2"]) == "82831a5898978c02"
    ids = [problem["id"] for problem in from_columns(ROWS, "set")]
    assert ids == [json_hash(["1+1?", "2"]), json_hash(["2+2?", "4"])]
    # They don't change when rows come in another order, or more of them; a row that occurs twice gets two ids.
    assert [problem["id"] for problem in from_columns([ROWS[1], *ROWS], "set")] == [ids[1], ids[0], f"{ids[1]}-2"]


def test_ids_that_a_merged_set_repeats():
    rows = [{"id": name, "problem": problem, "answer": "3"} for name, problem in ((1, "p"), ("1", "q"), (2, "r"))]
    assert [problem["id"] for problem in from_columns(rows, "set")] == ["1", "1-2", "2"]


def test_columns():
    """Rows of a data set become problems, and keep their columns."""
    (problem,) = from_columns([{"id": 7, "question": "q", "answer": "So\n#### 1,234", "pass_rate": 0.25}], "set")
    columns = {"id": 7, "question": "q", "answer": "So\n#### 1,234", "pass_rate": 0.25}
    read = {"id": "7", "problem": "q", "answer": "1234", "pass_rate": 0.25}
    assert problem == read | {"columns": columns, "origin": problem["origin"]}
    # A comma in an answer that isn't GSM8K's is part of it.
    assert from_columns([{"problem": "q", "answer": "(1, 2)"}], "set")[0]["answer"] == "(1, 2)"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "set is empty: it needs at least one row"),
        (
            [{"problem": "q"}],
            "set, row 1: no answer: none of reward_model.ground_truth, gt, ground_truth, short_answer",
        ),
        ([{"text": "q", "answer": "1"}], "set, row 1: no problem: none of problem, question"),
        ([{"problem": "q", "answer": {"a": 1}}], "set, row 1: answer is {'a': 1}; an answer must be a text"),
        ([{"id": name, "problem": "q", "answer": "3"} for name in (1, 1, "1-2")], "set, rows 2 and 3"),
    ],
)
def test_rows_that_are_no_problems(rows, message):
    with pytest.raises(ValueError, match=message):
        from_columns(rows, "set")
