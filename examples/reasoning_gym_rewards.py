"""Rewards of two generators of reasoning-gym, without the package: 1 where the generator's own score is 1, else 0.

The generators also give partial scores: for some letters at their places, and for a way that is not the shortest.
"""

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def spell_backward(response: str, answer: str) -> float:
    """Returns 1 for the word spelled backward; capitals do not count."""
    return float(response.lower() == answer.lower())


def grid_of(problem: str) -> dict[tuple[int, int], str]:
    """Returns the cells of a question of `shortest_path`: (row, column) to "O", "X", "*" or "#"."""
    rows = problem.rpartition("grid:\n")[2].strip().split("\n")
    return {(row, column): cell for row, cells in enumerate(rows) for column, cell in enumerate(cells.split())}


def shortest_path(response: str, answer: str, problem: str) -> float:
    """Returns 1 for the generator's answer, and for every other way from * to # of its length."""
    if response.strip() == answer.strip():
        return 1.0
    grid, moves = grid_of(problem), response.split()
    row, column = next(place for place, cell in grid.items() if cell == "*")
    for move in moves:
        down, right = MOVES.get(move, (len(grid), 0))  # any other word leads out of the grid
        row, column = row + down, column + right
        if grid.get((row, column), "X") == "X":
            return 0.0
    return float(grid[row, column] == "#" and len(moves) == len(answer.split()))
