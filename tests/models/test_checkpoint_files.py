"""Loading says which file and which tensor is wrong, and never holds two copies of the model."""

import json
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tiny import qwen2_config, vl_config

import models
from models import hf
from models.config import ModelConfigError
from models.hf import CheckpointError
from sharding.weights import ShardingRules, shardings


@pytest.fixture(scope="module")
def vl():
    return models.create(vl_config())


@pytest.fixture
def folder(vl, tmp_path) -> pathlib.Path:
    models.save(vl, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: pathlib.Path, change) -> None:
    weights = load_file(folder / hf.SINGLE)
    change(weights)
    save_file(weights, folder / hf.SINGLE)


def edit_config(folder: pathlib.Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("config", [vl_config(), qwen2_config(), vl_config(tie_word_embeddings=True)])
def test_what_was_saved_is_loaded(config, tmp_path) -> None:
    model = models.create(config, seed=2)
    models.save(model, tmp_path)
    again = models.load(tmp_path)
    assert again.config == config
    before, after = (models.split(m) for m in (model, again))
    assert before[0] == after[0], "the same compiled programs serve both"
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])


def test_missing_tensor(folder) -> None:
    edit(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj.* missing"):
        models.load(folder)


def test_unexpected_tensor(folder) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"safetensors: tensor model\.layers\.2\.mlp\.up_proj\.weight is unexp"):
        models.load(folder)


def test_wrong_shape(folder) -> None:
    edit(folder, lambda weights: weights.update({"visual.merger.mlp.0.bias": np.zeros(9, np.float32)}))
    with pytest.raises(CheckpointError, match=r"tensor visual\.merger\.mlp\.0\.bias has shape \[9\], .* \[128\]"):
        models.load(folder)


def test_layers_of_two_dtypes(folder) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda weights: weights.update({name: weights[name].astype(jnp.bfloat16)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is bfloat16, its like in layer 0 is float32"):
        models.load(folder)
    assert models.load(folder, dtype=jnp.float32).layers.mlp.up[...].dtype == jnp.float32


def test_truncated_file(folder) -> None:
    path = folder / hf.SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        models.load(folder)


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
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is unexpected"):
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
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(qwen2_config().to_hf()))
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        models.load(tmp_path)


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
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"vision_config": None}, "has no 'vision_config'"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(folder, changes, message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelConfigError, match=message):
        models.load(folder)


def test_peak_memory_is_the_model_and_one_parameter(tmp_path) -> None:
    """numpy's allocations are traced; device arrays are not, so what is left is what the host holds beside them."""
    model = models.create(
        qwen2_config(num_layers=12, vocab_size=512, hidden_size=96, head_dim=16, intermediate_size=512)
    )
    models.save(model, tmp_path)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(models.split(model)[1])]
    models.load(tmp_path)  # imports and caches
    tracemalloc.start()
    models.load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) > 3 * max(sizes), "else the test shows nothing"
    print("peak", peak / max(sizes))
    assert peak < 1.5 * max(sizes)


def test_parameters_go_straight_to_their_shards(vl, folder) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    places = shardings(models.abstract(vl.config), mesh, ShardingRules())
    model = hf.load(folder, shardings=places)
    table = model.embedding.table[...]
    assert len(table.addressable_shards) == 8
    assert table.addressable_shards[0].data.shape == (8, 48)
    np.testing.assert_array_equal(table, vl.embedding.table[...])
