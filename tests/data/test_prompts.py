import dataclasses
import json

import numpy as np
import pytest

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.prompts import (
    PromptCursor,
    benchmark_name,
    load_problems,
    next_prompts,
    prompts_after,
    tokenize,
)
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.types import Prompt

GOOD = {"id": "a", "problem": "1+1?", "answer": "2"}


def write(file, *lines):
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def test_the_built_in_task():
    assert load_problems("cipher:heldout") == cipher.problems("heldout")
    with pytest.raises(ValueError, match="no split 'tests'"):
        load_problems("cipher:tests")


def test_a_file(tmp_path):
    source = write(
        tmp_path / "some.jsonl",
        GOOD | {"source": "elsewhere", "level": 5, "subject": None, "type": "", "note": "x"},
        "",
        {"id": "b", "problem": "½\u2028?", "answer": "0", "pass_rate": 0},
    )
    first, second = load_problems(source)
    row = GOOD | {"source": "elsewhere", "level": 5, "subject": None, "type": "", "note": "x"}
    origin = first["origin"]
    assert first == GOOD | {"labels": {"level": "5", "source": "elsewhere"}, "columns": row, "origin": origin}
    row = {"id": "b", "problem": "½\u2028?", "answer": "0", "pass_rate": 0}
    assert second == row | {"columns": row, "origin": origin}
    assert (origin.place, second["origin"].place) == (f"{source}, line 1", f"{source}, line 3")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{"], "line 2: not valid JSON"),
        ([GOOD, "", "[]"], "line 3: a list"),
        ([GOOD, "null"], "line 2: a NoneType"),
        ([{"id": "a", "problem": "1"}], r"line 1: no answer: none of .* columns id, problem.*data.answer_column=NAME"),
        (
            [{"id": "a", "text": "1", "answer": "2"}],
            r"no problem: none of .* answer, id, text.*data.problem_column=NAME",
        ),
        ([GOOD | {"answer": True}], "line 1: answer is True; an answer must be a text or a number"),
        ([GOOD | {"answer": ["2"]}], r"line 1: answer is \['2'\]; an answer must be a text or a number"),
        ([GOOD | {"answer": None}], "line 1: no answer"),
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
    source = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ValueError, match=f"bad.jsonl.*{message}"):
        load_problems(source)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\xfa\n")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not valid JSON"):
        load_problems(str(tmp_path / "bad.jsonl"))


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"There is no file .*none.jsonl.*cipher:train"):
        load_problems(str(tmp_path / "none.jsonl"))


def test_benchmark_name():
    assert benchmark_name("cipher:heldout") == "heldout"
    assert benchmark_name("data/math500.jsonl") == "math500"
    assert benchmark_name("tfds:gsm8k/test") == "gsm8k_test"
    assert benchmark_name("hf:RLHFlow/prompts:test") == "RLHFlow_prompts_test"


def test_tokenize(tmp_path):
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
