"""A user's own Python file runs, and leaves nothing beside itself."""

import signal
import sys
import time

import pytest

from reinforce_ada_jax import user_code
from tests import standins


def test_a_file_runs_without_bytecode_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as for most users
    standins.import_paths(monkeypatch)
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


ENDS = """import sys
def leave():
    sys.exit(3)
def interrupt():
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leave", r"it called sys.exit\(3\), and must .* \(.*mine.py, line 3\)"),
        ("interrupt", "KeyboardInterrupt: .*line 5"),
    ],
)
def test_a_function_that_ends_the_command_has_failed(tmp_path, name, said):
    file = tmp_path / "mine.py"
    file.write_text(ENDS)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as in a run, where Ctrl-C raises no KeyboardInterrupt
    try:
        with pytest.raises(user_code.UserCodeError, match=f"learning.loss is 'mine', which failed: {said}"):
            user_code.load(f"{file}:{name}", "learning.loss is 'mine'")()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_function_stays_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import signal\ndef wait():\n    signal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        user_code.named(user_code.run(file).wait, file, "learning.loss is 'mine'")()


def test_a_file_that_does_not_end_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    standins.constants(monkeypatch, user_code, NOTE_AFTER_S=0.05)
    file = tmp_path / "mine.py"
    file.write_text("import time\ndef f():\n    time.sleep(1.0)\nf()\n")
    with user_code.failures(file, "collection.strategy is 'mine.py:f'"):
        user_code.run(file)
    said = f"note: {file} has been running for 0.05 s, now at line 3 (collection.strategy is 'mine.py:f')."
    assert capsys.readouterr().err == f"{said} Ctrl-C ends the command.\n"
    with user_code.failures(file, "collection.strategy is 'mine.py:f'"):
        time.sleep(0.2)  # this program's own work is no line of the file
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ndef mine(config): ...\n", 2),
        ("class mine:\n    def __init__(self, prompts): ...\n", 2),
        ("import functools\nmine = functools.partial(lambda config: ...)\n", 2),
    ],
)
def test_a_call_with_other_arguments_names_the_line_of_the_function(tmp_path, text, line):
    file = tmp_path / "mine.py"
    file.write_text(text)
    message = rf"which failed: .* positional arguments? but [23] were given \({file}, line {line}\)$"
    with pytest.raises(user_code.UserCodeError, match=message):
        user_code.load(f"{file}:mine", "collection.strategy is 'mine'")("prompts", "config")
    with pytest.raises(user_code.UserCodeError, match=message):
        user_code.named(user_code.run(file).mine, file, "collection.strategy is 'mine'")("prompts", "config")


@pytest.mark.parametrize("text", ["# f\xfcr\ndef f(): ...\n", "\n\n\ndef f(): return '\xfc'\n"])
def test_a_file_in_another_encoding_has_a_remedy(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"is not valid Python: .*\. Save it as UTF-8\.$"):
        user_code.check(file, "reward.path is 'mine.py:f'", "f")
