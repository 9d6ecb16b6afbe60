"""Settings that other people's programs write, as the README beside them says; they are not part of a user's clone."""

import functools
import json
import runpy
import shutil
import sys
import warnings

import pytest

import models
from models import config
from models.config import DecoderConfig
from models.folder import write_json
from models.processing import Processor, PromptError
from models.registry import write_config


@pytest.fixture(scope="module")
def base(shared_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the script leaves its files to be closed
        patch.setattr(sys, "path", [*sys.path])  # to which the script adds
        # the script knows the configurations by earlier names
        for name, architecture in (("Qwen2Config", "qwen2"), ("Qwen25VLConfig", "qwen2_5_vl")):
            patch.setattr(config, name, functools.partial(DecoderConfig, architecture), raising=False)
        # weights take seconds, and nothing here reads them
        patch.setattr(models, "create", lambda sizes, seed: sizes)
        patch.setattr(models, "save", lambda sizes, folder: write_json(folder / "config.json", write_config(sizes)))
        runpy.run_path(str(shared_cases / "models" / "make_tiny_model.py"))["make"](folder)
    return folder


@pytest.fixture
def processor_of(shared_cases, base, tmp_path):
    """Loads the processor of a copy of the base checkpoint, over which a case's files are copied."""

    def load(case):
        shutil.copytree(base, tmp_path / "copy")
        shutil.copytree(shared_cases / "models" / case, tmp_path / "copy", dirs_exist_ok=True)
        if case == "special_tokens_map":
            (tmp_path / "copy/generation_config.json").unlink()
        return Processor.load(tmp_path / "copy")

    return load


def test_stored_truncation(processor_of):
    assert len(processor_of("tokenizer_truncation").tokenise_chat("what is shown in this image, and why? " * 4)) > 60


def test_the_tag_about_answers(processor_of, base):
    assert processor_of("generation_tag").tokenise_chat("what") == Processor.load(base).tokenise_chat("what")


def test_a_template_for_texts_and_a_picture(processor_of, shared_cases):
    with pytest.raises(PromptError, match=r"^the chat template refuses the prompt: [^\n]+$"):
        processor_of("text_only_template").prepare_chat(
            "<image>what", [("image", str(shared_cases / "models" / "a.png"))]
        )


def test_json_with_separators(processor_of):
    processor = processor_of("tojson_separators")
    rendered = processor.decode(processor.tokenise_chat("what"), skip_special_tokens=False)
    assert json.loads(rendered) == [{"role": "user", "content": "what"}] and '"content":"what"' in rendered


def test_named_templates(processor_of):
    with pytest.raises(PromptError, match="of the chat templates rag, tool_use none is the default one"):
        processor_of("named_templates").tokenise_chat("what")


def test_end_ids(processor_of):
    assert processor_of("special_tokens_map").eos_ids == (317,)


def test_added_tokens(processor_of):
    assert len(processor_of("added_tokens_decoder").encode("<answer>")) == 1
