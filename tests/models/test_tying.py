"""A head is tied where transformers ties it: by either place in `config.json`, and by the head that is stored."""

import itertools
import json
import pathlib

import numpy as np
import pytest
from hf_reference import BUILD, transformers
from safetensors.numpy import load_file, save_file

import models
from models import hf
from sharding.walk import Walk

PLACES = (None, False, True)  # absent, said and said
HEADS = ("none", "copy", "own")
CASES = [("qwen2", outer, None, head) for outer, head in zip(PLACES, HEADS, strict=True)]
CASES += [("qwen2_5_vl", *case) for case in itertools.product(PLACES, PLACES, HEADS) if case[2] != "copy"]
CASES += [("qwen2_5_vl", outer, True, "copy") for outer in PLACES]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Checkpoint folders of either architecture, whose heads are not their embeddings."""
    kinds = "qwen2", "qwen2_5_vl"
    return {kind: BUILD[kind](tmp_path_factory.mktemp(kind), num_hidden_layers=1).folder for kind in kinds}


def copy(source: pathlib.Path, folder: pathlib.Path, outer: bool | None, inner: bool | None, head: str) -> None:
    """The checkpoint with these two settings, and without a head, with the embedding as its head, or with its own."""
    config = json.loads((source / "config.json").read_text())
    for section, tied in ((config, outer), (config.get("text_config", {}), inner)):
        section.pop("tie_word_embeddings", None)
        if tied is not None:
            section["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / hf.SINGLE)
    if head != "own":
        stored = weights.pop(hf.HEAD)
        assert not np.array_equal(stored, weights["model.embed_tokens.weight"])
    if head == "copy":
        weights[hf.HEAD] = weights["model.embed_tokens.weight"]
    save_file(weights, folder / hf.SINGLE, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "outer", "inner", "head"), CASES)
def test_a_head_is_tied_as_transformers_ties_it(checkpoints, tmp_path, kind, outer, inner, head) -> None:
    copy(checkpoints[kind], tmp_path, outer, inner, head)
    auto = transformers.AutoModelForCausalLM if kind == "qwen2" else transformers.AutoModelForImageTextToText
    if not (outer or inner) and head == "none":  # transformers draws one at random
        with pytest.raises(hf.CheckpointError, match=r"tensor lm_head\.weight is missing"):
            models.load(tmp_path)
        return
    if head == "own" and (outer or (inner and outer is None)):  # transformers keeps the head, SGLang drops it
        with pytest.raises(hf.CheckpointError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
            models.load(tmp_path)
        return
    reference = auto.from_pretrained(tmp_path)
    model = models.load(tmp_path)
    tied = reference.lm_head.weight.data_ptr() == reference.get_input_embeddings().weight.data_ptr()
    assert model.config.text.tie_word_embeddings == tied
    np.testing.assert_array_equal(np.asarray(model.head_weight(Walk())), reference.lm_head.weight.detach().numpy())
    models.save(model, tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert again.config == model.config
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again"))
    assert before.keys() == after.keys(), "no field is lost, whichever decides"
    assert (hf.HEAD in load_file(tmp_path / "again" / hf.SINGLE)) == (not tied)
