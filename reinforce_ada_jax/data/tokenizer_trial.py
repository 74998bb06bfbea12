"""First use of a model folder's tokenizer and chat template, in a child process with limits on time and memory.

A vocabulary file may expand a letter to gigabytes, and a template is a program. Native code can't be interrupted, and
an allocation that fails aborts its process. So the files are loaded, one conversation is rendered and encoded, and
every token is decoded, in a process that may fail. The program of the child is
`python -m reinforce_ada_jax.data.tokenizer_trial FD FOLDER CHAT BYTES SECONDS`.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import socket
import string
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.templates import CHAT, Chat, read_template
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import gguf, model_files
from reinforce_ada_jax.isolation import child, messages

# A tokenizer.json of 24 MB with 262,000 tokens takes 2.3 s of a processor and 0.5 GB.
PROCESSOR_S, MEMORY_BYTES = 6, 10**9
DEADLINE_S = 120.0  # for machines that give the process little of a processor
_DECODED_TOKENS = 1024
# Letters, digits and signs of many scripts, runs that regular expressions with nested repetitions fail on, and blanks.
PROBE = (
    string.printable + "".join(map(chr, range(0xA0, 0x600))) + "数学の問題 математика ﷺ 🤖👩🏽‍🔬 "
    + "".join(letter * 64 + "!" for letter in "a1 .\n=") + "Let x = 1/2. What is 3x + \\frac{1}{4}? " * 20
)  # fmt: skip


def _is_built_in(folder: pathlib.Path) -> bool:
    """Returns True for a folder with the vocabulary of the built-in task and no template: both are known."""
    content = model_files.read_bytes(folder / "tokenizer.json")
    if content is None or content.strip() != cipher.tokenizer_json().encode():
        return False
    return read_template(folder, model_files.read_json(folder / "tokenizer_config.json") or {}) is None


def check(folder: pathlib.Path, chat: Chat = CHAT) -> None:
    """Loads the tokenizer of a folder once in a child process, and renders a conversation where there is a template.

    Mistakes in the files are left to `Tokenizer`, which says more about them. Raises ValueError, with one line, where
    loading takes too much time or memory, or crashes native code.
    """
    is_file = gguf.find(folder) is not None
    if not is_file and (not model_files.is_present(folder / "tokenizer_config.json") or _is_built_in(folder)):
        return
    asked = dataclasses.asdict(chat) | {"date": chat.date.isoformat()}
    arguments = [str(folder), json.dumps(asked), str(MEMORY_BYTES), str(PROCESSOR_S)]
    trial = child.start("reinforce_ada_jax.data.tokenizer_trial", arguments, os.devnull)
    try:
        message = trial.read(DEADLINE_S)
        problem = f"took more than {DEADLINE_S:g} s" if message is None else message.get("problem")
    except (EOFError, ConnectionError, messages.Malformed):
        problem = _how_it_ended(trial.end())
    finally:
        trial.kill()
    if problem:
        raise ValueError(
            f"{folder}: loading its tokenizer, or rendering and encoding one conversation, {problem!s:.300}. Use a "
            "model from where you trust it."
        )


def _how_it_ended(code: int | None) -> str:
    if code == -signal.SIGXCPU:
        return f"took more than {PROCESSOR_S} s of a processor"
    if code is not None and code < 0:
        return (
            f"ended its process by {signal.Signals(-code).name}, as where more than {MEMORY_BYTES / 1e9:g} GB is used"
        )
    return f"ended its process with exit code {code}"


def _reason(error: BaseException) -> str:
    """Returns why only a process with limits may read the files; "" for ordinary mistakes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return "used too much memory"
        if not isinstance(cause, Exception):  # a panic of native code
            return f"failed in native code ({cause!s:.150})"
        cause = cause.__cause__ or cause.__context__
    return ""


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function returns; None where it refuses its arguments, which is no reason to refuse the folder."""
    try:
        return function(*arguments)
    except ValueError as error:  # a letter that the vocabulary lacks, a template that takes no system message
        if _reason(error):
            raise
        return None


def _use(folder: pathlib.Path, chat: Chat) -> None:
    tokenizer = Tokenizer.load(folder)
    rendered = None if tokenizer.chat_template is None else _tried(tokenizer.render_text, PROBE, chat)
    for text in (PROBE, *PROBE.split(" "), rendered or ""):
        _tried(tokenizer.encode, text)
    for first in range(0, tokenizer.vocab_size, _DECODED_TOKENS):
        tokenizer.decode(np.arange(first, min(first + _DECODED_TOKENS, tokenizer.vocab_size)))


def main() -> None:
    descriptor, folder, asked, memory_bytes, processor_s = sys.argv[1:]
    child.confine(int(memory_bytes), int(processor_s))
    chat = json.loads(asked)
    chat = Chat(**chat | {"date": datetime.date.fromisoformat(chat["date"])})
    problem = ""
    try:
        _use(pathlib.Path(folder), chat)
    except BaseException as error:
        problem = " ".join(_reason(error).split())
    with socket.socket(fileno=int(descriptor)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(messages.to_line({"problem": problem}))


if __name__ == "__main__":
    main()
