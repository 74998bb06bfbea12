"""The preparation command: kills and resumes, failed rewards, and what it refuses."""

import hashlib
import json
import re
import shutil
import signal

import pytest

from reinforce_ada_jax import cli, prepare
from reinforce_ada_jax.analysis.inputs import read_histogram
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.prompts import load_problems
from reinforce_ada_jax.training import components as components_lib
from tests import standins
from tests.evaluation.test_evaluate import ENGINE, REWARD, bad_files, four_answers
from tests.forked import Forked
from tests.running import cipher_file, environment, killed_after, refused, tiny


def run(source, output, *, band=(0.0, 0.313), samples=4, **changes):
    prepare.main(tiny(**ENGINE | changes), str(source), output, band, samples)


def refusal(capsys, *arguments, **options) -> str:
    """Returns the message of a command that refuses its input."""
    err = refused(capsys, run, *arguments, **options).err
    assert "error: " in err and "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(output) -> the running command, on 192 problems, 16 responses side by side."""
    folder = tmp_path_factory.mktemp("shared")
    source = cipher_file(folder / "words.jsonl", 192)
    flags = ["--config=configs/tiny.py", f"--input={source}", "--samples=8", "--max_pass_rate=0.5"]
    flags += ["--config.sampling.slots=16", "--config.sampling.window=4"]

    def start(output):
        return Forked(["-m", "reinforce_ada_jax.prepare", *flags, f"--output={output}"], environment())

    return start


@pytest.mark.slow  # test_evaluate.py has the same kills of what draws and stores for both commands
def test_killed_twice_it_chooses_the_same_prompts(start, tmp_path):
    names = ("prompts.jsonl", "prompts.manifest.json")
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    whole, broken = (tmp_path / folder / names[0] for folder in ("whole", "broken"))
    out, err = start(whole).communicate(timeout=300)
    assert re.search(r"prompts: (\d+)/\1 \[", err) and "0 < pass rate <= 0.5 are in" in out
    stored = broken.with_suffix(".draws") / "responses.jsonl"
    killed_after(start(broken), stored, 100)
    process = start(broken)
    err = killed_after(process, stored, stored.read_bytes().count(b"\n") + 200, signal.SIGINT)
    assert process.returncode == cli.INTERRUPTED and "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"error: interrupted. Graded responses are stored in {stored.parent}; the same command again goes on from "
        "there."
    )
    assert 300 <= stored.read_bytes().count(b"\n") < 192 * 8 and not broken.exists()
    out, err = start(broken).communicate(timeout=300)
    assert "of them stored)" in out
    for name in names:
        assert (broken.parent / name).read_bytes() == (whole.parent / name).read_bytes()


def test_what_is_written(tmp_path, monkeypatch, capsys):
    """Prompts in the band, their manifest, and all draws are written."""
    source, output = tmp_path / "words.jsonl", tmp_path / "prompts.jsonl"
    problems = cipher.problems("heldout")[:48]
    longer = {"id": "long", "problem": "А" * 9, "answer": "x"}
    again = problems[3] | {"id": "again", "problem": f" {problems[3]['problem']}\n"}
    rows = [problem | {"level": index % 2} for index, problem in enumerate(problems)]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, longer, again]))
    run(source, output)
    shown = capsys.readouterr().out
    manifest = json.loads(output.with_suffix(".manifest.json").read_text())
    counts = manifest["counts"]
    assert (counts["read"], counts["duplicate"], counts["too_long"], counts["reference_fails"]) == (50, 1, 1, 0)
    assert counts["read"] == sum(counts.values()) - counts["read"]  # nothing is lost
    assert sum(manifest["histogram"]) == 48
    assert manifest["histogram"][1] == counts["kept"] > 0  # of 4 draws only 1 is in 0 < p <= 0.313
    assert manifest["histogram"][0] == counts["pass_rate_too_low"]
    for key, file in (("input", source), ("output", output)):
        assert manifest[key]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert manifest["seed"] == 0 and manifest["config"]["data"]["prompts"] == str(source)
    assert "stops on 2 '<eos>'" in shown and f"kept {counts['kept']}" in shown and "\n    0.250 *" in shown
    # What training reads: the problems in their order, with the pass rate and the label.
    chosen = load_problems(str(output))
    for problem in chosen:
        assert problem.pop("origin") and problem.pop("columns").keys() == {*problem, "level"} - {"labels"}
    stored = [json.loads(line) for line in (tmp_path / "prompts.draws" / "responses.jsonl").read_text().splitlines()]
    right = {problem["id"]: 0 for problem in problems}
    for row in stored:
        right[row["prompt"]] += row["correct"]
    expected = [
        problem | {"pass_rate": 0.25, "labels": {"level": str(index % 2)}}
        for index, problem in enumerate(problems)
        if right[problem["id"]] == 1
    ]
    assert chosen == expected and len(stored) == 4 * 48
    assert read_histogram(output)[0].tolist() == [0.25] * len(expected)

    # Another band needs no draws; one in which nothing can lie says so and leaves the files as they are.
    standins.not_called(monkeypatch, components_lib, "load_params")
    before = output.read_bytes()
    nothing = refusal(capsys, source, output, band=(0.26, 0.4))
    assert "pass rates are multiples of 1/4, and none has 0.26 < pass rate <= 0.4. No prompt could be kept" in nothing
    assert output.read_bytes() == before
    run(source, output, band=(0.25, 1.0))
    assert len(load_problems(str(output))) == sum(manifest["histogram"][2:])
    # Other draws would be another model's, seed's or number's.
    assert "samples: 4 -> 8" in refusal(capsys, source, output, samples=8)
    assert "seed: 0 -> 1" in refusal(capsys, source, output, seed=1)


def test_rewards_that_fail_leave_their_prompts_out(tmp_path, capsys):
    reward, output = tmp_path / "mine.py", tmp_path / "prompts.jsonl"
    reward.write_text(REWARD)
    source = four_answers(tmp_path / "four.jsonl")
    changes = {"reward.path": f"{reward}:grade", "reward.workers": 2, "reward.time_limit_s": 0.5}
    changes |= {"lora.rank": 4, "model.compute_dtype": "bfloat16"}  # the model that is drawn from has no adapters
    run(source, output, band=(0.0, 1.0), **changes)
    manifest = json.loads(output.with_suffix(".manifest.json").read_text())
    assert manifest["counts"]["reference_fails"] == 3 and manifest["histogram"] == [0, 0, 0, 0, 1]
    assert [(problem["answer"], problem["pass_rate"]) for problem in load_problems(str(output))] == [("fine", 1.0)]
    before = output.read_bytes()
    run(source, output, band=(0.0, 1.0), **changes | {"model.compute_dtype": "auto"})  # that of the responses
    assert output.read_bytes() == before
    nothing = refusal(capsys, source, output, band=(0.0, 0.5), **changes)
    assert "no prompt has 0 < pass rate <= 0.5, so nothing is written. Move --min_pass_rate" in nothing
    assert output.read_bytes() == before
    rows = [json.loads(line) for line in (tmp_path / "prompts.draws" / "references.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == ["", "error", "error", "timeout"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("malformed", "malformed.jsonl, line 2: not valid JSON"),
        ("twice", "twice.jsonl, lines 1 and 2: both have id 'heldout-0000'"),
        ("unanswered", "unanswered.jsonl, line 1: no answer: none of"),
        ("empty", "empty.jsonl is empty"),
        ("long", "none of 1 prompts has at most 8 tokens: raise data.max_prompt_tokens"),
        ("none", "no file"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path, capsys, name, message):
    bad_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert message in refusal(capsys, tmp_path / f"{name}.jsonl", tmp_path / "out.jsonl")
    assert sorted(tmp_path.iterdir()) == before


def test_what_else_is_refused(tmp_path, capsys):
    source, output = tmp_path / "words.jsonl", tmp_path / "prompts.jsonl"
    cipher_file(source, 2)
    assert "--samples is 0" in refusal(capsys, source, output, samples=0)
    assert "--min_pass_rate is 0.5 and --max_pass_rate 0.2" in refusal(capsys, source, output, band=(0.5, 0.2))
    assert "exists and was not written by this command" in refusal(capsys, source, source)
    assert "must end with .jsonl" in refusal(capsys, source, tmp_path / "prompts.json")
    unknown = refusal(capsys, source, output, **{"data.template": "fancy"})
    assert "data.template is 'fancy'; it must be one of plain, qwen_math, chat" in unknown
    folder = shutil.copytree(components_lib.ASSETS / "cipher", tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"]["€"] = 133
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    beyond = refusal(capsys, source, output, **{"model.path": str(folder)})
    assert "has 134 tokens, the model's embedding only 133 rows" in beyond
    assert not output.exists() and not output.with_suffix(".draws").exists()


def test_references_none_of_which_passes(tmp_path, capsys):
    source = cipher_file(tmp_path / "words.jsonl", 2)
    # The answers are words; the reward looks for numbers.
    said = refusal(capsys, source, tmp_path / "prompts.jsonl", **{"reward.kind": "gsm8k"})
    assert "none of 2 reference answers passes its own verification by 'gsm8k': choose the reward" in said
