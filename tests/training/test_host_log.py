"""The log of a process in the work directory: its lines with the time, without progress, over several starts."""

import re
import sys

import pytest

from reinforce_ada_jax.training import host_log


def lines(workdir):
    text = (workdir / "logs" / "host-0.log").read_text()
    times = [re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", line) for line in text.splitlines()]
    assert all(times), text
    return [line[20:] for line in text.splitlines()]


def test_what_is_printed_is_in_the_log_too(tmp_path, capsys):
    outputs = sys.stdout, sys.stderr
    with host_log.copying(tmp_path, "begins after iteration 3"):
        print("one\n\ntwo")
        # As tqdm writes: a progress line, a line above it, the progress line again, and its end.
        sys.stderr.write("\r3 of 8")
        sys.stderr.write("\r      \rwarning: below\n\r3 of 8\r4 of 8")
        sys.stderr.write("\n")
        host_log.add("told to end")
    assert (sys.stdout, sys.stderr) == outputs
    begin, *printed = lines(tmp_path)
    assert re.fullmatch(r"process 0 of 1, \d+ on \S+ with \d+ x cpu: begins after iteration 3", begin)
    assert printed == ["one", "two", "warning: below", "4 of 8", "told to end"]
    out, err = capsys.readouterr()
    assert out == "one\n\ntwo\n" and err.startswith("\r3 of 8\r      \rwarning: below\n") and "told" not in err


def test_another_start_adds_and_an_error_is_there_with_its_trace(tmp_path):
    with host_log.copying(tmp_path, "begins"):
        print("first")
    with pytest.raises(RuntimeError, match="no more"), host_log.copying(tmp_path, "begins"):
        raise RuntimeError("no more")
    found = lines(tmp_path)
    assert (
        found[1] == "first" and "Traceback (most recent call last):" in found and found[-1] == "RuntimeError: no more"
    )


def test_without_a_log_nothing_is_written(tmp_path, capsys):
    host_log.add("nowhere")
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())
