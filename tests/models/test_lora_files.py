"""Adapters on disk, in PEFT's format: names, shapes, every bit of the values, and folders that do not fit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from lora_cases import LORA, given_adapters
from safetensors.numpy import load_file, save_file
from tiny import vl_config

import models
from models.folder import CheckpointError
from models.hf import INDEX
from models.lora import ADAPTER, SETTINGS, load_adapters, save_adapters

UP = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    config = vl_config()
    adapters = given_adapters(models.abstract(config), LORA)
    save_adapters(config, unflatten_dict(adapters), folder, LORA)
    return config, adapters, folder


@pytest.mark.medium
def test_names_and_shapes_are_those_of_peft(saved):
    _, _, folder = saved
    tensors = load_file(folder / ADAPTER)
    assert len(tensors) == 2 * 2 * 7
    a, b = (
        tensors[f"base_model.model.model.language_model.layers.1.mlp.down_proj.lora_{part}.weight"] for part in "AB"
    )
    assert (a.shape, b.shape) == ((3, 64), (48, 3))
    settings = json.loads((folder / SETTINGS).read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 6.0)


def test_what_is_written_is_read_bit_for_bit(saved):
    config, adapters, folder = saved
    jax.tree.map(np.testing.assert_array_equal, load_adapters(config, folder, LORA), adapters)


def test_a_checkpoint_in_the_same_folder_does_not_matter(saved, tmp_path):
    config, adapters, _ = saved
    save_adapters(config, unflatten_dict(adapters), tmp_path, LORA)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    jax.tree.map(np.testing.assert_array_equal, load_adapters(config, tmp_path, LORA), adapters)


def with_up_projection(size):
    """Cuts one tensor to its first columns, this many."""

    def change(folder):
        tensors = load_file(folder / ADAPTER)
        left = tensors.pop(UP)[:, :size].copy()
        save_file(tensors | ({UP: left} if size else {}), folder / ADAPTER)

    return change


def with_setting(**changes):
    def change(folder):
        settings = json.loads((folder / SETTINGS).read_text())
        (folder / SETTINGS).write_text(json.dumps(settings | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_up_projection(0), rf"{UP} is missing"),
        (with_up_projection(8), r"has shape \[3, 8\].* of another model"),
        (lambda folder: (folder / ADAPTER).write_bytes(b"nothing"), "not a whole safetensors file"),
        (lambda folder: (folder / ADAPTER).unlink(), "no such file"),
        (lambda folder: (folder / SETTINGS).unlink(), SETTINGS),
        (with_setting(r=4), "r is 4, not 3"),
        (with_setting(lora_alpha=3), "lora_alpha is 3, not 6.0"),
        (with_setting(use_dora=True), "use_dora is true, not false"),
        (with_setting(rank_pattern={"q_proj": 8}), "rank_pattern is set"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(saved, tmp_path, damage, message):
    config, adapters, _ = saved
    save_adapters(config, unflatten_dict(adapters), tmp_path, LORA)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_adapters(config, tmp_path, LORA)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_adapters(config, tmp_path / "nowhere", LORA)


def test_adapters_of_other_projections_are_refused(saved):
    config, _, folder = saved
    with pytest.raises(CheckpointError, match="unexpected"):
        load_adapters(config, folder, dataclasses.replace(LORA, targets=("q_proj",)))
