"""Stored responses come back, cut and damaged lines are found, and another reward grades them again."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.evaluation import response_store
from reinforce_ada_jax.evaluation.response_store import GradedResponse, ResponseStore
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.types import Prompt, Verdict
from tests import standins
from tests.running import tiny

HEADER = {"drawn": {"seed": 0, "samples": 2, "system": ""}, "graded": {"reward": "math", "answers": "a"}}
RIGHT, WRONG = GradedResponse(3, False, Verdict(True, 1.0)), GradedResponse(8, True, Verdict(False, 0.25, "no_answer"))


def prompts(*names: str, answer: str = "") -> list[Prompt]:
    return [Prompt(name, "", answer, np.zeros(1, np.int32)) for name in names]


def entries(*names: str):
    """Two responses of each prompt: right and wrong."""
    return [(name, draw, f"½\u2028 {name}", graded) for name in names for draw, graded in enumerate((RIGHT, WRONG))]


@pytest.fixture
def file(tmp_path):
    """A store with the prompts a and b."""
    file = tmp_path / "some" / "set.jsonl"
    with ResponseStore(file, HEADER) as store:
        store.add(entries("a"))
        store.add(entries("b"))
    return file


def test_what_is_stored_comes_back(file):
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
    assert rows[1] == {
        "prompt": "a", "draw": 1, "response": "½\u2028 a", "tokens": 8, "truncated": True,
        "correct": False, "reward": 0.25, "reason": "no_answer", "penalty": 0.0,
    }  # fmt: skip
    store = ResponseStore(file, HEADER)
    assert store.complete(prompts(*["b", "c", "a"]), 2) == {"b": [RIGHT, WRONG], "a": [RIGHT, WRONG]}
    assert store.complete(prompts(*["a"]), 3) == {} and len(store) == 4


def test_nothing_is_written_before_it_is_entered(tmp_path):
    ResponseStore(tmp_path / "folder" / "set.jsonl", HEADER)
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_short_is_dropped(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])  # all but the line break: it may have been longer
    store = ResponseStore(file, HEADER)
    assert store.complete(prompts(*["a", "b"]), 2) == {"a": [RIGHT, WRONG]}
    with store:
        store.add(entries("b"))  # draw 0 is there already
    assert file.read_bytes() == whole


def test_a_line_in_the_middle_that_cannot_be_read(file):
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"prompt": "a"}', *lines[2:]]))
    with pytest.raises(ValueError, match=r"set.jsonl, line 2 is not a stored response .*Remove the line"):
        ResponseStore(file, HEADER)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "drawn",
            {"seed": 1},
            r"drawn with other settings \(stored -> now\):\n  seed: 0 -> 1\nContinue .*another --output",
        ),
        ("drawn", {"samples": 4, "top_k": 0}, r"  samples: 2 -> 4\n  top_k: absent -> 0\n"),
        ("graded", {"reward": "gsm8k"}, r"graded differently \(stored -> now\):\n  reward: math -> gsm8k\n.*--regrade"),
    ],
)
def test_responses_of_another_header_are_refused(file, part, change, message):
    with pytest.raises(ValueError, match=message):
        ResponseStore(file, HEADER | {part: HEADER[part] | change})


def test_a_file_without_its_header_and_a_header_without_its_file(file):
    header = file.with_suffix(".header.json")
    text = header.read_text()
    header.unlink()
    with pytest.raises(ValueError, match=r"set.header.json is missing"):
        ResponseStore(file, HEADER)
    header.write_text(text)
    file.unlink()
    other = HEADER | {"drawn": HEADER["drawn"] | {"seed": 1}}
    with ResponseStore(file, other):
        assert json.loads(header.read_text()) == other


def test_messages_name_the_bucket_and_not_the_copy_of_it_here(file):
    (file.parent / buckets.ORIGIN).write_text("gs://runs/mine")
    with pytest.raises(ValueError, match="^gs://runs/mine/set.jsonl holds responses that were graded differently"):
        ResponseStore(file, HEADER | {"graded": {"reward": "gsm8k"}})
    with ResponseStore(file, HEADER), pytest.raises(ValueError, match="^gs://runs/mine/set.jsonl is being written"):
        ResponseStore(file, HEADER).__enter__()
    with file.open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(ValueError, match="^gs://runs/mine/set.jsonl, line 5 is not a stored response"):
        ResponseStore(file, HEADER)
    with pytest.raises(ValueError, match="^there are no stored responses gs://runs/mine/other.jsonl"):
        response_store.read_header(file.with_name("other.jsonl"))


def test_one_process_at_a_time(file):
    with ResponseStore(file, HEADER), pytest.raises(ValueError, match=r"set.jsonl is being written by another process"):
        ResponseStore(file, HEADER).__enter__()
    with ResponseStore(file, HEADER):
        pass


def test_what_another_process_added_in_between_stays(file):
    store = ResponseStore(file, HEADER)
    with ResponseStore(file, HEADER) as other:
        other.add(entries("c"))
    with store:
        store.add(entries("c", "d"))
    assert list(ResponseStore(file, HEADER).complete(prompts(*"abcd"), 2)) == list("abcd")
    assert file.read_bytes().count(b"\n") == 8


def test_a_process_that_is_refused_leaves_the_header(tmp_path):
    """The header is that of the process that writes, also before its first response is there."""
    file, others = tmp_path / "set.jsonl", HEADER | {"drawn": HEADER["drawn"] | {"seed": 1}}
    with ResponseStore(file, HEADER) as first:
        second, third = ResponseStore(file, others), ResponseStore(file, others)
        with pytest.raises(ValueError, match="is being written by another process"):
            second.__enter__()
        first.add(entries("a"))
    assert len(ResponseStore(file, HEADER)) == 2
    with pytest.raises(ValueError, match="drawn with other settings"):  # it was empty when `third` read it
        third.__enter__()
    with ResponseStore(file, HEADER):
        pass


def test_a_folder_has_the_responses_of_one_model(tmp_path):
    """Folders of two models may have one name, and so one default folder of responses."""

    def of(model):
        return HEADER | {"drawn": HEADER["drawn"] | {"model": model}}

    response_store.check_model(tmp_path / "none", "b")
    with ResponseStore(tmp_path / "x.jsonl", of("a")) as store:
        response_store.check_model(tmp_path, "b")  # it has no response yet
        store.add(entries("a"))
    response_store.check_model(tmp_path, "a")
    with pytest.raises(ValueError, match="x.jsonl holds responses of another model .*give another --output"):
        response_store.check_model(tmp_path, "b")
    (tmp_path / "x.jsonl").unlink()
    response_store.check_model(tmp_path, "b")


def test_regrade(file, monkeypatch):
    """All stored responses are graded again, some at a time."""
    standins.constants(monkeypatch, response_store, REGRADED_AT_ONCE=3)
    now = HEADER | {"graded": {"reward": "gsm8k", "answers": "b"}}
    store = ResponseStore(file, now, regrade=True)
    asked = []

    def grade(texts, lengths):
        asked.append((texts, lengths))
        return [Verdict(length == 8, 0.5, "timeout") for length in lengths]

    with store:
        assert list(store.regrade(grade)) == [3, 4]
    texts = ["½\u2028 a", "½\u2028 a", "½\u2028 b", "½\u2028 b"]
    assert asked == [
        (list(zip("aab", texts[:3], strict=True)), [3, 8, 3]),
        (list(zip("b", texts[3:], strict=True)), [8]),
    ]
    again = ResponseStore(file, now).complete(prompts(*["a", "b"]), 2)
    expected = [
        GradedResponse(3, False, Verdict(False, 0.5, "timeout")),
        GradedResponse(8, True, Verdict(True, 0.5, "timeout")),
    ]
    assert again == store.complete(prompts(*["a", "b"]), 2) == {"a": expected, "b": expected}
    with pytest.raises(ValueError, match=r"reward: gsm8k -> math"):
        ResponseStore(file, HEADER)
    assert sorted(path.name for path in file.parent.iterdir()) == ["set.header.json", "set.jsonl"]


def test_a_kill_during_regrading_leaves_what_was_there(file):
    def interrupted(pairs, lengths):
        raise KeyboardInterrupt

    before = file.read_bytes()
    store = ResponseStore(file, HEADER | {"graded": {"reward": "gsm8k", "answers": "b"}}, regrade=True)
    with store, pytest.raises(KeyboardInterrupt):
        list(store.regrade(interrupted))
    assert file.read_bytes() == before
    assert ResponseStore(file, HEADER).complete(prompts(*["a"]), 2)


def test_a_reward_function_that_was_edited_is_another_one(tmp_path):
    reward = tmp_path / "mine.py"
    config = tiny(**{"reward.path": f"{reward}:grade", "reward.workers": 1})
    reward.write_text("def grade(response, answer): return 1")
    before = response_store.graded_by(config, "", prompts("id", answer="x"))
    assert response_store.graded_by(config, "", prompts("id", answer="x")) == before
    assert response_store.graded_by(config, "", prompts("id", answer="y")) != before
    reward.write_text("def grade(response, answer): return 0")
    assert response_store.graded_by(config, "", prompts("id", answer="x")) != before
    # The benchmark's own grader is not in that file.
    assert response_store.graded_by(config, "gsm8k", prompts("id", answer="x"))["file"] == ""


def test_an_environment_that_was_edited_makes_other_responses(tmp_path):
    game = tmp_path / "game.py"

    def drawn(**changes):
        settings = {"environment.path": f"{game}:Game", "environment.max_turns": 3} | changes
        config = tiny(**settings)
        return response_store.drawn_with(config, "a model", config.evaluation, 2, prompts("id"))

    game.write_text("class Game: tries = 1")
    before = drawn()
    assert drawn() == before and drawn(**{"environment.max_turns": 4}) != before
    assert drawn(**{"environment.max_turn_tokens": 8}) != before
    assert not {"environment", "max_turns"} & drawn(**{"environment.path": ""}).keys()
    game.write_text("class Game: tries = 2")
    assert drawn() != before
