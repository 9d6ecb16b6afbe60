"""Rotary embeddings in a `config.json`: `rope_parameters` (new), or `rope_scaling` and `rope_theta` (old).

Settings mean what they mean in transformers 5.23 (`modeling_rope_utils`). A setting that nothing here reads is refused.
"""

import dataclasses
from collections.abc import Mapping

from .config import JsonObject, ModelConfigError, RopeConfig

_FIELDS = ("rope_scaling", "rope_parameters")
_ALWAYS = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}
_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# The settings that each rope type reads; transformers calls the vision tower's type `axial`.
_READ = {
    "default": _ALWAYS | {"mrope_section"},
    "linear": _ALWAYS | {"mrope_section", "factor"},
    "yarn": _ALWAYS | {"mrope_section"} | _YARN,
}
_READ_BY_VISION = {"default": _ALWAYS, "axial": _ALWAYS}


def _settings(config: JsonObject, field: str, read: Mapping[str, set[str]]) -> tuple[str, JsonObject]:
    """(rope type, its settings) in a field of `config`; `read` maps each supported rope type to the names it reads."""
    rope = config.get(field) or {}
    kinds = ["default" if name == "mrope" else name for name in (rope.get("rope_type"), rope.get("type")) if name]
    if len(set(kinds)) > 1 and rope["type"] != "mrope":
        raise ModelConfigError(f"{field} has the types {rope['rope_type']!r} and {rope['type']!r}; keep one of them")
    kind = kinds[0] if kinds else "default"
    if kind not in read:
        raise ModelConfigError(f"{field}: rope type {kind!r} is not supported; supported are {', '.join(read)}")
    for name in sorted(rope.keys() - read[kind]):
        value = rope[name]
        scales_by_nothing = name.endswith("factor") and value == 1 and value is not True
        if not (value is None or value is False or scales_by_nothing):
            raise ModelConfigError(
                f"{field}: {name}={value!r} is not supported with rope type {kind!r}, which reads "
                f"{', '.join(sorted(read[kind]))}"
            )
    return kind, rope


def _theta(config: JsonObject, rope: JsonObject, default: float) -> float:
    theta = rope.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    return float(default if theta is None else theta)


def _fields(config: JsonObject) -> list[str]:
    """The fields of `config` that hold rotary settings; `rope_parameters` if no field does."""
    return [name for name in _FIELDS if config.get(name)] or ["rope_parameters"]


def read_rope(
    config: JsonObject, outer: JsonObject, *, default_theta: float, default_section: tuple[int, ...] = ()
) -> RopeConfig:
    """The decoder's rotary embedding in `config`; `outer` is the whole file, whose top may repeat the settings.

    Raises ModelConfigError naming a type or setting that is not supported, or two fields that differ in what they mean.
    """
    readings = {
        field if config.get(field) else f"the default of {field}": _read_field(
            config, field, default_theta, default_section
        )
        for field in _fields(config)
    }
    rope = next(iter(readings.values()))
    if outer is not config:
        # transformers reads `text_config` only: a setting that the top leaves out has its value there
        repeated = {name: outer[name] for name in (*_FIELDS, "rope_theta") if outer.get(name)}
        beside = {**config, "rope_theta": rope.theta, **repeated}
        readings = {f"{field} of text_config": reading for field, reading in readings.items()}
        if "rope_theta" in repeated:
            readings["rope_theta of config.json"] = dataclasses.replace(rope, theta=float(outer["rope_theta"]))
        for field in filter(repeated.get, _FIELDS):
            readings[f"{field} of config.json"] = _read_field(beside, field, default_theta, default_section)
    first, *further = readings
    for field in further:
        if differing := [name for name, value in vars(readings[field]).items() if value != getattr(rope, name)]:
            raise ModelConfigError(
                f"{first} and {field} contradict each other ({', '.join(differing)}); keep one of them"
            )
    return rope


def _read_field(config: JsonObject, field: str, default_theta: float, default_section: tuple[int, ...]) -> RopeConfig:
    kind, rope = _settings(config, field, _READ)
    theta = _theta(config, rope, default_theta)
    section = tuple(rope.get("mrope_section") or default_section)
    if kind == "default":
        return RopeConfig(theta=theta, mrope_section=section)
    longest = config.get("max_position_embeddings", 32768)
    # transformers prefers the field beside the rope settings to the field within them
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = longest / original
    if factor is None or factor <= 0:
        raise ModelConfigError(f"{field} of type {kind!r} needs a positive factor, not {factor!r}")
    if kind == "linear":
        return RopeConfig(theta=theta, mrope_section=section, kind=kind, factor=float(factor))
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        theta=theta,
        mrope_section=section,
        kind=kind,
        factor=float(factor),
        original_max_positions=int(original or longest),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def read_vision_theta(config: JsonObject) -> float:
    """The base of the vision tower's rotary embedding, which always has two spatial axes and no scaling."""
    settings = {field: _settings(config, field, _READ_BY_VISION)[1] for field in _fields(config)}
    thetas = {field: _theta(config, rope, 10000.0) for field, rope in settings.items()}
    if len(set(thetas.values())) > 1:
        raise ModelConfigError(f"{' and '.join(thetas)} of vision_config contradict each other; keep one of them")
    return next(iter(thetas.values()))


def write_rope(rope: RopeConfig) -> dict[str, object]:
    """`rope_theta` and `rope_scaling`: the older form, which every reader understands."""
    scaling: dict[str, object] = {}
    if rope.mrope_section:
        scaling = {"type": "mrope", "mrope_section": list(rope.mrope_section)}
    if rope.kind != "default":
        scaling |= {"type": rope.kind, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
        scaling |= {name: value for name in ("mscale", "mscale_all_dim") if (value := getattr(rope, name))}
    return {"rope_theta": rope.theta, "rope_scaling": scaling or None}
