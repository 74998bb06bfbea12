"""The processes below one that starts and ends threads."""

import os
import subprocess
import sys
import threading

import pytest

from reinforce_ada_jax.isolation import process_tree


def starts_and_ends(child_of, started, end):
    """Starts a child, and ends when told: its children then pass to another thread."""
    child_of.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))
    started.set()
    end.wait()


@pytest.mark.skipif(not process_tree.SUPPORTED, reason="Linux only")
def test_a_child_is_found_while_the_thread_that_started_it_ends():
    for _ in range(100):
        child_of, started, end = [], threading.Event(), threading.Event()
        threads = [threading.Thread(target=end.wait) for _ in range(20)]
        threads.append(threading.Thread(target=starts_and_ends, args=(child_of, started, end)))
        for thread in threads:
            thread.start()
        started.wait()
        end.set()
        found = [process_tree.descendants(os.getpid()) for _ in range(5)]
        with child_of[0] as child:
            child.kill()
        for thread in threads:
            thread.join()
        assert all(child.pid in pids for pids in found)
