"""Shapes of micro-batches."""

from reinforce_ada_jax.learning.micro_batches import micro_batches


def test_shapes_are_few_and_the_longest_come_first():
    assert list(micro_batches([3, 40, 16, 17, 1])) == [([1, 3, 2, 0, 4], (16, 64))]  # 1, 4, 16 rows; 16, 32, 64 tokens
    batches = list(micro_batches([3000] * 3 + [9] * 300))
    assert [shape for _, shape in batches] == [(1, 4096)] * 3 + [(256, 16), (64, 16)]
    assert [indices for indices, _ in batches[:3]] == [[0], [1], [2]]
    assert list(micro_batches([5, 5], least_rows=8)) == [([0, 1], (8, 16))]
