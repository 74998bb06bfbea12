"""`bench.serve`: a server, its engine alone, and the client in a process of its own, on a toy model."""

import pytest

pytest.importorskip("tinker")
from bench import command_line, serve
from tests.bench.test_rollout import parsed


@pytest.mark.slow
def test_the_server_beside_its_engine():
    arguments = "--shape=16x1 --slots=4 --requests=6 --prompt_tokens=3 --response_tokens=20 --page_size=8 --repeat=1"
    found = command_line.measured(serve.run, parsed(*arguments.split()))
    assert found["requests"] == 6 and found["tokens"] == 120
    for name in ("engine", "base", "adapter", "client"):
        assert found[f"{name}_cpu_s"] > 0
    assert found["base_ratio"] == found["base_cpu_s"] / found["engine_cpu_s"]
