"""A user's own Python file runs, and leaves nothing beside itself."""

import sys

import pytest

from reinforce_ada_jax import user_code


def test_a_file_runs_without_bytecode_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as for most users
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text("def treble(x):\n    return 3 * x\n")
    assert user_code.run(file).treble(2) == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


def test_an_interrupted_file_names_the_line_that_ran(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\nraise KeyboardInterrupt  # as Ctrl-C in an endless loop\n")
    with pytest.raises(KeyboardInterrupt), user_code.failures(file, "collection.strategy is 'mine.py:f'"):
        user_code.run(file)
    assert capsys.readouterr().err == f"note: {file} was running, line 2\n"
