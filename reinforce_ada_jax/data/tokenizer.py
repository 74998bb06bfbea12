r"""Text to tokens and back, from a Hugging Face folder, and the prompt templates.

Reads `tokenizer.json` through `tokenizers`, and the JSON files beside it. There is no AutoTokenizer, which may silently
put another tokenizer in place of a custom one, and no code from the folder but its chat template, in a sandbox.
"""

import dataclasses
import datetime
import json
import pathlib
from typing import Any, Self

import numpy as np
import tokenizers
from jinja2 import exceptions
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The wording of the paper's runs: system message, and what follows the problem in the user's message.
QWEN_MATH_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
QWEN_MATH_SUFFIX = r" Let's think step by step and output the final answer within \boxed{}."

# Llama's templates print today's date otherwise, and a run would not be its seed. This is the day they fall back on.
TEMPLATE_DATE = datetime.date(2024, 7, 26)

# A base model prompted in ChatML tends to end on <|im_end|>, which its own files do not name as an end.
CHATML_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file."""
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): copy it from the model's folder again.") from error


def _required(file: pathlib.Path, purpose: str) -> pathlib.Path:
    if not file.is_file():
        raise ValueError(
            f"{file} is missing: it holds {purpose}. Name a Hugging Face folder that has it; a slow tokenizer's files "
            "are converted once with transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    return file


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named tokens of a tokenizer_config.json ("bos_token": ...); an entry is a string or {"content": string}."""
    entries = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    return {name: entry["content"] if isinstance(entry, dict) else entry for name, entry in entries.items()}


def _stop_ids(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    """Every id that ends a response, sorted: those that any of the folder's files names, and ChatML's own."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            ids.update(eos if isinstance(eos, list) else [eos])
    tokens = [special_tokens["eos_token"]] if "eos_token" in special_tokens else []
    if tokenizer.token_to_id("<|im_start|>") is not None:
        tokens += [token for token in CHATML_STOP_TOKENS if tokenizer.token_to_id(token) is not None]
    for token in tokens:
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{folder}: tokenizer_config.json names the end token {token!r}, which tokenizer.json does not have. "
                "Copy both files from the same model."
            )
        ids.add(token_id)
    if not ids:
        raise ValueError(
            f"{folder} names no end token, so every response would run to its length limit: set eos_token in "
            "tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def _chat_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    """The folder's chat template or None. A file of its own goes before tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def render_chat(template: str, messages: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
    """The text of a conversation, ending where the assistant is to begin.

    The Jinja environment is that of transformers' `apply_chat_template`, but for the date, which is pinned.
    """

    def raise_exception(message: str) -> None:
        raise exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment.from_string(template).render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
        **special_tokens,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and what its folder says about prompting.

    Attributes:
      folder: where it was loaded from.
      vocab_size: one more than the largest token id. A model may have more embedding rows.
      stop_ids: every id that ends a response, sorted.
      special_tokens: "bos_token", "eos_token", ... to their text.
      chat_template: Jinja source, or None.
    """

    folder: pathlib.Path
    vocab_size: int
    stop_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
    _tokenizer: tokenizers.Tokenizer

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> Self:
        """The tokenizer of a Hugging Face folder; ValueError names what is missing, what for, and the remedy."""
        folder = pathlib.Path(folder)
        file = _required(folder / "tokenizer.json", "the vocabulary and the rules that split text into tokens")
        config = _read_json(_required(folder / "tokenizer_config.json", "the special tokens and the chat template"))
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the class that `tokenizers` raises
            raise ValueError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error
        # A file may carry a length limit or padding from its training; a prompt is never cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_tokens = _special_tokens(config)
        return cls(
            folder=folder,
            vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
            stop_ids=_stop_ids(folder, tokenizer, special_tokens),
            special_tokens=special_tokens,
            chat_template=_chat_template(folder, config),
            _tokenizer=tokenizer,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """int32[T], with the special tokens (BOS) that the folder's own post-processor adds."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def token(self, token_id: int) -> str:
        """The written form of one id."""
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"

    def decode(self, tokens: np.ndarray) -> str:
        """The text of int[T] tokens without special tokens; ids beyond the vocabulary have none."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def render(self, problem: str, template: str) -> np.ndarray:
        """int32[T], the prompt for a problem.

        Args:
          problem: its text.
          template: "plain" is the problem as it is; "qwen_math" the paper's system message and instruction in the
            model's own chat template.
        """
        if template == "plain":
            return self.encode(problem)
        if template != "qwen_math":
            raise ValueError(f"template is {template!r}; it must be one of plain, qwen_math.")
        if self.chat_template is None:
            raise ValueError(
                f"{self.folder} has no chat template, which data.template='qwen_math' needs: put the one of the "
                "model's instruct version there as chat_template.jinja, or set data.template='plain'."
            )
        messages = [
            {"role": "system", "content": QWEN_MATH_SYSTEM},
            {"role": "user", "content": problem + QWEN_MATH_SUFFIX},
        ]
        try:
            text = render_chat(self.chat_template, messages, self.special_tokens)
        except exceptions.TemplateError as error:
            raise ValueError(
                f"The chat template of {self.folder} can't render a system and a user message ({error}): put another "
                "one there as chat_template.jinja, or set data.template='plain' and prepare the problems' text."
            ) from error
        # The template writes BOS itself where the model has one; the post-processor would add a second.
        return self.encode(text, add_special_tokens=False)
