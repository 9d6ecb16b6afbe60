"""A model from a checkpoint folder: what `model.path` reads, what an export keeps, and which paths are refused."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from packing_cases import MODEL, QWEN3_5

import models
from fluxjax.base.timeline import under_way
from fluxjax.config import Config, ConfigError
from fluxjax.data.loader import open_source
from fluxjax.run.build import build_model, describe_model, server_checkpoint
from models.config import PatchLayout
from models.processing import tiny
from models.registry import write_config

GENERATION = {"do_sample": True, "eos_token_id": [0, 2], "temperature": 0.6, "top_p": 0.95, "transformers_version": "4"}


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    assert MODEL.vision is not None
    models.save(models.create(MODEL, seed=4), tmp_path / "checkpoint")
    tiny.build(["ab ?"], layout=PatchLayout.of(MODEL.vision)).save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint/generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path / "checkpoint"


def config_of(path: object) -> Config:
    config = Config()
    config.model.path, config.data.max_pixels, config.data.video_frames = str(path), 32 * 32, 6
    return config


@pytest.mark.slow
def test_an_export_of_a_checkpoint_is_the_checkpoint(folder, tmp_path) -> None:
    """Exported as the trainer exports at the end of a run: bounds of the run are kept, and every field of the files."""
    model, processor = build_model(config_of(folder), {})
    assert (processor.image.max_pixels, processor.frames.num_frames, processor.eos_ids) == (32 * 32, 6, (0, 2))
    models.save(model, tmp_path / "export")
    processor.save(tmp_path / "export")
    assert json.loads((tmp_path / "export/generation_config.json").read_text()) == GENERATION
    again, _ = build_model(config_of(tmp_path / "export"), {})
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, models.split(again)[1], models.split(models.create(MODEL, seed=4))[1])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text"])
def test_a_tiny_model_of_each_architecture_is_read_back(architecture: str, tmp_path) -> None:
    """Sizes, and what its processor does with text, pictures and clips, as from the folder that a run exports."""
    text = architecture in ("qwen2", "qwen3", "qwen3_5_text")
    config, media = Config(), {} if text else {"images": ["a.png"], "videos": ["a.mp4"]}
    config.model.tiny["architecture"] = architecture
    if architecture.startswith("qwen3_5"):  # rotates a quarter of each head
        config.model.tiny |= {"num_heads": 2, "mrope_section": (2, 1, 1)}
    question = "<image><video>which?" if media else "which?"
    (tmp_path / "all.jsonl").write_text(json.dumps({"id": "1", "prompt": question, "answer": "a", **media}))
    sizes, processor = describe_model(config, {"all": open_source(tmp_path / "all.jsonl", "all")})
    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(write_config(sizes)))
    config.model.path = str(tmp_path)
    again, loaded = describe_model(config, {})
    assert again == dataclasses.replace(sizes, names=again.names)
    assert loaded.architecture == processor.architecture == architecture
    assert loaded.layout == processor.layout and (not media or loaded.settings == processor.settings)
    assert processor.vision == bool(media) and ("seconds" in processor.tokenizer.get_vocab()) == processor.layout.timed


@pytest.mark.parametrize("complete", [True, False], ids=["as exported", "as transformers writes it"])
def test_servers_start_from_a_folder_that_has_all_fields(complete: bool, tmp_path) -> None:
    """SGLang reads fields of Qwen3.5 that transformers does not write."""
    assert QWEN3_5.vision is not None
    path, config = tmp_path / "checkpoint", config_of(tmp_path / "checkpoint")
    tiny.build(["ab ?"], layout=PatchLayout.of(QWEN3_5.vision)).save(path)
    (path / "model.safetensors").write_bytes(b"weights")
    content = write_config(QWEN3_5)
    content["text_config"]["rope_parameters"] = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
    content["text_config"].pop("rope_scaling")
    whole = json.dumps(content)
    if not complete:
        assert content["text_config"].pop("partial_rotary_factor") == 0.5
        assert content["text_config"].pop("full_attention_interval") == 3
        assert content["vision_config"].pop("deepstack_visual_indexes") == []
    (path / "config.json").write_text(json.dumps(content))
    sizes, processor = describe_model(config, {})
    for _ in range(2):  # a run may be resumed
        folder = server_checkpoint(config, tmp_path / "run", models.abstract(sizes), processor)
        assert (folder == path) == complete
        assert json.loads((folder / "config.json").read_text()) == json.loads(whole)
        assert {file.name for file in folder.iterdir()} == {file.name for file in path.iterdir()}
        assert (folder / "model.safetensors").samefile(path / "model.safetensors")
    assert json.loads((path / "config.json").read_text()) == content


def test_a_tiny_model_of_an_unknown_architecture_is_refused() -> None:
    config = Config()
    config.model.tiny["architecture"] = "qwen9"
    with pytest.raises(ConfigError, match=r"^model\.tiny: architecture 'qwen9' is not among qwen2, .*qwen3_vl"):
        describe_model(config, {})


def test_loading_says_how_far_it_is(folder, monkeypatch) -> None:
    load, said = models.load, []

    def noted(*arguments, progress, **more):
        def note(share: float) -> None:
            progress(share)
            said.append(under_way().removesuffix(", compiling"))

        return load(*arguments, progress=note, **more)

    monkeypatch.setattr(models, "load", noted)
    build_model(config_of(folder), {})
    shares = [int(words.removeprefix("loading weights ").removesuffix(" %")) for words in said]
    assert len(set(shares)) > 10 and shares == sorted(shares) and shares[-1] == 100
    assert "loading" not in under_way()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "Qwen/Qwen2.5-VL-3B-Instruct",
            "Qwen/Qwen2.5-VL-3B-Instruct: no such folder, .* hf download Qwen/Qwen2.5-VL-3B",
        ),
        ("/gone", "/gone: no such folder$"),
        (pathlib.Path(__file__).parent, "is not a Hugging Face checkpoint folder"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(path, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{message}"):
        build_model(config_of(path), {})


@pytest.mark.medium
def test_what_is_not_supported_is_one_line(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    said = r"^model\.path: .*checkpoint/config\.json: quantization_config \(fp8\) in config\.json"
    with pytest.raises(ConfigError, match=said) as error:
        build_model(config_of(folder), {})
    assert "\n" not in str(error.value)


def test_a_run_in_a_chat_template_needs_one(folder) -> None:
    config = config_of(folder)
    config.data.chat_template = True
    with pytest.raises(ConfigError, match=r"^data\.chat_template: .*has no chat template, or several and no default"):
        build_model(config, {})
