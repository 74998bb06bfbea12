"""`evaluate` and `prepare` in a bucket whose server fails and answers late: the files of a folder."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.data.prompts import load_problems
from reinforce_ada_jax.evaluation.response_store import GradedResponse, ResponseStore, drawn_with
from reinforce_ada_jax.types import Prompt, Verdict
from tests import hosts
from tests.bucket_server import Buckets, needs_gcsfs, serving
from tests.evaluation.test_hosts import contents, evaluate, prepare
from tests.running import cipher_file, tiny

pytestmark = needs_gcsfs


def downloaded(server: Buckets, url: str) -> dict[str, bytes]:
    return {name: server.read(f"{url}/{name}") for name in server.names(url)}


def test_stored_responses_in_a_bucket_are_graded_again(tmp_path):
    words = cipher_file(tmp_path / "words.jsonl", 2)
    problems, config = load_problems(words), tiny()
    prompts = [Prompt(each["id"], each["problem"], each["answer"], np.zeros(0, np.int32)) for each in problems]
    drawn = drawn_with(config, "a model", config.evaluation, 2, prompts, iteration=0)
    with ResponseStore(tmp_path / "stored" / "words.jsonl", {"drawn": drawn, "graded": {"reward": "another"}}) as store:
        for problem in problems:
            right = GradedResponse(3, False, Verdict(False, 0.0))
            store.add([(problem["id"], 0, problem["answer"], right), (problem["id"], 1, "?", right)])
    server, url = Buckets(error_share=0.05), "gs://runs/evaluations/cipher"
    for name, content in contents(tmp_path / "stored").items():
        server.write(f"{url}/{name}", content)
    with serving(server) as address:
        command = ["-m", "reinforce_ada_jax.evaluate", "--config=configs/tiny.py", "--model=package:cipher"]
        command += ["--regrade", f"--benchmarks={words}", f"--output={url}"]
        (out,) = hosts.finished(hosts.start(command, 1, devices=1, env=address))
    found = downloaded(server, url)
    assert f"responses and table.md are in {url}, results in {url}/results.json" in out
    assert found.keys() == {"words.jsonl", "words.header.json", "table.md", "results.json"}
    rows = [json.loads(line) for line in found["words.jsonl"].splitlines()]
    assert [row["correct"] for row in rows] == [True, False, True, False]
    assert json.loads(found["results.json"])["evaluation/words/avg"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("latency_s", "count"), [(0.0, 1), (0.2, 2)], ids=["faulty", "faulty and late, two processes"])
def test_a_bucket_gets_the_files_of_a_folder(tmp_path, latency_s, count):
    words, here, server = cipher_file(tmp_path / "words.jsonl", 48), tmp_path / "here", Buckets(latency_s, 0.05)
    here.mkdir()
    with serving(server) as address:
        for command, name in ((evaluate, "evaluated"), (prepare, "prompts.jsonl")):
            hosts.finished(hosts.start(command(words, here / name), 1, devices=2))
            hosts.finished(hosts.start(command(words, f"gs://runs/new/{name}"), count, devices=2, env=address))
    assert downloaded(server, "gs://runs/new") == contents(here)
