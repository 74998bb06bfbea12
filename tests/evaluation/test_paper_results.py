import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.evaluation import paper_results
from tests.running import tiny


def test_weighted_averages_are_those_of_their_columns():
    # A slip in a digit would show: each average is that of four rounded averages weighted by problems, up to 0.16. Of
    # three rows the paper's own averages are farther off.
    tables = {"easy": paper_results.AVERAGES, "hard": paper_results.ON_HARD_PROMPTS}
    assert [len(rows) for rows in tables.values()] == [17, 6]
    off = {
        (name, *key): round(float(np.average(columns, weights=list(paper_results.SETS.values())) - average), 2)
        for name, rows in tables.items()
        for key, (*columns, average) in rows.items()
    }
    assert {key: value for key, value in off.items() if abs(value) > 0.16} == {
        ("easy", "Qwen2.5-Math-7B", "positive", 4): -0.18,
        ("hard", "Qwen2.5-Math-1.5B", "positive", 4): -0.3,
        ("hard", "Qwen2.5-Math-1.5B", "balance", 4): 0.23,
    }


def test_a_run_that_the_paper_lacks_has_no_row():
    assert paper_results.rows("Qwen2.5-Math-1.5B", "ngu", 4) == paper_results.rows("cipher", "balance", 4) == []
    (row,) = paper_results.rows("Qwen2.5-Math-1.5B", "grpo", 16)
    assert row.averages["math500"] == pytest.approx(0.769)


def test_rows_of_a_run(tmp_path):
    assert paper_results.rows_of_run(tmp_path) == []
    changes = {"model.path": "models/Qwen2.5-Math-7B", "collection.strategy": "estimate"}
    (tmp_path / "config.json").write_text(config_lib.to_json(tiny(**changes)))
    assert paper_results.rows_of_run(tmp_path) == paper_results.rows("Qwen2.5-Math-7B", "estimate", 4) != []
