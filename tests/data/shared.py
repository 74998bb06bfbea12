"""Files of rows; and real tokenizers and benchmarks, from the folder that REINFORCE_ADA_DATA names (environment)."""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "REINFORCE_ADA_DATA"
SET = bool(os.environ.get(VARIABLE))
FOLDER = pathlib.Path(os.environ.get(VARIABLE, ""))

MARKS = [
    pytest.mark.data,
    pytest.mark.skipif(not SET, reason=f"real data: set {VARIABLE} to the folder with benchmarks/ and tokenizers/"),
]

# As published with Llama-3.2-3B-Instruct.
LLAMA3_GENERATION = {"eos_token_id": [128_001, 128_008, 128_009]}
LLAMA3_CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
QWEN_CONFIG = "tokenizer_config.math-base.json"
# Name: (vector file, {file here: file in tokenizers/}, tokenizer_config.json where there is no file).
TOKENIZERS = {
    "qwen2.5-math": (
        "qwen2.5",
        {"tokenizer.json": "qwen2.5/tokenizer.json", "tokenizer_config.json": f"qwen2.5/{QWEN_CONFIG}"},
        None,
    ),
    "qwen2.5-math-byte-pairs": (
        "qwen2.5",
        {
            "vocab.json": "qwen2.5/vocab.json",
            "merges.txt": "qwen2.5/merges.txt",
            "tokenizer_config.json": f"qwen2.5/{QWEN_CONFIG}",
        },
        None,
    ),
    "qwen3": (
        "qwen2.5",
        {name: f"qwen3/{name}" for name in ("vocab.json", "merges.txt", "tokenizer_config.json")},
        None,
    ),
    "llama3": (
        "llama3",
        {
            "tokenizer.model": "llama3/tokenizer.model",
            "chat_template.jinja": "templates/meta-llama-Llama-3.2-3B-Instruct.jinja",
        },
        LLAMA3_CONFIG,
    ),
    "llama2": ("llama2", {"tokenizer.model": "llama2/tokenizer.model"}, {}),
}


def write_rows(file: pathlib.Path, rows: Iterable[Any]) -> str:
    """Writes a JSONL file; a row that is a text is written unchanged."""
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def vectors(name: str) -> list[dict]:
    """46 pairs of text and ids, made by llama.cpp."""
    lines = (FOLDER / "tokenizers" / "vectors" / f"{TOKENIZERS[name][0]}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def model_folder(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A model's folder of one of the TOKENIZERS."""
    _, files, config = TOKENIZERS[name]
    folder.mkdir()
    for here, there in files.items():
        shutil.copyfile(FOLDER / "tokenizers" / there, folder / here)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if config is LLAMA3_CONFIG:
        (folder / "generation_config.json").write_text(json.dumps(LLAMA3_GENERATION))
    return folder
