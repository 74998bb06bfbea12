"""Model folders that lie: each a ValueError that names file and tensor or key, and nothing of theirs is run."""

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys

import pytest

from reinforce_ada_jax.files import model_files
from reinforce_ada_jax.policy import huggingface
from tests.policy.recording import GOLDEN

SOURCE = GOLDEN / "qwen2"
CONFIG = json.loads((SOURCE / "config.json").read_text())
WHOLE = (SOURCE / "model.safetensors").read_bytes()
LENGTH = struct.unpack("<Q", WHOLE[:8])[0]
HEADER, DATA = json.loads(WHOLE[8 : 8 + LENGTH]), WHOLE[8 + LENGTH :]
NAME, OTHER = "model.norm.weight", "model.layers.0.input_layernorm.weight"  # both float32[32]


def file_bytes(header, length: int | None = None) -> bytes:
    """A safetensors file with this header, an object or raw bytes, over the golden file's data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + DATA


def with_entry(**changes) -> bytes:
    return file_bytes(HEADER | {NAME: HEADER[NAME] | changes})


def doubled() -> bytes:
    text = json.dumps(HEADER)
    return file_bytes(f'{text[:-1]}, "{NAME}": {json.dumps(HEADER[OTHER])}}}'.encode())


def with_a_gap() -> bytes:
    return file_bytes({name: entry for name, entry in HEADER.items() if name != OTHER})


FILES = {
    "no header": b"1234567",
    "a header beyond the file": file_bytes(HEADER, length=2 * len(WHOLE)),
    "a header of 2**63 bytes": file_bytes(HEADER, length=2**63),
    "a header of 17 MiB": file_bytes(json.dumps(HEADER).encode().ljust(17 * 2**20)),
    "a header that is no JSON": file_bytes(b"{'a'}"),
    "a header that is no text": file_bytes(b"\xff\xfe"),
    "a header that is a list": file_bytes([]),
    "a header without a bottom": file_bytes(b'{"a":' * 50_000),
    "an entry that is none": file_bytes(HEADER | {NAME: 3}),
    "a negative offset": with_entry(data_offsets=[-4, 124]),
    "an offset beyond the file": with_entry(data_offsets=[2**62, 2**62 + 128]),
    "offsets beyond 64 bits": with_entry(data_offsets=[2**70, 2**70 + 128]),
    "an end before the beginning": with_entry(data_offsets=[128, 0]),
    "offsets that are no numbers": with_entry(data_offsets=["0", "128"]),
    "one offset": with_entry(data_offsets=[0]),
    "an unknown dtype": with_entry(dtype="F128"),
    "a dtype that is a list": with_entry(dtype=[]),
    "a dtype of another size": with_entry(dtype="I64"),
    "a shape of another size": with_entry(shape=[31]),
    "a huge shape": with_entry(shape=[2**40, 2**40]),
    "a negative shape": with_entry(shape=[-32]),
    "a shape of fractions": with_entry(shape=[32.0]),
    "a tensor twice": doubled(),
    "two tensors in one place": with_entry(data_offsets=HEADER[OTHER]["data_offsets"]),
    "bytes between tensors": with_a_gap(),
    "bytes behind all": WHOLE + b"PK" * 50,
    "an end that is missing": WHOLE[:-100],
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lies_about_itself(tmp_path, case):
    shutil.copy(SOURCE / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(FILES[case])
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is not a whole safetensors file .*Fetch it again"):
        huggingface.load(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    shutil.copy(SOURCE / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 988097824\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is a pointer of Git LFS, .* run git lfs pull"):
        huggingface.load(tmp_path)


def test_the_whole_file_is_read(tmp_path):
    """So the cases above are refused for what they change."""
    shutil.copy(SOURCE / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(file_bytes(HEADER))
    huggingface.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "24"),
        ("vocab_size", None),
        ("hidden_size", -1),
        ("hidden_size", True),
        ("num_hidden_layers", 10**12),  # names of as many tensors would take all memory
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 1.5),
        ("intermediate_size", 10**40),
        ("rms_norm_eps", "small"),
        ("rope_theta", []),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "llama3", "factor": "x"}),
        ("eos_token_id", {"a": 1}),
        ("eos_token_id", [-1]),
        ("bos_token_id", [1]),
        ("layer_types", 3),
        ("max_position_embeddings", "long"),
    ],
    ids=str,
)
def test_values_that_no_model_has(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": None, key: value}))
    with pytest.raises(ValueError, match=f"{tmp_path}: config.json has {key} = .*; it must be"):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "config.json is nested too deeply"),
        ('{"a":' * 200_000, "config.json is nested too deeply"),
        (f'{{"vocab_size": {"9" * 10_000}}}', "config.json is not JSON"),
        ('{"model_type": []}', r"model_type \[\]; supported"),
    ],
    ids=["list", "object", "digits", "type"],
)
def test_json_without_a_bottom(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        huggingface.read_config(tmp_path)


def test_json_that_is_too_long_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(model_files.MAX_JSON_BYTES + 1)  # a sparse file
    with pytest.raises(ValueError, match=r"config.json has 16,777,217 bytes, more than 16,777,216"):
        huggingface.read_config(tmp_path)


def test_a_cache_of_links_is_read(tmp_path):
    """As Hugging Face's, where a snapshot's files are links to blobs beside it. An index's names aren't."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors")):
        shutil.copy(SOURCE / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    huggingface.load(snapshot)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_nothing_but_safetensors_and_json_is_opened(tmp_path):
    """Pickles and Python files lie beside the weights, and leave a mark when they are run."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(GOLDEN.parents[2] / "reinforce_ada_jax" / "assets" / "cipher", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "model.pth", "optimizer.ckpt", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    program = (
        "import sys\n"
        "opened = []\n"
        "def hook(event, arguments):\n"
        "    if event in ('open', 'pickle.find_class', 'import'):\n"
        "        opened.append(str(arguments[0]))\n"
        "from reinforce_ada_jax.config import Config\n"
        "from reinforce_ada_jax.training import components as components_lib\n"
        "from reinforce_ada_jax.policy import huggingface\n"
        "sys.addaudithook(hook)\n"
        "config = components_lib.for_devices(Config())\n"
        f"components = components_lib.build(config, components_lib.model_folder({str(folder)!r}))\n"
        f"huggingface.load({str(folder)!r})\n"
        f"print(*(name for name in opened if name.startswith({str(folder)!r}) or 'evil' in name), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    opened = {os.path.basename(name) for name in done.stdout.split()}
    assert opened and all(name.endswith((".json", ".safetensors", ".jinja")) for name in opened), opened
    assert not marker.exists()
    with pytest.raises(FileExistsError):  # the mark is one
        marker.mkdir()
        pickle.loads((folder / "model.pkl").read_bytes())
