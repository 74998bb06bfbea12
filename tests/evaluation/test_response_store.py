import json
from concurrent.futures import Future

import numpy as np
import pytest

from reinforce_ada_jax.evaluation import response_store
from reinforce_ada_jax.evaluation.response_store import Graded, Store
from reinforce_ada_jax.types import Prompt, Response, Verdict
from tests.running import tiny

HEADER = {"drawn": {"seed": 0, "samples": 2, "system": ""}, "graded": {"reward": "math", "answers": "a"}}
RIGHT, WRONG = Graded(3, False, Verdict(True, 1.0)), Graded(8, True, Verdict(False, 0.25, "no_answer"))


def entries(*names: str):
    """Two responses of each prompt: right and wrong."""
    return [(name, draw, f"½\u2028 {name}", graded) for name in names for draw, graded in enumerate((RIGHT, WRONG))]


@pytest.fixture
def file(tmp_path):
    """A store with the prompts a and b."""
    file = tmp_path / "some" / "set.jsonl"
    with Store(file, HEADER) as store:
        store.add(entries("a"))
        store.add(entries("b"))
    return file


def test_what_is_stored_comes_back(file):
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
    assert rows[1] == {
        "prompt": "a", "draw": 1, "response": "½\u2028 a", "tokens": 8, "truncated": True,
        "correct": False, "reward": 0.25, "reason": "no_answer",
    }  # fmt: skip
    store = Store(file, HEADER)
    assert store.of(["b", "c", "a"], 2) == {"b": [RIGHT, WRONG], "a": [RIGHT, WRONG]}
    assert store.of(["a"], 3) == {} and len(store) == 4


def test_nothing_is_written_before_it_is_entered(tmp_path):
    Store(tmp_path / "folder" / "set.jsonl", HEADER)
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_short_is_dropped(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])  # all but the line break: it may have been longer
    store = Store(file, HEADER)
    assert store.of(["a", "b"], 2) == {"a": [RIGHT, WRONG]}
    with store:
        store.add(entries("b"))  # draw 0 is there already
    assert file.read_bytes() == whole


def test_a_line_in_the_middle_that_cannot_be_read(file):
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"prompt": "a"}', *lines[2:]]))
    with pytest.raises(ValueError, match=r"set.jsonl, line 2 is no stored response .*remove the line"):
        Store(file, HEADER)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("drawn", {"seed": 1}, r"drawn otherwise \(stored -> now\):\n  seed: 0 -> 1\nGo on .*another --output"),
        ("drawn", {"samples": 4, "top_k": 0}, r"  samples: 2 -> 4\n  top_k: absent -> 0\n"),
        ("graded", {"reward": "gsm8k"}, r"graded otherwise \(stored -> now\):\n  reward: math -> gsm8k\n.*--regrade"),
    ],
)
def test_responses_of_another_header_are_refused(file, part, change, message):
    with pytest.raises(ValueError, match=message):
        Store(file, HEADER | {part: HEADER[part] | change})


def test_a_file_without_its_header_and_a_header_without_its_file(file):
    header = file.with_suffix(".header.json")
    text = header.read_text()
    header.unlink()
    with pytest.raises(ValueError, match=r"set.header.json is missing"):
        Store(file, HEADER)
    header.write_text(text)
    file.unlink()
    other = HEADER | {"drawn": HEADER["drawn"] | {"seed": 1}}
    with Store(file, other):
        assert json.loads(header.read_text()) == other


def test_one_process_at_a_time(file):
    with Store(file, HEADER), pytest.raises(ValueError, match=r"set.jsonl is being written by another process"):
        Store(file, HEADER).__enter__()
    with Store(file, HEADER):
        pass


def test_what_another_process_added_in_between_stays(file):
    store = Store(file, HEADER)
    with Store(file, HEADER) as other:
        other.add(entries("c"))
    with store:
        store.add(entries("c", "d"))
    assert list(Store(file, HEADER).of("abcd", 2)) == list("abcd")
    assert file.read_bytes().count(b"\n") == 8


def test_regrade(file, monkeypatch):
    monkeypatch.setattr(response_store, "REGRADED_AT_ONCE", 3)
    now = HEADER | {"graded": {"reward": "gsm8k", "answers": "b"}}
    store = Store(file, now, regrade=True)
    asked = []

    def grade(pairs, lengths):
        asked.append((pairs, lengths))
        return [Verdict(length == 8, 0.5, "timeout") for length in lengths]

    with store:
        assert list(store.regrade({"a": "1", "b": "2"}, grade)) == [3, 4]
    texts = ["½\u2028 a", "½\u2028 a", "½\u2028 b", "½\u2028 b"]
    assert asked == [
        (list(zip(texts[:3], "112", strict=True)), [3, 8, 3]),
        (list(zip(texts[3:], "2", strict=True)), [8]),
    ]
    again = Store(file, now).of(["a", "b"], 2)
    expected = [Graded(3, False, Verdict(False, 0.5, "timeout")), Graded(8, True, Verdict(True, 0.5, "timeout"))]
    assert again == store.of(["a", "b"], 2) == {"a": expected, "b": expected}
    with pytest.raises(ValueError, match=r"reward: gsm8k -> math"):
        Store(file, HEADER)
    assert sorted(path.name for path in file.parent.iterdir()) == ["set.header.json", "set.jsonl"]


def test_a_kill_during_regrading_leaves_what_was_there(file):
    def interrupted(pairs, lengths):
        raise KeyboardInterrupt

    before = file.read_bytes()
    store = Store(file, HEADER | {"graded": {"reward": "gsm8k", "answers": "b"}}, regrade=True)
    with store, pytest.raises(KeyboardInterrupt):
        list(store.regrade({"a": "1", "b": "2"}, interrupted))
    assert file.read_bytes() == before
    assert Store(file, HEADER).of(["a"], 2)


def test_a_reward_function_that_was_edited_is_another_one(tmp_path):
    reward = tmp_path / "mine.py"
    config = tiny(**{"reward.path": f"{reward}:grade", "reward.workers": 1})
    reward.write_text("def grade(response, answer): return 1")
    before = response_store.graded_by(config, "", ["x"])
    assert response_store.graded_by(config, "", ["x"]) == before
    assert response_store.graded_by(config, "", ["y"]) != before
    reward.write_text("def grade(response, answer): return 0")
    assert response_store.graded_by(config, "", ["x"]) != before
    # The benchmark's own grader is not in that file.
    assert response_store.graded_by(config, "gsm8k", ["x"])["file"] == ""


# ---- drawing ---------------------------------------------------------------------------------------------------------


def prompts(count):
    return [Prompt(str(i), "", str(i), np.zeros(1, np.int32)) for i in range(count)]


def scripted(queue):
    """Yields responses three at a time, the last first; the tokens say of what they are."""
    while requests := queue.take(3):
        yield [
            Response(r.prompt.id, r.draw, np.array([int(r.prompt.id), r.draw]), np.zeros(2), r.draw == 1)
            for r in reversed(requests)
        ]


def verify(pairs):
    return [Verdict(response.draw == int(prompt.id) % 2, 1.0) for prompt, response in pairs]


def verify_later(pairs):
    future = Future()
    future.set_result(verify(pairs))
    return future


@pytest.mark.parametrize("verify_fn", [verify, verify_later])
@pytest.mark.parametrize("at_once", [1, 64])
def test_draw(tmp_path, monkeypatch, verify_fn, at_once):
    monkeypatch.setattr(response_store, "TURNS_AT_ONCE", at_once)  # of 4 slots: 2 prompts at a time, or all
    progress = []
    with Store(tmp_path / "set.jsonl", HEADER) as store:
        drawn = response_store.draw(
            prompts(5), scripted, verify_fn, 2, slots=4, deterministic=True, store=store,
            decode=lambda tokens: "/".join(map(str, tokens)), on_progress=lambda *counts: progress.append(counts),
        )  # fmt: skip
    expected = {str(i): [Graded(2, draw == 1, Verdict(draw == i % 2, 1.0)) for draw in range(2)] for i in range(5)}
    assert drawn == expected and list(drawn) == list(expected)
    assert Store(tmp_path / "set.jsonl", HEADER).of(map(str, range(5)), 2) == expected
    rows = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert {(row["prompt"], row["draw"]): row["response"] for row in rows} == {
        (str(i), draw): f"{i}/{draw}" for i in range(5) for draw in range(2)
    }
    assert progress == sorted(progress) and progress[-1][1] == 10


def test_what_is_graded_is_stored_while_the_rest_is_drawn(tmp_path):
    def dying(queue):
        for number, finished in enumerate(scripted(queue)):
            if number == 2:
                raise KeyboardInterrupt
            yield finished

    with pytest.raises(KeyboardInterrupt), Store(tmp_path / "set.jsonl", HEADER) as store:
        response_store.draw(
            prompts(5), dying, verify, 2, slots=4, deterministic=True, store=store, on_progress=lambda *_: None
        )
    # Six responses came back: those of three prompts.
    assert list(Store(tmp_path / "set.jsonl", HEADER).of(map(str, range(5)), 2)) == ["0", "1", "2"]
