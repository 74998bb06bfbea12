"""Tokenizer of a Hugging Face folder, and prompts made from problems.

Reads the vocabulary files of a model (`vocabularies`) and the JSON files beside them. AutoTokenizer is not used,
because it may silently replace a custom tokenizer. No code of the folder runs except its chat template, in a sandbox
(`templates`).
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from reinforce_ada_jax.data.templates import CHAT, Chat, read_template, render_chat, takes_tools
from reinforce_ada_jax.data.vocabularies import (
    SentencePieceVocabulary,
    native_errors,
    read_vocabulary,
    token_text,
    vocabulary_file,
)
from reinforce_ada_jax.files import gguf, gguf_tokenizer, model_files

# A base model prompted in ChatML often ends with <|im_end|>, which its files do not name as an end token.
CHATML_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")

TEMPLATES = ("plain", "qwen_math", "chat")


def _stop_ids(folder: pathlib.Path, vocabulary: Any, special_tokens: dict[str, str]) -> tuple[int, ...]:
    """Returns every id that ends a response, sorted: those that the folder's files name, and those of ChatML."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = (model_files.read_json(folder / name) or {}).get("eos_token_id")
        if eos is not None:
            named = eos if isinstance(eos, list) else [eos]
            if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in named):
                raise ValueError(f"{folder / name} has eos_token_id = {eos!r:.80}; it must be a token id, or a list.")
            ids.update(named)
    tokens = [special_tokens["eos_token"]] if "eos_token" in special_tokens else []
    if vocabulary.token_to_id("<|im_start|>") is not None:
        tokens += [token for token in CHATML_STOP_TOKENS if vocabulary.token_to_id(token) is not None]
    for token in tokens:
        token_id = vocabulary.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{folder}: tokenizer_config.json names the end token {token!r:.80}, which tokenizer.json does not "
                "have. Copy both files from the same model."
            )
        ids.add(token_id)
    if not ids:
        raise ValueError(
            f"{folder} names no end token, so every response would run to its length limit: set eos_token in "
            "tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Tokenizer of a model folder, with its stop tokens and chat template."""

    folder: pathlib.Path  # where it was loaded from
    vocab_size: int  # one more than the largest token id. A model may have more embedding rows
    stop_ids: tuple[int, ...]  # every id that ends a response, sorted
    special_tokens: dict[str, str]  # "bos_token", "eos_token", ... to their text
    chat_template: str | None  # Jinja source, or None
    _tokenizer: tokenizers.Tokenizer | SentencePieceVocabulary

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "Tokenizer":
        """Returns the tokenizer of a Hugging Face folder or a GGUF file; ValueError when a file can't be read."""
        folder = pathlib.Path(folder)
        if (file := gguf.find(folder)) is not None:
            with tempfile.TemporaryDirectory() as written:
                gguf_tokenizer.write(file, pathlib.Path(written))
                try:
                    return dataclasses.replace(cls.load(written), folder=folder)
                except ValueError as error:  # its text names a temporary folder, which is gone when the user reads it
                    raise ValueError(str(error).replace(written, str(file))) from error
        vocabulary_file(folder)  # first: a folder without a vocabulary is not a model's
        config = model_files.read_json(folder / "tokenizer_config.json")
        if config is None:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'} is missing: it holds the special tokens and the chat template. "
                "Copy it from the model's folder."
            )
        vocabulary = read_vocabulary(folder, config)
        special_tokens: dict[str, str] = {}
        if isinstance(vocabulary, SentencePieceVocabulary):
            special_tokens |= vocabulary.special_tokens
        else:
            # A file may have a length limit or padding from its training; a prompt is never cut.
            vocabulary.no_truncation()
            vocabulary.no_padding()
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special_tokens |= {name: token_text(config[name]) for name in names if config.get(name)}
        return cls(
            folder=folder,
            vocab_size=1 + max(vocabulary.get_vocab().values()),
            stop_ids=_stop_ids(folder, vocabulary, special_tokens),
            special_tokens=special_tokens,
            chat_template=read_template(folder, config),
            _tokenizer=vocabulary,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " T"]:
        """Returns the tokens of a text, with the special tokens (BOS) that the folder's files put before it.

        Raises ValueError where the vocabulary lacks a character, and has no token for unknown ones.
        """
        with native_errors(f"the tokenizer of {self.folder} can't encode {text[:40]!r}; remove what it lacks"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"

    def decode(self, tokens: Int[np.ndarray, " T"]) -> str:
        """Returns the text of tokens without special tokens; ids beyond the vocabulary have no text."""
        with native_errors(f"the tokenizer of {self.folder} can't decode {len(tokens)} tokens"):
            return self._tokenizer.decode([int(token) for token in tokens])

    def render_text(self, problem: str, chat: Chat, messages: list[dict[str, str]] | None = None) -> str:
        """Returns the text of a prompt in the model's chat template, with special tokens as text.

        Messages are those of `chat` around the problem, or `messages`; ValueError if no template renders them.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self.folder} has no chat template, and only data.template='plain' needs none: set it, or copy the "
                "template of the model's instruct version there as chat_template.jinja."
            )
        try:
            messages = messages or chat.messages(problem)
            return render_chat(self.chat_template, messages, self.special_tokens, chat.date, chat.tools)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"The chat template of {self.folder} can't render a system and a user message ({error}): copy another "
                "one there as chat_template.jinja, or set data.template='plain' and prepare the problems' text."
            ) from error

    def render_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Returns the text of a conversation of any roles, and of the tools that the model may call.

        Raises ValueError where there is no template, it knows no tools, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template: send a prompt without roles.")
        try:
            if tools and not takes_tools(self.chat_template):
                raise ValueError("the chat template of the model knows no tools: leave them out.")
            return render_chat(self.chat_template, messages, self.special_tokens, tools=tools)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of the model refuses these messages ({error!s:.300}).") from error

    def render(
        self, problem: str, template: str, chat: Chat = CHAT, messages: list[dict[str, str]] | None = None
    ) -> Int32[np.ndarray, " T"]:
        """Returns the tokens of the prompt for a problem.

        Args:
          problem: its text.
          template: "plain": the problem alone; "qwen_math": the paper's system message and instruction in the model's
            chat template; "chat": the messages of `chat` in that template.
          chat: system message, instruction, date and tools; "qwen_math" uses date and tools only.
          messages: the problem's own messages, rendered in place of those of `template`, which must not be "plain".
        """
        if template not in TEMPLATES:
            raise ValueError(f"template is {template!r}; it must be one of {', '.join(TEMPLATES)}.")
        if template == "plain":
            if messages is not None:
                raise ValueError(
                    f"the problem {problem[:40]!r} has messages of its own, which data.template='plain' can't render: "
                    "use 'chat' or 'qwen_math'."
                )
            return self.encode(problem)
        if template == "qwen_math":
            chat = Chat(date=chat.date, tools=chat.tools)
        # The template writes BOS itself where the model has one; the post-processor would add a second.
        return self.encode(self.render_text(problem, chat, messages), add_special_tokens=False)
