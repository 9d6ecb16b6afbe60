"""Loading says which file and which tensor is wrong, and holds one tensor beside what has its place."""

import dataclasses
import gc
import json
import pathlib
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import qwen2_config, vl_config

import models
from models import creation, hf
from models.config import ModelConfigError
from models.hf import CheckpointError
from models.processing import Processor
from models.registry import ARCHITECTURES, read_config, write_config
from models.tensor_names import DECODER, name_weights
from sharding import weights
from sharding.mesh import make_mesh
from sharding.weights import shardings


@pytest.fixture(scope="module")
def vl():
    return models.create(vl_config())


@pytest.fixture(scope="module")
def saved(vl, tmp_path_factory) -> pathlib.Path:
    models.save(vl, folder := tmp_path_factory.mktemp("saved"))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "model")


def edit(folder: pathlib.Path, change) -> None:
    weights = load_file(folder / hf.SINGLE)
    change(weights)
    save_file(weights, folder / hf.SINGLE)


def edit_config(folder: pathlib.Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.slow
def test_what_was_saved_is_loaded(tmp_path) -> None:
    config = vl_config(tie_word_embeddings=True)
    model = models.create(config, seed=2)
    models.save(model, tmp_path)
    shares: list[float] = []
    again = models.load(tmp_path, progress=shares.append)
    assert again.config == config and shares == sorted(shares) and shares[-1] == 1 and len(set(shares)) > 10
    before, after = (models.split(m) for m in (model, again))
    assert before[0] == after[0], "the same compiled programs serve both"
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_what_is_saved_is_held_tensor_by_tensor(vl, dtype, tmp_path, monkeypatch) -> None:
    """The library reads what was written, of any dtype and in many files, and no two tensors were in memory for it."""
    held: list[weakref.ref] = []
    most = 0
    tensors = hf.disk_tensors

    def watched(config, params):
        nonlocal most
        for name, value in tensors(config, params):
            value = np.array(value)
            held.append(weakref.ref(value))
            most = max(most, sum(one() is not None for one in held))
            yield name, value

    params = jax.tree.map(lambda x: x, models.split(vl)[1])
    params["norm"]["scale"] = params["norm"]["scale"].astype(jnp.bfloat16)  # one of another dtype
    model = models.merge(models.split(vl)[0], params)
    monkeypatch.setattr(hf, "disk_tensors", watched)
    models.save(model, tmp_path, dtype=dtype, shard_bytes=20_000)
    assert most <= 2
    files = sorted(tmp_path.glob("*.safetensors"))
    written = {name: value for file in files for name, value in load_file(file).items()}
    expected = {name: value.astype(dtype or value.dtype) for name, value in tensors(model.config, params)}
    assert len(files) > 2 and written.keys() == expected.keys()
    for name, value in expected.items():
        assert (written[name].dtype, written[name].tobytes()) == (value.dtype, value.tobytes())


@pytest.mark.parametrize(
    ("name", "replaced", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", {}, "is missing"),
        ("model.layers.2.mlp.up_proj.weight", np.zeros(3, np.float32), "is unexpected"),
        ("visual.merger.mlp.0.bias", np.zeros(9, np.float32), r"has shape \[9\], .* \[128\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, name: str, replaced, message: str) -> None:
    edit(folder, lambda weights: weights.update({name: replaced}) if len(replaced) else weights.pop(name))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} {message}"):
        models.load(folder)


@pytest.mark.medium
def test_layers_of_two_dtypes(folder) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda weights: weights.update({name: weights[name].astype(jnp.bfloat16)}))
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight is bfloat16, but the same tensor of layer 0 is float32"
    ):
        models.load(folder)
    assert models.load(folder, dtype=jnp.float32).layers.mlp.up[...].dtype == jnp.float32


def test_truncated_file(folder) -> None:
    path = folder / hf.SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        models.load(folder)


@pytest.mark.medium
def test_old_rotary_buffers_are_ignored_and_a_tied_head_may_be_stored(tmp_path) -> None:
    model = models.create(vl_config(tie_word_embeddings=True))
    models.save(model, tmp_path)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    edit(
        tmp_path,
        lambda weights: weights.update(frequencies, **{"lm_head.weight": weights["model.embed_tokens.weight"]}),
    )
    models.load(tmp_path)
    edit(tmp_path, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight differs from the embedding .* tie_word_embedd"):
        models.load(tmp_path)


def test_files_and_index(vl, tmp_path) -> None:
    hf.save(vl, tmp_path, shard_bytes=50_000)
    models.load(tmp_path)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    shard = tmp_path / index["weight_map"]["lm_head.weight"]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: no such file, but {hf.INDEX} names it"):
        models.load(tmp_path)
    shard.write_bytes(content)
    weights = load_file(shard)
    save_file({name: value for name, value in weights.items() if name != "lm_head.weight"}, shard)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor lm_head\.weight is missing, but"):
        models.load(tmp_path)


def test_no_checkpoint(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        models.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        models.load(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Is a directory"):
        models.load(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(write_config(qwen2_config())))
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        models.load(tmp_path)


QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


def test_unsupported_architectures_are_named_with_the_supported(folder) -> None:
    edit_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelConfigError) as error:
        models.load(folder)
    for part in ("config.json", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, r"mrope_section=\[2, 2, 2\] must sum to"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        ({"attention_bias": False}, "attention_bias=False in config.json is not supported; supported is True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({**QWEN3, "attention_bias": "false"}, "attention_bias 'false'"),
        ({**QWEN3, "qkv_bias": True}, "qkv_bias=True in config.json is not supported; supported is False"),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        ({**QWEN3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"is_causal": False}, "is_causal=False"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config="),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"vision_config": None}, "has no 'vision_config'"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(folder, changes, message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelConfigError, match=rf"^.*model/config\.json: .*{message}"):
        models.load(folder)


def test_settings_that_ask_for_what_is_done_anyway_are_accepted(folder) -> None:
    done = {"attention_bias": True, "attention_dropout": 0.0, "use_sliding_window": True, "sliding_window": None}
    full = {"layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0, "quantization_config": None}
    edit_config(folder, **done, **full, max_window_layers=0)
    models.load(folder)


def test_windows_slide_from_layer_28_on_where_nothing_is_said() -> None:
    """The default of `Qwen2Config` in transformers; Qwen2.5-VL's is 80."""
    deep, deeper = (write_config(qwen2_config(num_layers=n)) | {"use_sliding_window": True} for n in (28, 29))
    for config in (deep, deeper):
        config.pop("max_window_layers", None)
    read_config(deep)
    with pytest.raises(ModelConfigError, match="sliding-window"):
        read_config(deeper)


@pytest.mark.parametrize(
    ("method", "section", "name"),
    [
        ("fp8", None, "quantization_config"),
        ("gptq", "vision_config", "compression_config"),
        ("bitsandbytes", "text_config", "quantization_config"),
        ("gptq", "beside text_config", "quantization_config"),
    ],
)
def test_quantised_checkpoints_are_refused_whatever_their_weights_are(folder, method, section, name) -> None:
    """The weights of this folder are float32: the file alone says that they are to be quantised."""
    config = json.loads((folder / "config.json").read_text())
    said = {name: {"quant_method": method}}
    if section == "text_config":
        changes = {"text_config": {**config, **said}}
    elif section == "beside text_config":
        changes, section = {"text_config": config, **said}, None
    else:
        changes = said if section is None else {section: {**config[section], **said}}
    edit_config(folder, **changes)
    where = rf"{section} of config\.json" if section else r"config\.json"
    with pytest.raises(ModelConfigError, match=rf"{name} \({method}\) in {where} is not supported.* full-precision"):
        models.load(folder)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.1.mlp.up_proj.weight", "F8_E4M3"),
        ("lm_head.weight", "I8"),
        ("a.weight_scale_inv", "U8"),
        ("model.layers.1.mlp.up_proj.weight", "F64"),
    ],
)
def test_quantised_tensors_are_refused_by_name(folder, name: str, dtype: str) -> None:
    """The file is written by hand: numpy has no 8-bit floats."""
    weights = load_file(folder / hf.SINGLE)
    shape = weights.pop(name).shape if name in weights else (3,)
    parts = {key: ("F32", value.shape, value.tobytes()) for key, value in weights.items()}
    parts[name] = (dtype, shape, bytes(int(np.prod(shape)) * (8 if dtype == "F64" else 1)))
    header, start = {}, 0
    for key, (kind, size, data) in parts.items():
        header[key] = {"dtype": kind, "shape": list(size), "data_offsets": [start, start + len(data)]}
        start += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    content = len(head).to_bytes(8, "little") + head + b"".join(data for _, _, data in parts.values())
    (folder / hf.SINGLE).write_bytes(content)
    said = rf"model\.safetensors: tensor {name} is {dtype}; supported are BF16, F16"
    with pytest.raises(CheckpointError, match=said):
        models.load(folder)


def test_one_merge_size_is_supported(folder) -> None:
    """Buffers are rounded to sizes that blocks of three by three patches would not fill."""
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    edit_config(folder, vision_config={**vision, "spatial_merge_size": 3, "window_size": 24})
    with pytest.raises(ModelConfigError, match=r"config\.json: spatial_merge_size=3 is not supported; supported is 2"):
        models.load(folder)


def test_a_hub_id_is_told_how_to_become_a_folder(tmp_path) -> None:
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    for load in (models.load, Processor.load):
        with pytest.raises((CheckpointError, FileNotFoundError)) as error:
            load(name)
        assert str(error.value).startswith(f"{name}: no such folder") and "\n" not in str(error.value)
        assert f"hf download {name} --local-dir Qwen2.5-VL-3B-Instruct" in str(error.value)
        for path in (tmp_path / "gone", pathlib.Path("gone"), "./gone", "../a/b", "/a/b"):
            with pytest.raises((CheckpointError, FileNotFoundError), match=rf"{path}: no such folder$"):
                load(path)


PEAK_OF_LOADING = """
import sys, tracemalloc
import models
models.load(sys.argv[1])  # imports and caches
tracemalloc.start()
models.load(sys.argv[1])
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.long
def test_the_host_holds_two_tensors_at_most(tmp_path) -> None:
    """The one that is read, and perhaps one before it whose transfer is done, but which JAX has not let go of. numpy's
    allocations are traced; device arrays are not, so what is left is what the host holds beside them.

    Measured in a fresh process: what earlier tests left behind, threads among it, allocates as well."""
    sizes = {"num_layers": 48, "vocab_size": 8192, "hidden_size": 96, "head_dim": 16, "intermediate_size": 512}
    models.save(model := models.create(qwen2_config(**sizes)), tmp_path)
    stacks = [leaf.nbytes for leaf in jax.tree.leaves(models.split(model)[1])]
    with safe_open(tmp_path / hf.SINGLE, "numpy") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (not a dict)
    assert max(stacks) > 2.9 * largest, "else the test does not see a stack on the host"
    command = [sys.executable, "-c", PEAK_OF_LOADING, str(tmp_path)]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert int(loaded.stdout) < 2.4 * largest


@pytest.mark.medium
def test_a_stack_may_hold_any_layers(tmp_path, monkeypatch) -> None:
    row = ARCHITECTURES["qwen2"]
    names = lambda _, weights: name_weights(DECODER, "model.", weights, (7, 3, 11))  # noqa: E731
    monkeypatch.setitem(ARCHITECTURES, "qwen2", dataclasses.replace(row, tensor_names=names))
    model = models.create(qwen2_config(num_layers=3, tie_word_embeddings=True))
    models.save(model, tmp_path)
    stored = load_file(tmp_path / hf.SINGLE)
    numbers = {int(name.split(".")[2]) for name in stored if name.startswith("model.layers.")}
    assert numbers == {3, 7, 11}
    for at, number in enumerate((7, 3, 11)):
        up = stored[f"model.layers.{number}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(up.T, model.layers.mlp.up[...][at])
    jax.tree.map(np.testing.assert_array_equal, models.split(models.load(tmp_path))[1], models.split(model)[1])
    weights = dict(nnx.to_flat_state(nnx.state(model)))
    with pytest.raises(ValueError, match=r"a stack of 3 layers has the numbers \(0, 1\)"):
        name_weights(DECODER, "model.", weights, (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loaded", "drawn"])
def test_no_device_holds_more_than_its_share_and_one_layer(how, tmp_path, monkeypatch, held_by) -> None:
    config = qwen2_config(num_layers=6, vocab_size=256, hidden_size=64, head_dim=16, intermediate_size=256)
    models.save(models.create(config), tmp_path)
    gc.collect()  # the model that was saved
    mesh, peaks = make_mesh(4), []
    put = weights.place

    def place(value, sharding):
        array = put(value, sharding)
        peaks.append(max(held_by(device) for device in mesh.devices.flat))
        return array

    monkeypatch.setattr(weights, "place", place)
    for module in (hf, creation):
        monkeypatch.setattr(module, "place", place)
    places = lambda model: shardings(model, mesh)  # noqa: E731
    model = models.load(tmp_path, shardings=places) if how == "loaded" else models.create(config, shardings=places)
    params = jax.tree.leaves(models.split(model)[1])
    share = sum(max(shard.data.nbytes for shard in x.addressable_shards) for x in params)
    assert share < 0.27 * sum(x.nbytes for x in params), "norms and biases are too small to be cut"
    assert share / 2 < max(peaks) <= share + max(x.nbytes // x.shape[0] for x in params) // 4
    expected = models.split(models.create(config))[1]
    jax.tree.map(np.testing.assert_array_equal, models.split(model)[1], expected)
