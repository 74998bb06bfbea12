"""Writes the tokenizer of a GGUF file as the text files of a Hugging Face folder, in the formats of `tokenizers`.

Only byte-pair tokenizers are supported. A GGUF file names the rule that splits text before bytes are merged
(`tokenizer.ggml.pre`). The rules here are those of the published tokenizer.json files.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from reinforce_ada_jax.files import gguf

# Patterns that split text before bytes are merged: of Qwen2, Qwen2.5 and Qwen3, and of Llama 3.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def split_into_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Returns the rule that splits text by a pattern, and its parts into bytes."""
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def begin_with(tokenizer: tokenizers.Tokenizer, token: str) -> None:
    """Adds a token before every text that is encoded with special tokens."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: split_into_bytes(QWEN2_SPLIT),
    "llama-bpe": lambda: split_into_bytes(LLAMA3_SPLIT),
}


def byte_pairs(model: models.BPE, rule: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer that splits text by a rule of `PRE_TOKENIZERS`, and merges bytes."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[rule](), decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are split off before the rest is merged
# End tokens: of a text, of a turn, and of a message.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


class _Metadata:
    """Metadata of the tokenizer, checked as they are read."""

    def __init__(self, metadata: dict[str, Any]):
        self._metadata = metadata
        self.tokens = self.texts("tokens")
        self.kinds = self._metadata.get("tokenizer.ggml.token_type", [1] * len(self.tokens))
        if len(set(self.tokens)) != len(self.tokens):
            raise ValueError("a token of its vocabulary is there twice")
        if not isinstance(self.kinds, list) or len(self.kinds) != len(self.tokens):
            raise ValueError(f"tokenizer.ggml.token_type does not have a kind for each of {len(self.tokens):,} tokens")

    def get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def texts(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"its metadata lack a list of texts, tokenizer.ggml.{name}")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.get(name)
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise ValueError(f"tokenizer.ggml.{name} is {value!r:.40}, and it has {len(self.tokens):,} tokens")
        return value

    def first_id(self) -> int | None:
        """Returns the id of the token that begins every text; None if there is none."""
        # Published Llama 3 files leave the flag out; llama.cpp adds BOS by the rule, and the model was trained with it.
        adds = self._metadata.get("tokenizer.ggml.add_bos_token", self.get("pre") == "llama-bpe")
        if type(adds) is not bool:
            raise ValueError(f"tokenizer.ggml.add_bos_token is {adds!r:.40}, neither true nor false")
        begin = self.token_id("bos_token_id") if adds else None
        if adds and begin is None:
            raise ValueError("its texts begin with a token, and tokenizer.ggml.bos_token_id does not say which")
        return begin


def _tokenizer(metadata: _Metadata) -> tokenizers.Tokenizer:
    kind, pre = metadata.get("model"), metadata.get("pre")
    if kind != "gpt2":
        raise ValueError(
            f"its tokenizer is of the kind {kind!r:.40}, and only byte pairs ('gpt2') are read from GGUF: use the "
            "model's Hugging Face folder"
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"its tokenizer splits text by the rule {pre!r:.40}; those known are {', '.join(PRE_TOKENIZERS)}. Use the "
            "model's Hugging Face folder"
        )
    merges: list[Any] = [tuple(merge.split(" ")) for merge in metadata.texts("merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise ValueError("a merge of its tokenizer is no pair of tokens")
    begin = metadata.first_id()
    try:
        vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
        tokenizer = byte_pairs(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"), pre)
        for kind in (CONTROL, USER_DEFINED):
            of_kind = [token for token, each in zip(metadata.tokens, metadata.kinds, strict=True) if each == kind]
            tokenizer.add_tokens(
                [tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL) for token in of_kind]
            )
        if begin is not None:
            begin_with(tokenizer, metadata.tokens[begin])
    except Exception as error:  # the errors of `tokenizers` have no class of their own
        raise ValueError(f"its vocabulary and merges are not byte pairs ({error!s:.200})") from error
    return tokenizer


def write(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes a GGUF file's tokenizer and chat template into a folder, and generation_config.json with its end tokens.

    Raises ValueError where the file has no such tokenizer.
    """
    header = gguf.read(file)
    try:
        metadata = _Metadata(header.metadata)
        named = {name: metadata.token_id(key) for name, key in NAMED.items()}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {name: metadata.tokens[index] for name, index in named.items() if index is not None}
        config["clean_up_tokenization_spaces"] = False
        ends = sorted({index for key in ENDS if (index := metadata.token_id(key)) is not None})
        tokenizer = _tokenizer(metadata)
        template = header.metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ValueError("its chat template is not text")
    except ValueError as error:
        raise ValueError(f"{file}: {error}.") from error
    generation = {"bos_token_id": named["bos_token"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    texts = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    if template is not None:
        texts["chat_template.jinja"] = template
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
