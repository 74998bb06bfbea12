"""Records the hashes of what transformers renders; run in the environment of `make parity`.

REINFORCE_ADA_DATA=../shared/data .venv-parity/bin/python -m tests.golden.templates.make_golden
"""

import datetime
import hashlib
import json
import pathlib

import tokenizers
import transformers
from tokenizers import models
from transformers.utils import chat_template_utils

from reinforce_ada_jax.data.templates import DATE
from tests.data import conversations

FILE = pathlib.Path(__file__).parent / "renderings.json"


class _Clock(datetime.datetime):
    """A clock that always shows `templates.DATE`."""

    @classmethod
    def now(cls, tz=None):
        return cls(DATE.year, DATE.month, DATE.day, tzinfo=tz)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """An empty tokenizer of transformers: a template needs only its special tokens."""
    empty = tokenizers.Tokenizer(models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=empty, **conversations.SPECIAL_TOKENS)


def rendered(
    theirs: transformers.PreTrainedTokenizerFast, template: str, messages: list, tools: list, date: datetime.date = DATE
) -> str | None:
    """Returns what transformers renders; None where the template refuses the conversation."""
    try:
        return theirs.apply_chat_template(
            messages, tools=tools or None, chat_template=template, tokenize=False, add_generation_prompt=True,
            date_string=date.strftime("%d %b %Y"),
        )  # fmt: skip
    except Exception:  # of the template, of any class
        return None


def hashed(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def main() -> None:
    chat_template_utils.datetime = _Clock
    theirs, recorded = tokenizer(), {}
    for file in conversations.published():
        template = file.read_text()
        texts = [rendered(theirs, template, *each) for each in conversations.CONVERSATIONS]
        hashes = [None if text is None else hashed(text) for text in texts]
        recorded[file.stem] = {"template": hashlib.sha256(file.read_bytes()).hexdigest(), "renderings": hashes}
    content = {"transformers": transformers.__version__, "templates": recorded}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
