"""Whatever stands in the files of a checkpoint: they are read, or refused in one line."""

import dataclasses
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junk import spoiled
from tiny import qwen2_config, qwen3_config, vl_config
from turns import third_of

from models.config import ModelConfigError
from models.processing import Processor, tokens
from models.processing import tiny as tiny_processor
from models.registry import read_config, write_config

TINY = qwen2_config(), qwen3_config(), vl_config()
CONFIGS = [write_config(dataclasses.replace(config, extra="{}")) for config in TINY]


@settings(max_examples=third_of(600), deadline=None)
@given(st.sampled_from(CONFIGS), st.integers(0, 2**32))
def test_any_config_is_read_or_refused_in_one_line(config, seed):
    try:
        read_config(spoiled(config, random.Random(seed)))
    except ModelConfigError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", ["28", -1, 0, 2.5, True, [28], 2**40, float("nan")])
def test_a_size_that_is_none_is_named(name, value):
    field = {"num_hidden_layers": "num_(hidden_)?layers", "num_attention_heads": "num_(attention_)?heads"}.get(
        name, name
    )
    for config in CONFIGS:
        inner = {**config["text_config"], name: value} if "text_config" in config else None
        with pytest.raises(ModelConfigError, match=field):
            read_config({**config, "text_config": inner} if inner else {**config, name: value})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].nothing.more }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x'.__class__.__mro__ }}",
        "{{ raise_exception('no system message') }}",
    ],
)
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(ValueError, match=r"the chat template (fails on|refuses) the prompt: ") as caught:
        tokens.render(template, [{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The JSON files of a processor, and what is in them."""
    folder = tmp_path_factory.mktemp("processor")
    tiny_processor.build(["abc"]).save(folder)
    files = {file: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    return files | {folder / "generation_config.json": {"eos_token_id": [0]}}


@pytest.mark.parametrize("ids", ["x", {"a": 1}, -1, True, 1.5, 2**40, [0, "x"], [0, None], [[0]], [0, -5]])
def test_an_end_id_that_is_none_is_named(saved, ids):
    """Else a server compares it with tokens, or sorts it among other ids."""
    (file,) = (file for file in saved if file.name == "generation_config.json")
    file.write_text(json.dumps({"eos_token_id": ids}))
    try:
        with pytest.raises(ValueError, match=r"processor\d*: eos_token_id must be a token id or a list of them, not "):
            Processor.load(file.parent)
    finally:
        file.write_text(json.dumps(saved[file]))


@settings(max_examples=third_of(150), deadline=None)
@given(st.integers(0, 2**32))
def test_any_files_of_a_processor_are_read_or_refused_in_one_line(saved, seed):
    draw = random.Random(seed)
    file = draw.choice(list(saved))
    file.write_text(json.dumps(spoiled(saved[file], draw)))
    try:
        ids = Processor.load(file.parent).eos_ids
        assert all(type(id) is int and id >= 0 for id in ids)
    except ValueError as error:
        assert str(error) and "\n" not in str(error), file.name
    finally:
        file.write_text(json.dumps(saved[file]))
