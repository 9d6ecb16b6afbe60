"""Rotary settings of a `config.json` mean what they mean to transformers; what nothing reads is refused by name."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from media_files import parity
from tiny import qwen3_vl_config, vl_config
from turns import third_of

from models.config import DecoderConfig, ModelConfigError, RopeConfig
from models.hf_config import read_qwen2
from models.layers import rotary_frequencies
from models.qwen2_5_vl.params import read_config as read_qwen2_5_vl
from models.registry import read_config, write_config

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48, "vocab_size": 40}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
yarn = st.fixed_dictionaries(
    {"factor": st.one_of(st.none(), st.sampled_from([1.0, 2.0, 4, 40.0, 0.5]))},
    optional={
        "original_max_position_embeddings": st.sampled_from([16, 512, 4096, 32768]),
        "attention_factor": st.sampled_from([None, 0.0, 0.7, 1.0, 1.5]),
        "beta_fast": st.sampled_from([None, 32, 16.0, 1]),
        "beta_slow": st.sampled_from([None, 1, 2.5, 32]),
        "mscale": st.sampled_from([None, 0, 0.707, 1.0, 1.4]),
        "mscale_all_dim": st.sampled_from([None, 0, 0.707, 1.0, 2]),
        "truncate": st.booleans(),
        "rope_theta": st.sampled_from([10000.0, 1000000.0]),
    },
)


def hf_file(rope, *, field: str = "rope_scaling", **settings: Any):
    """A `config.json` dictionary with 16 values a head."""
    return {**SIZES, "max_position_embeddings": 2048, field: rope, **settings}


def reference(rope, field, **settings):
    """transformers' frequencies and factor of the same dictionary."""
    transformers, utils = parity("transformers", "transformers.modeling_rope_utils")
    config = transformers.Qwen2Config(**hf_file(dict(rope), field=field, **settings))
    frequencies, factor = utils.ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    return frequencies.numpy(), factor


def compare(rope, field="rope_scaling", **settings):
    ours = read_qwen2(hf_file(rope, field=field, **settings)).text
    frequencies, factor = rotary_frequencies(ours.rope, ours.head_dim)
    wanted, wanted_factor = reference(rope, field, **settings)
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)
    return ours


@pytest.mark.slow
@settings(max_examples=third_of(200), deadline=None)
@example(  # a pair of which hardly anything is kept
    rope={"factor": None, "original_max_position_embeddings": 512, "truncate": False, "beta_slow": 2.5},
    field="rope_scaling",
    longest=131072,
)
@given(rope=yarn, field=st.sampled_from(["rope_scaling", "rope_parameters"]), longest=st.sampled_from([2048, 131072]))
def test_yarn_is_that_of_transformers(rope, field, longest):
    rope = {"rope_type": "yarn", **rope}
    if rope["factor"] is None and "original_max_position_embeddings" not in rope:
        rope["factor"] = 1.0  # nothing to derive one from
    text = compare(rope, field, max_position_embeddings=longest)
    config = DecoderConfig("qwen2", text)
    assert read_qwen2(write_config(config)).text == text, "written without the file it came from"


def test_scales_of_yarn_are_read():
    """DeepSeek's settings, where one of the two scales is not the other."""
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0}
    with_both = compare({**rope, "mscale_all_dim": 0.5})
    factors = [rotary_frequencies(read_qwen2(hf_file(r)).text.rope, 16)[1] for r in (rope, {**rope, "mscale": 2})]
    assert factors[0] == factors[1] == pytest.approx(0.1 * np.log(40) + 1), "one alone does nothing"
    assert rotary_frequencies(with_both.rope, 16)[1] == pytest.approx(factors[0] / (0.05 * np.log(40) + 1))


def test_the_field_beside_counts_more():
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    text = compare(rope, original_max_position_embeddings=1024)
    assert (text.rope.factor, text.rope.original_max_positions) == (2.0, 1024)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2}])
def test_linear_is_that_of_transformers(rope):
    compare(rope)
    compare(rope, rope_theta=500.0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "yarn", "factor": 4, "attn_factor": 2.0}, r"attn_factor=2\.0 is not supported with rope type 'yarn'"),
        ({"type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}, r"extrapolation_factor=0\.5"),
        ({"type": "yarn"}, "rope_scaling of type 'yarn' needs a positive factor, not None"),
        ({"type": "linear"}, "rope_scaling of type 'linear' needs a positive factor, not None"),
        ({"type": "linear", "factor": 0}, "needs a positive factor, not 0"),
        ({"type": "linear", "factor": 2.0, "mscale": 0.5}, r"mscale=0\.5 is not supported with rope type 'linear'"),
        ({"type": "mrope", "mrope_section": [2, 3, 3], "factor": 4.0}, r"factor=4\.0 is not .* rope type 'default'"),
        ({"mrope_section": [2, 3, 3], "mrope_interleaved": True}, "mrope_interleaved=True"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention="),
        ({"type": "yarn", "rope_type": "linear", "factor": 2.0}, "types 'linear' and 'yarn'; keep one"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope type 'llama3' is not supported; supported are default, linear"),
        ({"rope_type": "longrope", "factor": 8.0}, "rope type 'longrope'"),
        ({"rope_type": "proportional"}, "rope type 'proportional'"),
    ],
)
def test_what_nothing_reads_is_refused(rope, message):
    with pytest.raises(ModelConfigError, match=message):
        read_qwen2(hf_file(rope))


def test_settings_without_effect_are_accepted():
    rope = {"type": "mrope", "rope_type": "default", "mrope_interleaved": False, "factor": 1.0, "attn_factor": None}
    assert read_qwen2(hf_file(rope)).text.rope == RopeConfig()


def test_two_fields_must_mean_the_same():
    """Where they differ, transformers takes `rope_scaling` and forgets the other one's theta."""
    both: Any = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ModelConfigError, match="rope_scaling and rope_parameters contradict each other"):
        read_qwen2(hf_file({"type": "yarn", "factor": 4.0}, **both))
    old: Any = {"type": "linear", "factor": 4}
    new: Any = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    assert read_qwen2(hf_file(old, **new)).text.rope == RopeConfig(kind="linear", factor=4.0)
    with pytest.raises(ModelConfigError, match=r"rope_scaling and rope_parameters .* each other \(theta\); keep one"):
        read_qwen2(hf_file(old, rope_theta=1e6, **new))


def nested_file() -> tuple[dict[str, Any], dict[str, Any]]:
    """A `config.json` whose rotary settings stand both at the top and in `text_config`, and its `text_config`."""
    outer = write_config(vl_config())
    inner = {name: outer[name] for name in outer if name not in ("vision_config", "architectures")}
    return {**outer, "text_config": inner}, inner


def test_settings_beside_text_config_must_not_contradict_it():
    """transformers reads those of `text_config` only."""
    nested, inner = nested_file()
    assert read_qwen2_5_vl(nested).text == vl_config().text
    yarn = {**nested["rope_scaling"], "type": "yarn", "factor": 4.0}
    said = r"rope_scaling of text_config and rope_scaling of config\.json contradict .*kind, factor"
    with pytest.raises(ModelConfigError, match=said):
        read_qwen2_5_vl({**nested, "rope_scaling": yarn})
    with pytest.raises(ModelConfigError, match=r"of text_config and rope_theta of config\.json .*\(theta\); keep one"):
        read_qwen2_5_vl({**nested, "rope_theta": 2 * inner["rope_theta"]})


@pytest.mark.parametrize("theta_at_the_top", [True, False])
def test_settings_in_two_notations_may_say_the_same(theta_at_the_top):
    """The old notation at the top of the file, the new one in `text_config`."""
    nested, inner = nested_file()
    section = inner.pop("rope_scaling")["mrope_section"]
    theta = inner.pop("rope_theta")
    inner["rope_parameters"] = {"rope_type": "default", "mrope_section": section, "rope_theta": theta}
    if not theta_at_the_top:
        del nested["rope_theta"]
    assert read_qwen2_5_vl(nested).text == vl_config().text
    inner["rope_parameters"]["rope_theta"] = 2 * theta
    if theta_at_the_top:  # which `rope_parameters` used to hide
        with pytest.raises(ModelConfigError, match=r"rope_parameters of text_config and rope_.* of config\.json"):
            read_qwen2_5_vl(nested)
    inner["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "mrope_section": section, "rope_theta": theta}
    said = r"rope_parameters of text_config and rope_scaling of config\.json contradict each other"
    with pytest.raises(ModelConfigError, match=said):
        read_qwen2_5_vl(nested)


def test_qwen2_5_vl_without_sections_has_those_of_transformers():
    """One axis for all would be another model, silently."""
    config = write_config(vl_config())
    del config["rope_scaling"]
    with pytest.raises(ModelConfigError, match=r"mrope_section=\[16, 24, 24\] must sum to head_dim / 2 = 4"):
        read_qwen2_5_vl(config)
    wide = {**config, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    wide["vision_config"] = {**config["vision_config"], "out_hidden_size": 512}
    assert read_qwen2_5_vl(wide).text.rope.mrope_section == (16, 24, 24)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "axial", "rope_theta": 500}}]
)
def test_theta_of_the_vision_tower_is_read_and_written(rope):
    config = write_config(vl_config())
    config["vision_config"] = {k: v for k, v in config["vision_config"].items() if k != "rope_theta"} | rope
    read = read_qwen2_5_vl(config)
    assert read.vision.rope_theta == 500.0
    bare = dataclasses.replace(read, extra="{}")
    assert read_qwen2_5_vl(write_config(bare)) == read


def test_a_scaled_vision_tower_is_refused():
    config = write_config(vl_config())
    config["vision_config"]["rope_scaling"] = {"type": "linear", "factor": 2.0}
    with pytest.raises(ModelConfigError, match="rope type 'linear' is not supported; supported are default, axial"):
        read_qwen2_5_vl(config)


def test_every_setting_of_a_rope_is_written():
    """A field that `write_rope` forgets would come back as its default."""
    rope = RopeConfig(500.0, (2, 2, 1), "yarn", 4.0, 64, 16.0, 2.0, 0.7, 0.5, 2.0, False, True)
    assert all(getattr(rope, field.name) != field.default for field in dataclasses.fields(RopeConfig))
    for config in (
        vl_config(rope=dataclasses.replace(rope, mrope_section=(2, 1, 1), interleaved=False)),
        qwen3_vl_config(rope=rope),
    ):
        assert read_config(write_config(config)) == config
