import dataclasses
import json
import math
import os
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import huggingface, tensor_table, transformer, weight_files
from reinforce_ada_jax.policy.architecture import from_hf
from tests import standins
from tests.policy import recording

FAMILIES, GOLDEN = recording.FAMILIES, recording.GOLDEN


def assert_same(params, others):
    """Bitwise, dtypes included."""
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for name, value in transformer.flatten(params).items():
        other = transformer.flatten(others)[name]
        assert value.dtype == other.dtype, name
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other), err_msg=name)


def edited(tmp_path, tensors=None, config=None, family="qwen2"):
    """A copy of a golden folder; a value of None removes the tensor or the key."""
    folder = tmp_path / "edited"
    shutil.copytree(GOLDEN / family, folder)
    merged = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in merged.items() if value is not None}, folder / "model.safetensors")
    merged = json.loads((folder / "config.json").read_text()) | (config or {})
    kept = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_names_the_axes_of_every_weight(family):
    architecture = recording.golden(family)[0]
    sizes = tensor_table.axis_sizes(architecture)
    for name, (shape, _) in transformer.weight_shapes(architecture).items():
        assert shape == tuple(sizes[letter] for letter in tensor_table.table(architecture)[name][0].split()), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [5e9, 20_000])
def test_load_save_load_is_bitwise(tmp_path, family, max_shard_bytes):
    architecture, params, _ = recording.golden(family)
    huggingface.save(tmp_path / "saved", architecture, params, max_shard_bytes=max_shard_bytes)
    again, reloaded = huggingface.load(tmp_path / "saved")
    assert again == architecture
    assert_same(params, reloaded)
    # The library reads what we stream, and it is what transformers had written, tensor for tensor.
    files = weight_files.find(tmp_path / "saved")
    assert (len(files) == 1) == (max_shard_bytes == 5e9)
    ours = {name: tensor for file in files for name, tensor in load_file(file).items()}
    theirs = load_file(GOLDEN / family / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def test_shards_keep_to_their_limit_and_are_indexed(tmp_path):
    architecture, params, _ = recording.golden("qwen2")
    huggingface.save(tmp_path / "saved", architecture, params, max_shard_bytes=20_000)
    files = weight_files.find(tmp_path / "saved")
    assert [file.name for file in files] == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 20_000 for file in files)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * architecture.num_parameters
    assert all(name in load_file(tmp_path / "saved" / file) for name, file in index["weight_map"].items())


def test_a_tensor_beyond_the_shard_limit_stands_alone(tmp_path):
    architecture, params, _ = recording.golden("qwen2")
    huggingface.save(tmp_path / "saved", architecture, params, max_shard_bytes=1)
    assert len(weight_files.find(tmp_path / "saved")) == len(tensor_table.parts(architecture))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_other_dtypes_are_written_read_and_cast(tmp_path, dtype):
    architecture, params, _ = recording.golden("qwen3")
    narrow = jax.tree.map(lambda x: x.astype(dtype), params)
    huggingface.save(tmp_path / "saved", architecture, params, dtype=dtype)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name
    assert_same(huggingface.load(tmp_path / "saved", dtype=dtype)[1], narrow)
    assert_same(huggingface.load(tmp_path / "saved")[1], jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
    # Without an argument the files keep the dtype of the weights.
    huggingface.save(tmp_path / "again", architecture, narrow)
    assert_same(huggingface.load(tmp_path / "again", dtype=dtype)[1], narrow)


@pytest.mark.parametrize(("dtype", "strange"), [(jnp.float32, jnp.nan), (jnp.bfloat16, -jnp.inf)])
def test_a_weight_that_is_not_finite_is_named(tmp_path, monkeypatch, dtype, strange):
    architecture, params, _ = recording.golden("qwen2")
    params = jax.tree.map(lambda x: x, params)  # other tests have it
    down = params["layers"]["mlp"]["down"]
    params["layers"]["mlp"]["down"] = down.at[1, 2, 3].set(strange)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"nothing is exported: 1 of the .* of {name} are NaN.* earlier checkpoint"):
        huggingface.save(tmp_path / "saved", architecture, params, dtype=dtype)
    assert not any(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "check_finite", lambda *_: None)
        huggingface.save(tmp_path / "saved", architecture, params, dtype=dtype)
    with pytest.raises(
        ValueError, match=f"saved: 1 of the {down[0].size:,} values of {name} are NaN or infinite. Fetch"
    ):
        huggingface.load(tmp_path / "saved", dtype=dtype)


# Norms and a tied embedding; biases, experts and a head. The weights of other families are among these.
ON_DEVICES = ("gemma3", "gpt_oss")


# OLMoE has five experts here, which two devices can't share. Its weights have the names of Qwen3-MoE.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family not in ON_DEVICES))
        for family in FAMILIES
        if family != "olmoe"
    ],
)
def test_eight_devices_equal_one(tmp_path, family):
    architecture, params, recorded = recording.golden(family)
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    _, sharded = huggingface.load(GOLDEN / family, mesh)
    assert_same(sharded, params)
    shardings = transformer.param_shardings(architecture, mesh)
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings
    down = sharded["layers"]["mlp"]["expert_down" if architecture.num_experts else "down"]
    part = architecture.ffn_size // 2, 16
    if architecture.num_experts:
        part = architecture.num_experts // 2, architecture.expert_size, 16
    assert {shard.data.shape for shard in down.addressable_shards} == {(2, *part)}
    recording.check_logits(architecture, sharded, recorded)
    huggingface.save(tmp_path / "saved", architecture, sharded)
    assert_same(huggingface.load(tmp_path / "saved")[1], params)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_region_is_that_of_the_whole(family):
    """Any part of a weight is made of the same part of the file, and of no more along its first axis."""
    rng = np.random.default_rng(0)
    for name, part in tensor_table.parts(recording.golden(family)[0]).items():
        tensor = np.arange(math.prod(part.theirs)).reshape(part.theirs)
        read = []

        def get(region, tensor=tensor, read=read):
            read.append(tensor[region].size)
            return tensor[region]

        whole = part.read((slice(None),) * len(part.ours), get)
        assert whole.shape == part.ours and sorted(whole.ravel()) == list(range(tensor.size)), name
        cuts = [sorted(rng.choice(size + 1, 2, replace=False)) for size in part.ours]
        index = tuple(slice(int(first), int(last)) for first, last in cuts)
        np.testing.assert_array_equal(part.read(index, get), whole[index], err_msg=name)
        half = tuple(slice(0, max(1, size // 2)) if axis == len(part.start) - 1 else slice(0, size)
                     for axis, size in enumerate(part.ours))  # fmt: skip
        np.testing.assert_array_equal(part.read(half, get), whole[half], err_msg=name)


@pytest.mark.parametrize(
    ("shape", "order", "cuts", "times"),
    [
        ((8, 4), (0, 1), (8, 1), 1),
        ((8, 4), (1, 0), (2, 4), 1),  # the file has the columns first
        ((12, 6), (0, 1), (4, 2), 1),  # 12 rows do not divide by 8
        ((1, 8, 2), (0, 2, 1), (1, 4, 2), 1),
        ((6,), (0,), (2,), 4),
    ],
)
def test_each_number_is_read_by_one_device(shape, order, cuts, times):
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    layout = mesh_lib.read_layout(shape, mesh, order)
    assert layout.shard_shape(shape) == tuple(size // cut for size, cut in zip(shape, cuts, strict=True))
    indices = layout.devices_indices_map(shape)
    whole = np.arange(math.prod(shape)).reshape(shape)
    read = [number for device in mesh.devices.flat for number in whole[indices[device]].ravel()]
    assert sorted(read) == sorted([*range(whole.size)] * times)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_axes_is_that_of_the_file(family):
    for name, part in tensor_table.parts(recording.golden(family)[0]).items():
        tensor = np.zeros(part.theirs, np.int8)
        ours = part.read(tuple(slice(0, size) for size in part.ours), tensor.__getitem__)
        long = [axis for axis in range(ours.ndim) if ours.shape[axis] > 1]
        by_stride = sorted(long, key=lambda axis: -ours.strides[axis])
        assert [axis for axis in part.order if axis in long] == by_stride, name
        assert sorted(part.order) == [*range(ours.ndim)], name


@pytest.mark.parametrize("axes", [("vocab", "embed"), ("embed", "vocab"), ("embed",), (None, "heads")])
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2, "context": 2}])
def test_what_was_read_by_rows_is_exchanged(axes, mesh):
    mesh, shape = mesh_lib.make_mesh(**({"data": 1, "fsdp": 1, "tensor": 1} | mesh)), (16, 8)[: len(axes)]
    whole = np.arange(math.prod(shape)).reshape(shape)
    read = jax.make_array_from_callback(
        shape, mesh_lib.read_layout(shape, mesh, (0, 1)[: len(axes)]), whole.__getitem__
    )
    there = mesh_lib.sharding(mesh, axes)
    array = mesh_lib.exchanged(read, there)
    np.testing.assert_array_equal(array, whole)
    # Each device has a part of its own, inside of what it has in the end.
    wanted, parts = there.devices_indices_map(shape), array.sharding.devices_indices_map(shape)
    assert len({str(part) for part in parts.values()}) == 8
    for device, part in parts.items():
        assert {*whole[part].ravel()} <= {*whole[wanted[device]].ravel()}


def test_loaded_weights_can_be_donated():
    _, params = huggingface.load(GOLDEN / "qwen2")
    pointer = params["embedding"].unsafe_buffer_pointer()
    doubled = jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)(params)
    assert params["embedding"].is_deleted() and doubled["embedding"].unsafe_buffer_pointer() == pointer
    assert_same(jax.tree.map(lambda x: x / 2, doubled), recording.golden("qwen2")[1])


def test_one_tensor_at_a_time(tmp_path):
    # 8 MiB of embedding, 4 MiB the next largest tensor, 4 layers of it: a stack in numpy would take 16 MiB. Numpy's
    # memory is counted, a device's isn't; what else Python allocates stays below 1 MiB once everything is compiled.
    architecture = from_hf(
        dict(model_type="qwen2", vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
             num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    )  # fmt: skip
    shapes = transformer.weight_shapes(architecture)
    params = transformer.nest({name: jnp.ones(shape) for name, (shape, _) in shapes.items()})
    huggingface.save(tmp_path / "once", architecture, params, dtype=jnp.bfloat16)
    huggingface.save(tmp_path / "wide", architecture, params)
    huggingface.load(tmp_path / "wide")
    tracemalloc.start()
    try:
        huggingface.load(tmp_path / "wide")
        load_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        huggingface.save(tmp_path / "twice", architecture, params, dtype=jnp.bfloat16)
        save_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = 4096 * 512 * 4
    assert largest <= load_peak < 1.25 * largest
    assert save_peak < 1.25 * largest


def test_old_tensors_that_mean_nothing_are_passed_over(tmp_path):
    embedding = load_file(GOLDEN / "qwen2" / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert_same(huggingface.load(edited(tmp_path, extra))[1], recording.golden("qwen2")[1])


def test_a_tied_head_that_differs_is_refused(tmp_path):
    embedding = load_file(GOLDEN / "qwen2" / "model.safetensors")["model.embed_tokens.weight"].copy()
    embedding[-1, -1] += 1
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight.*Set tie_word_emb"):
        huggingface.load(edited(tmp_path, {"lm_head.weight": embedding}))


def test_every_misfit_is_named_at_once(tmp_path):
    tensors = {
        "model.norm.weight": None,
        "model.layers.1.self_attn.q_proj.bias": None,
        "model.layers.0.mlp.up_proj.weight": np.ones((47, 32), np.float32),
        "model.layers.0.mlp.gate_proj.weight": np.ones((48, 32), np.int8),
        "model.layers.2.mlp.up_proj.weight": np.ones((48, 32), np.float32),
    }
    with pytest.raises(ValueError) as error:
        huggingface.load(edited(tmp_path, tensors))
    for line in (
        "not those of the qwen2 model in its config.json, 5 problems:",
        "model.norm.weight is missing",
        "model.layers.1.self_attn.q_proj.bias is missing",
        "model.layers.0.mlp.up_proj.weight has shape (47, 32), config.json asks for (48, 32)",
        "model.layers.0.mlp.gate_proj.weight has dtype I8, not one of F32, F16, BF16",
        "'model.layers.2.mlp.up_proj.weight' is unknown",
        "put the config.json there that belongs to these weights",
    ):
        assert line in str(error.value)


def test_experts_too_few_and_too_many_are_named(tmp_path):
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    with pytest.raises(
        ValueError, match="2 problems: .*experts.4.up_proj.weight is missing; '.*experts.6.up_proj.* unk"
    ):
        huggingface.load(
            edited(tmp_path, {name.format(4): None, name.format(6): np.ones((24, 32), np.float32)}, family="qwen3_moe")
        )


def image_model(tmp_path, **more):
    """The golden of Gemma 3 as the text part of an image model's folder."""
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    folder = tmp_path / "image"
    folder.mkdir()
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [2, 9]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(GOLDEN / "gemma3" / "model.safetensors")
    weights = {f"language_model.{name}": weight for name, weight in weights.items()}
    vision = {"vision_tower.vision_model.head.weight": np.full((2, 2), np.nan, np.float32)}
    save_file(weights | vision | more, folder / "model.safetensors")
    return folder


def test_an_image_model_is_read_without_its_encoder(tmp_path):
    architecture, params = huggingface.load(image_model(tmp_path))
    wanted, text, _ = recording.golden("gemma3")
    assert dataclasses.replace(architecture, eos_ids=wanted.eos_ids) == wanted
    assert_same(params, text)
    huggingface.save(tmp_path / "text", architecture, params)
    again, weights = huggingface.load(tmp_path / "text")
    assert again == architecture
    assert_same(weights, params)


def test_an_unknown_part_of_an_image_model_is_named(tmp_path):
    folder = image_model(tmp_path, **{"audio_tower.weight": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match="1 problems: 'audio_tower.weight' is unknown"):
        huggingface.load(folder)


def test_many_misfits_are_counted(tmp_path):
    with pytest.raises(ValueError, match="26 problems: (.*; ){8}and 18 more") as error:
        huggingface.load(edited(tmp_path, config={"hidden_size": 64}))
    assert str(error.value).count("asks for") == 8


def test_nothing_is_allocated_before_the_check(tmp_path, monkeypatch):
    folder = edited(tmp_path, {"model.norm.weight": None})
    standins.not_called(monkeypatch, jax, "jit")
    with pytest.raises(ValueError, match="model.norm.weight is missing"):
        huggingface.load(folder)


def test_a_mesh_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="axis 'kv_heads' of size 2 cannot be split over mesh.tensor = 4"):
        huggingface.load(GOLDEN / "qwen2", mesh_lib.make_mesh(tensor=4))


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "config.json is missing: name a folder"),
        ("{", "config.json is not JSON .*Copy it again"),
        ("[]", "config.json holds a list, not an object"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2'; supported:"),
        ('{"model_type": "qwen2"}', "lacks vocab_size"),
    ],
)
def test_config_json_is_checked(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message) as error:
        huggingface.read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_hub_id_is_not_a_folder():
    with pytest.raises(ValueError, match="Qwen/Qwen2.5-1.5B is not a folder: name a Hugging Face folder"):
        huggingface.load("Qwen/Qwen2.5-1.5B")


@pytest.mark.parametrize(
    "name, message",
    [
        (None, "has neither model.safetensors nor model.safetensors.index.json"),
        (
            "pytorch_model.bin",
            "has its weights in pytorch_model.bin, a pickle, .* never read. Convert it .*save_pretrain",
        ),
        ("model.safetensors", "is not a whole safetensors file .* Fetch it again"),
    ],
)
def test_weights_that_cannot_be_read(tmp_path, name, message):
    shutil.copy(GOLDEN / "qwen2" / "config.json", tmp_path)
    if name is not None:
        (tmp_path / name).write_bytes((GOLDEN / "qwen2" / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError, match=message):
        huggingface.load(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/tmp/outside.safetensors", "a\\b.safetensors", "model.bin"]
)
def test_an_index_names_files_of_its_folder_only(tmp_path, shard):
    architecture, params, _ = recording.golden("qwen2")
    huggingface.save(tmp_path / "saved", architecture, params, max_shard_bytes=20_000)
    shutil.copy(GOLDEN / "qwen2" / "model.safetensors", tmp_path / "outside.safetensors")
    index = tmp_path / "saved" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ValueError, match="names the shard .*; a shard is a .safetensors file of the same folder"):
        huggingface.load(tmp_path / "saved")


def test_indices_that_lie(tmp_path):
    architecture, params, _ = recording.golden("qwen2")
    huggingface.save(tmp_path / "saved", architecture, params, max_shard_bytes=20_000)
    first, second, *_ = weight_files.find(tmp_path / "saved")
    index = tmp_path / "saved" / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text("{}")
    with pytest.raises(ValueError, match='index.json has no "weight_map"'):
        huggingface.load(tmp_path / "saved")
    index.write_text(text)
    second.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="lacks 1 of the 5 shards in .*: model-00002-of-00005.safetensors"):
        huggingface.load(tmp_path / "saved")
    shutil.copy(first, second)
    with pytest.raises(ValueError, match="is in model-00001-of-00005.safetensors and in model-00002"):
        huggingface.load(tmp_path / "saved")


def test_tokenizer_files_are_copied(tmp_path):
    architecture, params, _ = recording.golden("llama")
    source = tmp_path / "base"
    source.mkdir()
    (source / "model.safetensors").write_text("not copied")
    with pytest.raises(ValueError, match="base has no tokenizer files .*: name the folder of the model"):
        huggingface.save(tmp_path / "saved", architecture, params, tokenizer_from=source)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    huggingface.save(tmp_path / "own", architecture, params, tokenizer_from=source)
    assert sorted(os.listdir(tmp_path / "own")) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "own" / "tokenizer.json").read_text() == "tokenizer.json"
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads((tmp_path / "own" / "generation_config.json").read_text()) == ends
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    huggingface.save(tmp_path / "theirs", architecture, params, tokenizer_from=source)
    assert json.loads((tmp_path / "theirs" / "generation_config.json").read_text()) == {"eos_token_id": [2, 3]}


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    architecture, params, _ = recording.golden("qwen2")
    write = weight_files.write
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "write", lambda *args: [write(*args), math.sqrt(-1)])
        with pytest.raises(ValueError, match="math domain|nonnegative"):
            huggingface.save(tmp_path / "saved", architecture, params)
    assert os.listdir(tmp_path) == []
    (tmp_path / ".saved.partial").mkdir()  # a save that was killed
    (tmp_path / "saved").mkdir()  # an empty folder may be filled
    huggingface.save(tmp_path / "saved", architecture, params)
    assert os.listdir(tmp_path) == ["saved"]
    with pytest.raises(ValueError, match="saved exists and is not an empty folder: name another one, or remove it"):
        huggingface.save(tmp_path / "saved", architecture, params)


def test_params_must_be_the_architectures(tmp_path):
    architecture, params, _ = recording.golden("qwen2")
    other = params | {"head": params["embedding"].T, "final_norm": jnp.ones(31)}
    del other["embedding"]
    with pytest.raises(
        ValueError, match=r"3 problems: embedding is missing; head is unknown; final_norm has .*\(31,\)"
    ):
        huggingface.save(tmp_path / "saved", architecture, other)
    with pytest.raises(ValueError, match="embedding would be written as int32; use float32, float16, bfloat16"):
        huggingface.save(tmp_path / "saved", architecture, params, dtype=jnp.int32)
    with pytest.raises(ValueError, match="asks for"):
        huggingface.save(tmp_path / "saved", dataclasses.replace(architecture, ffn_size=47), params)
    assert os.listdir(tmp_path) == []
