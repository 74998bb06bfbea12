"""Problem files become prompts with tokens; what cannot be read or is too long is named."""

import json

import pytest

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.prompts import benchmark_name, load_problems, tokenize
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data.shared import write_rows

GOOD = {"id": "a", "problem": "1+1?", "answer": "2"}


def test_the_built_in_task():
    assert load_problems("cipher:heldout") == cipher.problems("heldout")
    with pytest.raises(ValueError, match="no split 'tests'"):
        load_problems("cipher:tests")


def test_a_file(tmp_path):
    """Lines of a JSONL file become problems, with labels and columns."""
    row = GOOD | {"source": "elsewhere", "level": 5, "subject": None, "type": "", "note": "x"}
    other = {"id": "b", "problem": "½\u2028?", "answer": "0", "pass_rate": 0}
    source = write_rows(tmp_path / "some.jsonl", [row, "", other])
    first, second = load_problems(source)
    origin = first["origin"]
    assert first == GOOD | {"labels": {"level": "5", "source": "elsewhere"}, "columns": row, "origin": origin}
    assert second == other | {"columns": other, "origin": origin}
    assert (origin.place, second["origin"].place) == (f"{source}, line 1", f"{source}, line 3")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{"], "line 2: not valid JSON"),
        ([GOOD, "", "[]"], "line 3: a list"),
        ([[GOOD]], r" is one JSON array. Write one object a line: jq -c '.\[\]' "),
        ([GOOD, "null"], "line 2: a NoneType"),
        ([{"id": "a", "problem": "1"}], r"line 1: no answer: none of .* columns id, problem.*data.answer_column=NAME"),
        (
            [{"id": "a", "text": "1", "answer": "2"}],
            r"no problem: none of .* answer, id, text.*data.problem_column=NAME",
        ),
        ([GOOD | {"answer": True}], "line 1: answer is True; an answer must be a text or a number"),
        ([GOOD | {"answer": ["2"]}], r"line 1: answer is \['2'\]; an answer must be a text or a number"),
        ([GOOD | {"answer": None}], "line 1: answer is null. Give the row its answer, remove the row, or name another"),
        ([GOOD | {"answer": None, "gt": None}], "line 1: gt is null"),
        ([GOOD | {"problem": 5}], "line 1: problem is 5; it must be a text, or a list of messages"),
        ([GOOD | {"id": 1.5}], "line 1: id is 1.5; it must be a text or a whole number"),
        ([GOOD | {"id": ""}], "line 1: id has 0 characters"),
        ([GOOD, GOOD | {"id": "b", "answer": " "}], "line 2: answer is empty"),
        ([GOOD | {"problem": ""}], "line 1: problem is empty"),
        ([GOOD | {"pass_rate": 1.5}], r"line 1: pass_rate is 1.5; it must be a number in \[0, 1\]"),
        ([GOOD | {"pass_rate": "0.5"}], "line 1: pass_rate is '0.5'"),
        ([GOOD | {"pass_rate": True}], "line 1: pass_rate is True"),  # not a rate of 1
        (
            [GOOD | {"id": None, "extra_info": {"index": True}}],
            "line 1: extra_info.index is True; it must be a text or a whole number",
        ),
        ([GOOD, GOOD | {"id": "b"}, GOOD], "lines 1 and 3: both have id 'a'"),
        ([], "is empty"),
        (["", " "], "is empty"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, lines, message):
    source = write_rows(tmp_path / "bad.jsonl", lines)
    with pytest.raises(ValueError, match=f"bad.jsonl.*{message}"):
        load_problems(source)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\xfa\n")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not valid JSON"):
        load_problems(str(tmp_path / "bad.jsonl"))


def test_no_file(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(ValueError, match=r"There is no file .*none.jsonl.*cipher:train"):
        load_problems(str(tmp_path / "none.jsonl"))


def test_benchmark_name():
    """The name of a benchmark is that of its file or data set."""
    assert benchmark_name("cipher:heldout") == "heldout"
    assert benchmark_name("data/math500.jsonl") == "math500"
    assert benchmark_name("tfds:gsm8k/test") == "gsm8k_test"
    assert benchmark_name("hf:RLHFlow/prompts:test") == "RLHFlow_prompts_test"


def test_tokenize(tmp_path):
    """Prompts have tokens within the limit."""
    cipher.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    problems = [
        {"id": "a", "problem": "АБ=", "answer": "xy", "pass_rate": 0.25, "columns": {"data_source": "x"}},
        {"id": "b", "problem": "А" * 10, "answer": "z"},
        {"id": "c", "problem": "А" * 1500, "answer": "z"},
    ]
    prompts = tokenize(problems[:2], tokenizer, "plain", max_prompt_tokens=11)
    assert [dict(prompt.columns) for prompt in prompts] == [{"data_source": "x"}, {}]
    assert [(prompt.id, prompt.answer, prompt.pass_rate) for prompt in prompts] == [("a", "xy", 0.25), ("b", "z", None)]
    assert prompts[0].tokens.tolist() == [1, 5, 6, 4]
    with pytest.raises(
        ValueError, match=r"2 prompts have 11 to 1,501 tokens, limit 10: raise data.max_prompt_tokens or.*b, c"
    ):
        tokenize(problems, tokenizer, "plain", max_prompt_tokens=10)
