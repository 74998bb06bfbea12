"""`bench.long_responses`: costs by the length of responses, on a toy model."""

import pytest

from bench import command_line, long_responses
from tests import standins
from tests.bench.test_rollout import parsed


@pytest.mark.slow  # an engine to compile
def test_costs_of_one_length(monkeypatch):
    standins.constants(monkeypatch, long_responses, SHORTEST=256)
    arguments = "--shape=16x1 --slots=4 --page_size=8 --window=8 --prefill_tokens=32 --response_tokens=256"
    found = command_line.measured(long_responses.run, parsed(*arguments.split()))["256"]
    # Slots of 40 pages, for 64 + 256 tokens; 8 prompt rows of 40 pages, for 64 + 255.
    assert found["end"]["table_bytes"] == 4 * (4 * 40 + 8 * 40)
    # Of 16 rows: 8 tokens, 8 log-probabilities and three numbers; 8 prompt rows; a few numbers.
    assert 4 * (16 * 19 + 8) < found["end"]["report_bytes"] < 4 * (16 * 19 + 8 + 10)
    assert found["end"]["device_ms"] > 0 and found["begin"]["device_ms"] > 0
    # Four slots lack 32 tokens each, 16 pages, and find 8. Those with the fewest tokens begin again.
    assert 0 < found["end"]["redone_share"] < 2
