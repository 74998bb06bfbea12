"""Vocabulary files of models, read into objects with the methods of `tokenizers.Tokenizer`.

`tokenizers` reads `tokenizer.json`, `vocab.json` with `merges.txt`, and a `tokenizer.model` of tiktoken's ranks (Llama
3), whose merges follow from its ranks. `sentencepiece` reads a SentencePiece `tokenizer.model` (Llama 2).
"""

import base64
import contextlib
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, pre_tokenizers

from reinforce_ada_jax.files import model_files
from reinforce_ada_jax.files.gguf_tokenizer import begin_with, byte_pairs

# Rules that split text (`gguf_tokenizer.PRE_TOKENIZERS`), by the class of the tokenizer.
_BYTE_PAIR_RULES = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}

# The 256 special tokens after the ranks in Llama 3.1, 3.2 and 3.3, for folders that do not list them.
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(3, 248)),
)  # fmt: skip

_NO_BEGINNING = "its texts begin with bos_token, which is no token of its vocabulary; copy all files of the same model"

# Appended to a serialised model, `normalizer_spec { add_dummy_prefix: false }`: later fields win in protobuf.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@contextlib.contextmanager
def native_errors(message: str) -> Iterator[None]:
    """Raises ValueError with the message for any error of `tokenizers`, whose panics are no subclass of Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{message} ({' '.join(str(error).split()):.200}).") from error


class Encoding(NamedTuple):
    """Ids of a text, as in `tokenizers.Encoding`."""

    ids: list[int]


class SentencePieceVocabulary:
    """SentencePiece model and the tokens added to it, with the methods of `tokenizers.Tokenizer` used here.

    Added tokens are split off before the model encodes the rest. White space after a token with `rstrip`, or before one
    with `lstrip`, is the token's. As in transformers' LlamaTokenizer, the space that SentencePiece puts before a text
    is put at its beginning only, unless the folder's config has `legacy`.
    """

    def __init__(self, file: pathlib.Path, config: dict[str, Any], added: list[tokenizers.AddedToken], ids: list[int]):
        """Reads the model; `ids` are those of `added`. ValueError when the model has another token at one of them."""
        import sentencepiece  # noqa: PLC0415  (only for models that need it)

        proto = file.read_bytes()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
            # The same without the space before the text; used after an added token, and for models without that space.
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=proto + _NO_DUMMY_PREFIX)
        except Exception as error:  # classes from C++
            raise ValueError(
                f"{file} is neither a SentencePiece model nor tiktoken's ranks ({error}): copy it again."
            ) from error
        if config.get("add_prefix_space") is False:
            self._model = self._inner
        self._after_added = self._model if config.get("legacy") else self._inner
        num_pieces = len(self._model)
        self._pieces = {self._model.id_to_piece(index): index for index in range(num_pieces)}
        unknown = self._model.unk_id()
        self._special = {index for index in range(num_pieces) if index == unknown or self._model.is_control(index)}
        self._added = {self._model.id_to_piece(index): index for index in sorted(self._special)}
        for token, index in zip(added, ids, strict=True):
            if self._pieces.get(token.content, num_pieces) != min(index, num_pieces):
                raise ValueError(
                    f"{file} has {num_pieces} pieces and {self._pieces.get(token.content)} for {token.content!r}, "
                    f"tokenizer_config.json says {index}: copy both files from the same model."
                )
            self._added[token.content] = index
            if token.special:
                self._special.add(index)
        self._content = {index: content for content, index in self._added.items()}
        # The longest first, because an added token may begin with another one.
        longest = sorted(self._added, key=lambda content: (-len(content), content))
        before = {token.content: r"\s*" for token in added if token.lstrip}
        after = {token.content: r"\s*" for token in added if token.rstrip}
        patterns = (f"{before.get(each, '')}({re.escape(each)}){after.get(each, '')}" for each in longest)
        self._added_pattern = re.compile("|".join(patterns))
        bos, eos = self._model.bos_id(), self._model.eos_id()
        model_ids = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": self._model.pad_id()}
        self.special_tokens = {name: self._model.id_to_piece(index) for name, index in model_ids.items() if index >= 0}
        self._before = [bos] if bos >= 0 and config.get("add_bos_token", True) else []
        self._after = [eos] if eos >= 0 and config.get("add_eos_token", False) else []

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Returns the ids of a text, including those of added tokens in it."""
        ids: list[int] = []
        model, position = self._model, 0
        for match in self._added_pattern.finditer(text):
            ids += model.encode(text[position : match.start()])
            ids.append(self._added[match[match.lastindex or 0]])
            model, position = self._after_added, match.end()
        ids += model.encode(text[position:])
        return Encoding([*self._before, *ids, *self._after] if add_special_tokens else ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids: U+FFFD for an incomplete character, nothing for special or unknown ids."""
        text: list[str] = []
        model, pieces = self._model, []
        for index in ids:
            if index in self._special:
                continue
            if index in self._content:
                text += [model.decode(pieces), self._content[index]]
                model, pieces = self._inner, []
            elif index < len(self._model):
                pieces.append(index)
        return "".join([*text, model.decode(pieces)])

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of an added token or a piece, None where there is no such token."""
        return self._added.get(token, self._pieces.get(token))

    def id_to_token(self, index: int) -> str | None:
        """Returns the text of an id, None beyond the vocabulary."""
        if index in self._content:
            return self._content[index]
        return self._model.id_to_piece(index) if index < len(self._model) else None

    def get_vocab(self) -> dict[str, int]:
        return self._pieces | self._added


def _added_tokens(folder: pathlib.Path, config: dict[str, Any]) -> tuple[list[tokenizers.AddedToken], list[int]]:
    """Returns the tokens added to a vocabulary, in the order of their ids, and the ids."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    decoder = config.get("added_tokens_decoder", {})
    # Older folders have a file, and all of its tokens are special.
    added = (model_files.read_json(folder / "added_tokens.json") or {}) if decoder == {} else {}
    with native_errors(f"{folder}: its added tokens are no table of ids and texts"):
        entries = {int(index): entry for index, entry in decoder.items()}
        special = {"special": True, "normalized": False}
        entries |= {index: {"content": token, **special} for token, index in added.items()}
        ids = sorted(entries)
        tokens = [
            tokenizers.AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
            for entry in (entries[index] for index in ids)
        ]
    return tokens, ids


def _add(
    tokenizer: tokenizers.Tokenizer, tokens: list[tokenizers.AddedToken], ids: list[int], folder: pathlib.Path
) -> None:
    """Adds tokens; ValueError if one gets another id than in `ids`. A new token gets the next free id."""
    tokenizer.add_tokens(tokens)
    for token, index in zip(tokens, ids, strict=True):
        given = tokenizer.token_to_id(token.content)
        if given != index:
            raise ValueError(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {index}, after the vocabulary it "
                f"would have {given}: copy all files from the same model."
            )


def _check_ids(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Raises ValueError when an added token of tokenizer.json has another id than tokenizer_config.json says.

    `tokenizers` numbers added tokens that are not in the vocabulary one after another, whatever ids the file gives.
    """
    if not config.get("added_tokens_decoder"):
        return
    for token, index in zip(*_added_tokens(folder, config), strict=True):
        given = tokenizer.token_to_id(token.content)
        if given not in (index, None):
            raise ValueError(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {index}, tokenizer.json gives it "
                f"{given}: copy both files from the same model."
            )


# The replacements of a tokenizer may make at most this number of letters of one letter. Published tokenizers replace a
# space by one letter.
MAX_EXPANSION = 1000


def _expansion(step: dict[str, Any]) -> int:
    """Returns the most letters that a normalizer or a decoder may make of one letter, from its JSON."""
    steps = step.get("normalizers") or step.get("decoders") or []
    letters = len(step["content"]) if step["type"] == "Replace" else 1
    return max(1, letters) * math.prod(map(_expansion, steps))


def _tokenizer_json(file: pathlib.Path) -> tokenizers.Tokenizer:
    with native_errors(f"{file} is not a tokenizer that `tokenizers` can read: copy it again"):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        parts = [
            json.loads(part.__getstate__()) for part in (tokenizer.normalizer, tokenizer.decoder) if part is not None
        ]
    if max(map(_expansion, parts), default=1) > MAX_EXPANSION:
        raise ValueError(
            f"{file}: its replacements may make more than {MAX_EXPANSION:,} letters of one. Use a model from where you "
            "trust it."
        )
    return tokenizer


def _byte_pairs(folder: pathlib.Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Returns the byte-level tokenizer of vocab.json and merges.txt: that of Qwen2 and Qwen3, or of GPT-2."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name not in _BYTE_PAIR_RULES:
        raise ValueError(
            f"{folder} has vocab.json and merges.txt, and tokenizer_config.json names the class {name!r:.80}. The "
            f"pattern that splits text is known for {', '.join(_BYTE_PAIR_RULES)} only: add its tokenizer.json."
        )
    with native_errors(f"{folder}: vocab.json and merges.txt are not byte pairs; copy both"):
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = byte_pairs(model, _BYTE_PAIR_RULES[name])
    if name == "GPT2Tokenizer" and config.get("add_prefix_space"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    _add(tokenizer, *_added_tokens(folder, config), folder)
    if config.get("add_bos_token"):
        with native_errors(f"{folder}: {_NO_BEGINNING}"):
            begin_with(tokenizer, token_text(config["bos_token"]))
    return tokenizer


def token_text(entry: Any) -> str:
    """Returns the text of an entry such as "bos_token" of tokenizer_config.json: a string, or {"content": string}."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(f"tokenizer_config.json names the token {entry!r:.80}, which is not text: copy it again.")
    return text


def _byte_letters() -> list[str]:
    """Returns the letter of each byte in `tokenizers` (GPT-2's table): itself where it prints, else U+0100 and on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


# Most base64 characters of a token, because all of its splits are tried. Llama 3's longest token has 128 bytes.
MAX_RANK_BYTES = 2048
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")


def _ranks(file: pathlib.Path) -> dict[bytes, int]:
    """Returns the tokens of a file of lines "base64 rank", in the order of their ranks."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            if len(token) > MAX_RANK_BYTES:
                raise ValueError(f"a token of {len(token):,} characters in base64")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not a base64 token and rank ({error}). Copy it again.") from error
    if list(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file}: the ranks are not 0 to {len(ranks) - 1}, each once and in order. Copy it again.")
    return ranks


def _tiktoken(folder: pathlib.Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a Llama-3 `tokenizer.model`: byte pairs merged by rank, which is the id.

    Two tokens may be merged if the result is a token; the result of the lowest rank comes first. So the list of merges
    has all splits of all tokens, by the token's rank (transformers' TikTokenConverter). It takes 1.6 s for 128,000
    tokens.
    """
    ranks = _ranks(folder / "tokenizer.model")
    letters = _byte_letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += ((written[left], written[right]) for left, right in pairs)
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = byte_pairs(models.BPE(vocabulary, merges, ignore_merges=True), "llama-bpe")
    added, ids = _added_tokens(folder, config)
    if not added:
        added = [tokenizers.AddedToken(token, special=True, normalized=False) for token in LLAMA3_SPECIAL_TOKENS]
        ids = list(range(len(ranks), len(ranks) + len(added)))
    _add(tokenizer, added, ids, folder)
    if config.get("add_bos_token", True):
        with native_errors(f"{folder}: {_NO_BEGINNING}"):
            begin_with(tokenizer, token_text(config.get("bos_token", LLAMA3_SPECIAL_TOKENS[0])))
    return tokenizer


def vocabulary_file(folder: pathlib.Path) -> pathlib.Path:
    """Returns the first of tokenizer.json, vocab.json (with merges.txt) and tokenizer.model; ValueError for none."""
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",)):
        if all(model_files.is_present(folder / name) for name in names):
            return folder / names[0]
    raise ValueError(
        f"{folder / 'tokenizer.json'} is missing: it has the vocabulary and the rules that split text into tokens. "
        "Name a Hugging Face folder that has it, or vocab.json with merges.txt, or tokenizer.model."
    )


def read_vocabulary(folder: pathlib.Path, config: dict[str, Any]) -> tokenizers.Tokenizer | SentencePieceVocabulary:
    """Returns the vocabulary of a model folder with this tokenizer_config.json; ValueError when it can't be read."""
    file = vocabulary_file(folder)
    if file.name == "tokenizer.json":
        tokenizer = _tokenizer_json(file)
        _check_ids(tokenizer, folder, config)
        return tokenizer
    if file.name == "vocab.json":
        return _byte_pairs(folder, config)
    with file.open("rb") as content:
        is_ranks = _RANK_LINE.match(content.read(4096))
    if is_ranks:
        return _tiktoken(folder, config)
    return SentencePieceVocabulary(file, config, *_added_tokens(folder, config))
