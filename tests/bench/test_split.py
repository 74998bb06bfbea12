"""`bench.split`: that the variants do the same work."""

import pytest

from bench import models, split, workloads
from tests.bench.test_iteration import SMALL
from tests.bench.test_rollout import parsed
from tests.running import tiny

LENGTHS = workloads.constant(4)


@pytest.mark.slow  # it compiles the programs of three runs
def test_a_split_and_taking_turns_do_the_same_work(capsys):
    config = tiny(**SMALL)
    found = split.measure(config, repeat=1, lengths=LENGTHS, architecture=models.shaped("16x1"), iterations=1)
    for name in ("split", "turns", "together"):
        one = found[name]
        assert one["iterations_per_s"] == pytest.approx(1 / one["seconds"]) and len(one["all_seconds"]) == 1
        assert one["draw_s"] > 0 and one["update_s"] > 0
    assert found["ratio"] == found["split"]["iterations_per_s"] / found["turns"]["iterations_per_s"]
    # 4 prompts of one or two rounds of 4 draws, 4 tokens each; two updates.
    assert 16 <= found["collection/responses"] <= 32 and found["update/count"] == 2
    assert found["split"]["tokens"] == pytest.approx(4 * found["collection/responses"], rel=0.03)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6 and said[0].startswith("0/1 split: ")


def test_what_is_refused():
    with pytest.raises(ValueError, match="--config is missing"):
        split.run(parsed())
