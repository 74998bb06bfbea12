"""Model folders that lie, hang or explode: a whole one, and a seeded harm of one of its files."""

import base64
import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from reinforce_ada_jax.policy import huggingface, tensor_table, weight_files

CONFIG = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
SMALL_FILES = (*JSON_FILES, "tokenizer.json", "chat_template.jinja")
Harm = Callable[[pathlib.Path, random.Random], str]


def write_whole(folder: pathlib.Path) -> pathlib.Path:
    """A model without any fault: byte-level tokens, weights of 0."""
    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(tokens, []))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": [1]})
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shapes = {name: part.theirs for name, part in tensor_table.parts(huggingface.read_config(folder)).items()}
    specs = {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}
    weight_files.write(folder, specs, lambda name: np.zeros(shapes[name], np.float32), 5e9)
    return folder


def write_json(file: pathlib.Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def edited(file: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    write_json(file, value)


# ---- files that are none ---------------------------------------------------------------------------------------------


def no_file(folder: pathlib.Path, rng: random.Random) -> str:
    name = rng.choice((*SMALL_FILES, "model.safetensors"))
    (folder / name).unlink()
    kind = rng.choice(("private", "device", "pipe", "folder", "loop"))
    if kind == "private":
        (folder.parent / "private").write_text('{"secret": 1}')
        (folder / name).symlink_to(rng.choice((folder.parent / "private", pathlib.Path("../private"))))
    elif kind == "device":
        (folder / name).symlink_to(rng.choice(("/dev/zero", "/dev/urandom")))
    elif kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name)
    return f"{name} is a {kind}"


def no_json(folder: pathlib.Path, rng: random.Random) -> str:
    name = rng.choice(JSON_FILES)
    whole = (folder / name).read_bytes()
    kind, content = rng.choice((
        ("cut", whole[: rng.randrange(1, len(whole) - 1)]),
        ("nested", b'{"a":' * rng.randrange(2_000, 100_000)),
        ("brackets", b"[" * rng.randrange(2_000, 100_000)),
        ("a list", b"[1]"), ("a number", b"1"), ("no UTF-8", b"\xff\xfe" + whole), ("empty", b""),
        ("digits", b'{"vocab_size": ' + b"9" * rng.randrange(5_000, 50_000) + b"}"),
        ("many lists", b'{"a": [' + b"[]," * 10**7 + b"[]]}"),
        ("large", b" " * 65 * 2**20 + b"{}"),
    ))  # fmt: skip
    (folder / name).write_bytes(content)
    return f"{name} is {kind}"


# ---- config.json -----------------------------------------------------------------------------------------------------

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")


def wrong_size(folder: pathlib.Path, rng: random.Random) -> str:
    key = rng.choice(SIZES)
    value = rng.choice((0, -1, 10**9, 2**63, 10**400, 1.5, "2", [], {}, True, None if key != "head_dim" else 0))
    edited(folder / "config.json", lambda config: config.update({key: value}))
    return f"{key} is {value!r:.40}"


def other_size(folder: pathlib.Path, rng: random.Random) -> str:
    """Sizes that are allowed, and are not those of the weights."""
    key, value = rng.choice((
        ("num_hidden_layers", rng.randrange(3, 4096)), ("hidden_size", 2 ** rng.randrange(6, 20)),
        ("intermediate_size", 2 ** rng.randrange(6, 22)), ("vocab_size", 2 ** rng.randrange(10, 24)),
        ("head_dim", 16), ("model_type", "qwen3"), ("model_type", "llama"), ("tie_word_embeddings", False),
    ))  # fmt: skip
    edited(folder / "config.json", lambda config: config.update({key: value}))
    return f"{key} is {value}"


def wrong_value(folder: pathlib.Path, rng: random.Random) -> str:
    key, value = rng.choice((
        ("model_type", "gpt2"), ("model_type", []), ("model_type", {}), ("hidden_act", "gelu"), ("rms_norm_eps", -1),
        ("rms_norm_eps", "1"), ("rms_norm_eps", float("nan")), ("rope_theta", 0), ("rope_theta", float("inf")),
        ("rope_scaling", 3), ("rope_scaling", {"rope_type": "yarn"}), ("rope_parameters", {"rope_type": []}),
        ("rope_parameters", {"rope_type": "llama3"}), ("eos_token_id", -1), ("eos_token_id", [[1]]),
        ("eos_token_id", 2**40), ("layer_types", 3), ("layer_types", [3]), ("use_sliding_window", 1),
        ("num_key_value_heads", 3), ("bos_token_id", "x"), ("mlp_bias", True),
        ("rope_parameters", {"rope_type": "llama3", "factor": {}, "low_freq_factor": 1, "high_freq_factor": 1,
                             "original_max_position_embeddings": 1}),
    ))  # fmt: skip
    edited(folder / "config.json", lambda config: config.update({key: value}))
    return f"{key} is {value!r}"


# ---- weights ---------------------------------------------------------------------------------------------------------


def with_header(folder: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def wrong_entry(folder: pathlib.Path, rng: random.Random) -> str:
    changed = {}

    def change(header: dict[str, Any]) -> None:
        name = rng.choice(sorted(set(header) - {"__metadata__"}))
        key, value = rng.choice((
            ("data_offsets", [-4, 124]), ("data_offsets", [0, 2 ** rng.randrange(40, 70)]), ("data_offsets", [8, 0]),
            ("data_offsets", ["0", "1"]), ("data_offsets", None), ("shape", [2**40, 2**40]), ("shape", [-1]),
            ("shape", [rng.randrange(10_000)]), ("shape", "x"), ("shape", [1] * rng.randrange(1000, 100_000)),
            ("dtype", "F128"), ("dtype", {}), ("dtype", "I64"), ("dtype", "I32"),
        ))  # fmt: skip
        header[name][key] = value
        changed[name] = f"{key} is {value!r:.40}"

    with_header(folder, change)
    return f"{changed}"


def more_tensors(folder: pathlib.Path, rng: random.Random) -> str:
    count, long = rng.randrange(1, 150_000), rng.randrange(1, 50)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    with_header(folder, lambda header: header.update({f"{'n' * long}\n{index}": entry for index in range(count)}))
    return f"{count} further tensors"


def fewer_tensors(folder: pathlib.Path, rng: random.Random) -> str:
    with_header(folder, lambda header: header.pop(rng.choice(sorted(set(header) - {"__metadata__"}))))
    return "a tensor is missing"


def cut_weights(folder: pathlib.Path, rng: random.Random) -> str:
    size = (folder / "model.safetensors").stat().st_size
    where = rng.choice((rng.randrange(16), rng.randrange(size), size - 1))
    os.truncate(folder / "model.safetensors", where)
    return f"cut at {where} of {size}"


def wrong_length(folder: pathlib.Path, rng: random.Random) -> str:
    length = rng.choice((0, 1, 2 ** rng.randrange(20, 64), rng.randrange(2, 500)))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.write(struct.pack("<Q", length))
    return f"a header of {length} bytes"


def wrong_numbers(folder: pathlib.Path, rng: random.Random) -> str:
    value, count = rng.choice((np.nan, -np.nan, np.inf, -np.inf)), rng.choice((1, 1, 100))
    with (folder / "model.safetensors").open("r+b") as stream:
        first = 8 + struct.unpack("<Q", stream.read(8))[0]
        for _ in range(count):
            stream.seek(first + 4 * rng.randrange((stream.seek(0, 2) - first) // 4))
            stream.write(np.float32(value).tobytes())
    return f"{count} weights are {value}"


def wrong_index(folder: pathlib.Path, rng: random.Random) -> str:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    shard = rng.choice(("../part.safetensors", "/etc/passwd", "a/b.safetensors", "none.safetensors", "a\0b.safetensors",
                        "x.bin", 3, None, ["part.safetensors"], "x" * 10_000 + ".safetensors"))  # fmt: skip
    index = rng.choice(({"weight_map": {"a": shard}}, {"weight_map": [shard]}, {"weight_map": shard}, [shard], {}))
    write_json(folder / "model.safetensors.index.json", index)
    return f"the index is {index!r:.60}"


def pickles_only(folder: pathlib.Path, rng: random.Random) -> str:
    name = rng.choice(("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"))
    (folder / "model.safetensors").rename(folder / name)
    return f"weights in {name}"


# ---- tokenizers and templates ----------------------------------------------------------------------------------------

BLOW_UP = "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s|KIND }}"
TEMPLATES = (
    BLOW_UP.replace("KIND", "tojson"), BLOW_UP.replace("KIND", "string"),
    BLOW_UP.replace("[n.s, n.s]", "{'a': n.s, 'b': n.s}").replace("KIND", "string"),
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{{ lipsum(n=10**6) }}", "{{ messages|slice(10**9)|list }}", "{{ messages|batch(10**9, 'x')|list }}",
    "{{ range(99999)|map('string')|map('center', 99999)|list|length }}", "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{% if %}", "{{ 1 / 0 }}",
    "{{ messages[0].content.x.y }}", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ (" * 50_000,
    "{{ range(10**7)|list|length }}", "{{ 'x' * 10**12 }}", "{{ 10 ** (10 ** 10) }}", "\ud800", "{{ '\ud800' }}",
)  # fmt: skip


def hostile_template(folder: pathlib.Path, rng: random.Random) -> str:
    index = rng.randrange(len(TEMPLATES))
    # A number of its own, so that no two are the same.
    text = f"{{# {rng.random()} #}}{TEMPLATES[index]}"
    (folder / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"template {TEMPLATES[index]!r:.60}"


NESTED: dict[str, Any] = {"type": "NFC"}
for _ in range(300):
    NESTED = {"type": "Sequence", "normalizers": [NESTED]}


def hostile_tokenizer(folder: pathlib.Path, rng: random.Random) -> str:
    replace = {"type": "Replace", "pattern": {"String": rng.choice("ae\u0436")}, "content": "aa"}
    parts = [{"Sequence": {"id": "A", "type_id": 0}}]
    many = {"type": "Sequence", "normalizers": [replace] * rng.randrange(10, 60)}
    key, value = rng.choice((
        ("normalizer", many),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * rng.randrange(2_000, 10**6)}),
        ("decoder", {"type": "Sequence", "decoders": many["normalizers"]}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        ("post_processor", {"type": "TemplateProcessing", "single": parts * rng.randrange(10**5, 10**6),
                            "pair": parts, "special_tokens": {}}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "x"}), ("model", {"type": "Unigram", "vocab": []}),
        ("model", {"type": "WordLevel", "vocab": {"<|im_end|>": 2**31, "a": 0}, "unk_token": "a"}),
        ("model", {"type": "None"}), ("model", None), ("added_tokens", [{"id": 10**6, "content": "x"}]),
        ("added_tokens", 3), ("version", "9.9"), ("model", {"type": "BPE", "vocab": {"a": 10**20}}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}), ("normalizer", NESTED),
    ))  # fmt: skip
    edited(folder / "tokenizer.json", lambda tokenizer: tokenizer.update({key: value}))
    return f"{key} is {value!r:.60}"


def cut_tokenizer(folder: pathlib.Path, rng: random.Random) -> str:
    size = (folder / "tokenizer.json").stat().st_size
    where = rng.randrange(size - 2)
    os.truncate(folder / "tokenizer.json", where)
    return f"tokenizer.json cut at {where} of {size}"


def wrong_names(folder: pathlib.Path, rng: random.Random) -> str:
    """tokenizer_config.json and generation_config.json of other types."""
    name, key, value = rng.choice((
        ("tokenizer_config.json", "eos_token", 3), ("tokenizer_config.json", "eos_token", {"content": []}),
        ("tokenizer_config.json", "eos_token", ["x"]), ("tokenizer_config.json", "eos_token", "no such token"),
        ("tokenizer_config.json", "eos_token", "x" * 10**6), ("tokenizer_config.json", "pad_token", {"a": 1}),
        ("generation_config.json", "eos_token_id", -1), ("generation_config.json", "eos_token_id", "1"),
        ("generation_config.json", "eos_token_id", [1, None]), ("generation_config.json", "eos_token_id", 2**33),
        ("generation_config.json", "eos_token_id", [[1]] * 10**5), ("generation_config.json", "eos_token_id", True),
    ))  # fmt: skip
    edited(folder / name, lambda config: config.update({key: value}))
    return f"{key} of {name} is {value!r:.60}"


def byte_pairs(folder: pathlib.Path, rng: random.Random) -> str:
    """vocab.json and merges.txt in place of tokenizer.json."""
    (folder / "tokenizer.json").unlink()
    vocabulary, merges = rng.choice((
        ("[]", ""), ('{"a": "b"}', ""), ('{"a": 0}', "#version: 0.2\na b\n"), ('{"a": 0}', "a\n" * 10), ("{", ""),
        ('{"a": -5}', ""), ('{"a": 0, "b": 1}', "x" * 10**6), ("", ""), ('{"a": 0}', "\ud800"),
    ))  # fmt: skip
    (folder / "vocab.json").write_text(vocabulary)
    (folder / "merges.txt").write_bytes(merges.encode("utf-8", "surrogatepass"))
    changes = rng.choice((
        {}, {"added_tokens_decoder": []}, {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": {"5": 3}},
        {"added_tokens_decoder": {"7": {"content": 3}}}, {"tokenizer_class": 3}, {"tokenizer_class": "Other"},
    ))  # fmt: skip
    edited(folder / "tokenizer_config.json", lambda config: config.update(changes))
    return f"vocab.json {vocabulary!r:.30}, merges.txt {merges!r:.30}, {changes}"


def tokenizer_model(folder: pathlib.Path, rng: random.Random) -> str:
    """A tokenizer.model in place of tokenizer.json: random bytes, or tiktoken's ranks."""
    (folder / "tokenizer.json").unlink()

    def line(token: bytes, rank: object) -> bytes:
        return base64.b64encode(token) + f" {rank}\n".encode()

    kind, content = rng.choice((
        ("random", rng.randbytes(rng.randrange(10, 10_000))), ("empty", b""), ("long", line(b"x" * 10**6, 0)),
        ("order", line(b"a", 1) + line(b"b", 0)), ("twice", line(b"a", 0) + line(b"a", 1)),
        ("text", line(b"a", "zero")), ("digits", line(b"a", "9" * 10_000)),
        ("lines", b"".join(line(b"%d" % number * 300, number) for number in range(3000))),
        ("fields", b"\x0a\xff\xff\xff\xff\x0f" + rng.randbytes(100)),
    ))  # fmt: skip
    (folder / "tokenizer.model").write_bytes(content)
    return f"tokenizer.model: {kind}"


HARMS: tuple[Harm, ...] = (
    no_file, no_json, wrong_size, other_size, wrong_value, wrong_entry, more_tensors, fewer_tensors, cut_weights,
    wrong_length, wrong_index, pickles_only, hostile_template, hostile_tokenizer, cut_tokenizer, wrong_names,
    byte_pairs, tokenizer_model, hostile_template, hostile_tokenizer, wrong_numbers,
)  # fmt: skip


def write(whole: pathlib.Path, folder: pathlib.Path, seed: int) -> str:
    """Writes a hostile copy of a whole folder, and returns what is wrong with it."""
    shutil.copytree(whole, folder)
    harm = HARMS[seed % len(HARMS)]
    return f"{harm.__name__}: {harm(folder, random.Random(seed))}"
