"""Checkpoints written by `transformers` come back bit for bit, and theirs read ours."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import BUILD, build_vl, torch, transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import models
from models import hf
from models.config import NameLayout
from models.folder import CheckpointError
from models.registry import read_config, write_config


def tensors(folder: pathlib.Path) -> dict[str, tuple[str, bytes]]:
    """Name -> (dtype and shape, bytes) over all weight files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                value = file.get_tensor(name)
                found[name] = (f"{value.dtype}{value.shape}", value.tobytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tied", "dtype"),
    [
        ("qwen2", True, "float32"),
        ("qwen2", False, "bfloat16"),
        ("qwen3", True, "bfloat16"),
        ("qwen3", False, "float32"),
        ("qwen2_5_vl", False, "float32"),
        ("qwen2_5_vl", True, "bfloat16"),
        ("qwen3_vl", False, "bfloat16"),
        ("qwen3_vl", True, "float32"),
        ("qwen3_5", False, "float32"),
        ("qwen3_5", True, "bfloat16"),
        ("qwen3_5_text", False, "bfloat16"),
        ("qwen3_5_text", True, "float32"),
    ],
)
def test_round_trip_keeps_names_bits_and_config(tmp_path, kind: str, tied: bool, dtype: str) -> None:
    pair = BUILD[kind](tmp_path / "theirs", tied=tied, dtype=getattr(torch, dtype))
    models.save(pair.model, tmp_path / "ours")
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "theirs")
    assert ("lm_head.weight" in tensors(tmp_path / "ours")) == (not tied)
    ours, theirs = ((tmp_path / who / "config.json").read_text() for who in ("ours", "theirs"))
    if kind.startswith("qwen3_5"):  # what SGLang needs
        written, theirs = json.loads(ours), json.loads(theirs)
        text = written.get("text_config", written)
        assert text.pop("full_attention_interval") == 4
        assert text.pop("partial_rotary_factor") == text["rope_parameters"]["partial_rotary_factor"]
        assert kind == "qwen3_5_text" or written["vision_config"].pop("deepstack_visual_indexes") == []
        assert written == theirs
    else:
        assert ours == theirs
    leaves = jax.tree.leaves(models.split(pair.model)[1])
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_of_a_draft_head_are_carried(tmp_path, dtype: str | None) -> None:
    """MTP weights, which no model here reads, are in the export as they were, whatever the dtype of the others; in
    several files, too. Other unknown tensors are refused."""
    BUILD["qwen3_5_text"](tmp_path / "theirs", seed=1)
    file, rng = tmp_path / "theirs/model.safetensors", np.random.default_rng(0)
    draft = {"mtp.fc.weight": rng.normal(size=(3, 5)).astype(np.float32)}
    draft["mtp.layers.0.mlp.up_proj.weight"] = np.asarray(jnp.asarray(rng.normal(size=(7, 3)), jnp.bfloat16))
    save_file({**load_file(file), **draft}, file, {"format": "pt"})
    before = tensors(tmp_path / "theirs")
    model = models.load(tmp_path / "theirs")
    graphdef, params = models.split(model)
    for folder, size in (("one", 1 << 30), ("several", 20_000)):
        hf.save(models.merge(graphdef, params), tmp_path / folder, dtype and jnp.dtype(dtype), shard_bytes=size)
        after = tensors(tmp_path / folder)
        assert after.keys() == before.keys()
        assert {name: after[name] for name in draft} == {name: before[name] for name in draft}
        assert dtype or after == before
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        norm = again.model.norm.weight.detach().float().numpy()
        np.testing.assert_allclose(norm, model.norm.scale[...], atol=0.01)
    save_file({**load_file(file), "draft.weight": draft["mtp.fc.weight"]}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"draft\.weight is unexpected"):
        models.load(tmp_path / "theirs")


@pytest.mark.medium
def test_both_name_layouts(tmp_path) -> None:
    """`transformers` 5 still writes the names of the published files unless told otherwise; older 4.5x the others."""
    pair = build_vl(tmp_path / "flat")
    pair.reference.save_pretrained(tmp_path / "nested", save_original_format=False)
    flat, nested = tensors(tmp_path / "flat"), tensors(tmp_path / "nested")
    assert "visual.merger.ln_q.weight" in flat
    assert "model.visual.merger.ln_q.weight" in nested
    model = models.load(tmp_path / "nested")
    assert (pair.model.config.names, model.config.names) == (NameLayout.FLAT, NameLayout.NESTED)
    for before, after in zip(*(jax.tree.leaves(models.split(m)[1]) for m in (pair.model, model)), strict=True):
        np.testing.assert_array_equal(before, after)
    models.save(model, tmp_path / "nested again")
    assert tensors(tmp_path / "nested again") == nested
    models.save(pair.model, tmp_path / "flat again")
    assert tensors(tmp_path / "flat again") == flat


@pytest.mark.medium
def test_several_files_with_an_index(tmp_path) -> None:
    pair = build_vl(tmp_path / "one")
    pair.reference.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = models.load(tmp_path / "theirs")
    hf.save(model, tmp_path / "ours", shard_bytes=200_000)
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "theirs") == tensors(tmp_path / "one")
    ours, theirs = (json.loads((tmp_path / who / hf.INDEX).read_text()) for who in ("ours", "theirs"))
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    # a smaller number of files leaves none of the old ones behind
    models.save(model, tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "one")


@pytest.mark.medium
@pytest.mark.parametrize("kind", BUILD)
def test_transformers_reads_what_was_never_theirs(tmp_path, kind: str) -> None:
    """A model created here, in several files, without a `config.json` to copy from."""
    shape = BUILD[kind](tmp_path / "shape").model.config
    config = read_config({**write_config(shape), "model_type": write_config(shape)["model_type"]})
    bare = config.__class__(**{**vars(config), "extra": "{}"})
    model = models.create(bare, seed=5)
    hf.save(model, tmp_path / "ours", shard_bytes=200_000)
    auto = transformers.AutoModelForImageTextToText if shape.vision else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert tensors(tmp_path / "theirs") == tensors(tmp_path / "ours")
    again = models.load(tmp_path / "theirs")
    assert again.config == bare, "every setting that matters survives their reading and writing"


@pytest.mark.medium
def test_float32_masters_of_a_bfloat16_checkpoint(tmp_path) -> None:
    pair = build_vl(tmp_path / "theirs", dtype=torch.bfloat16)
    model = models.load(tmp_path / "theirs", dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(models.split(model)[1])} == {jnp.dtype("float32")}
    models.save(model, tmp_path / "wide")
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    models.save(model, tmp_path / "narrow", dtype=jnp.bfloat16)
    assert tensors(tmp_path / "narrow") == tensors(tmp_path / "theirs")
    assert (tmp_path / "narrow/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    assert pair.model.config == model.config
