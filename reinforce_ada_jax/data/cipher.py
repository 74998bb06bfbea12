"""Built-in task "decipherment": problems, and the tokenizer.

64 symbols (Cyrillic letters) stand for 64 letters (the base64 alphabet) under one fixed secret key. A problem is a word
of 2 to 6 symbols, the answer is the deciphered word. Held-out words use the symbols of the training words, so they
measure composition, not new facts. A model learns the task in minutes on two CPU cores. `rewards.cipher` grades it.
"""

import functools
import json
import pathlib
import string

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from reinforce_ada_jax.data.problems import Problem
from reinforce_ada_jax.files.gguf_tokenizer import begin_with

SYMBOLS = "".join(chr(code) for code in range(0x410, 0x450))
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
MIN_LENGTH, MAX_LENGTH = 2, 6
SPLIT_SIZES = {"train": 1024, "heldout": 256}

# Seeds of independent random streams.
_KEY_SEED, _WORDS_SEED = 2510, 4996


@functools.cache
def key() -> np.ndarray:
    """Returns the secret, int[64], a permutation: symbol i stands for letter `key()[i]`."""
    return np.random.default_rng(_KEY_SEED).permutation(len(SYMBOLS))


def decipher(word: str) -> str:
    """Returns the answer to a word of symbols."""
    return "".join(LETTERS[key()[SYMBOLS.index(symbol)]] for symbol in word)


def problem_text(word: str) -> str:
    """Returns the prompt for a word: the word, padded with "." to 6 characters, then "="; 8 tokens with BOS."""
    return word.ljust(MAX_LENGTH, ".") + "="


@functools.cache
def words(split: str) -> tuple[str, ...]:
    """Returns the distinct words of a split, lengths uniform in 2..6; the splits have no word in common."""
    if split not in SPLIT_SIZES:
        raise ValueError(f"cipher has no split {split!r}; it must be one of {', '.join(SPLIT_SIZES)}.")
    rng = np.random.default_rng(_WORDS_SEED)
    distinct: dict[str, None] = {}  # a dict keeps the order in which the words were drawn
    while len(distinct) < sum(SPLIT_SIZES.values()):
        length = rng.integers(MIN_LENGTH, MAX_LENGTH + 1)
        distinct["".join(SYMBOLS[i] for i in rng.integers(len(SYMBOLS), size=length))] = None
    drawn, num_train = tuple(distinct), SPLIT_SIZES["train"]
    return {"train": drawn[:num_train], "heldout": drawn[num_train:]}[split]


def problems(split: str) -> list[Problem]:
    """Returns the problems of "train" (1,024) or "heldout" (256)."""
    return [
        Problem(id=f"{split}-{i:04d}", problem=problem_text(word), answer=decipher(word))
        for i, word in enumerate(words(split))
    ]


def tokenizer_json() -> str:
    """Returns a character-level tokenizer as the text of a `tokenizer.json`.

    133 tokens: <pad> 0, <bos> 1, <eos> 2, ".", "=", the symbols, the letters. Encoding prepends <bos>, decoding joins
    without spaces. There is no unknown token: any other character is an error.
    """
    vocabulary = [*SPECIAL_TOKENS, ".", "=", *SYMBOLS, *LETTERS]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    begin_with(tokenizer, "<bos>")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str(pretty=True)


def write_tokenizer(folder: str | pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers' PreTrainedTokenizerFast loads too."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(tokenizer_json() + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
