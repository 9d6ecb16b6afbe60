"""Rotary embeddings in a `config.json`: `rope_parameters` (new), or `rope_scaling` and `rope_theta` (old).

Values mean what they mean to transformers 5.23 (`modeling_rope_utils`); a value that nothing here reads is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfigError, RopeConfig

_ALWAYS = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}
_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# What is read of each rope type; `axial` is transformers' name of what the vision tower has.
_READ = {
    "default": _ALWAYS | {"mrope_section"},
    "linear": _ALWAYS | {"mrope_section", "factor"},
    "yarn": _ALWAYS | {"mrope_section"} | _YARN,
}
_READ_BY_VISION = {"default": _ALWAYS, "axial": _ALWAYS}


def _settings(config: Mapping[str, Any], read: Mapping[str, set[str]]) -> tuple[str, dict[str, Any], str]:
    """(rope type, its settings, the field they stand in). `read` maps each supported type to the names it reads."""
    fields = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    if len(fields) == 2 and config["rope_scaling"] != config["rope_parameters"]:
        raise ModelConfigError("rope_scaling and rope_parameters contradict each other; keep one of them")
    field = fields[0] if fields else "rope_parameters"
    rope = dict(config.get(field) or {})
    kinds = ["default" if name == "mrope" else name for name in (rope.get("rope_type"), rope.get("type")) if name]
    if len(set(kinds)) > 1 and rope["type"] != "mrope":
        raise ModelConfigError(f"{field} has the types {rope['rope_type']!r} and {rope['type']!r}; keep one of them")
    kind = kinds[0] if kinds else "default"
    if kind not in read:
        raise ModelConfigError(f"{field}: rope type {kind!r} is not supported; supported are {', '.join(read)}")
    for name in sorted(rope.keys() - read[kind]):
        value = rope[name]
        one = name.endswith("factor") and value == 1 and value is not True  # scales by nothing
        if not (value is None or value is False or one):
            raise ModelConfigError(
                f"{field}: {name}={value!r} is not supported with rope type {kind!r}, which reads "
                f"{', '.join(sorted(read[kind]))}"
            )
    return kind, rope, field


def _theta(config: Mapping[str, Any], rope: Mapping[str, Any], default: float) -> float:
    theta = rope.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    return float(default if theta is None else theta)


def read_rope(config: Mapping[str, Any], *, default_theta: float, default_section: tuple[int, ...] = ()) -> RopeConfig:
    """Of the decoder. Raises ModelConfigError naming a type or setting that is not supported."""
    kind, rope, field = _settings(config, _READ)
    theta = _theta(config, rope, default_theta)
    section = tuple(rope.get("mrope_section") or default_section)
    if kind == "default":
        return RopeConfig(theta=theta, mrope_section=section)
    longest = config.get("max_position_embeddings", 32768)
    # transformers lets the field beside the rope settings count more than the one within
    said = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and said:
        factor = longest / said
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
        original_max_positions=int(said or longest),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def read_vision_theta(config: Mapping[str, Any]) -> float:
    """Of the vision tower, whose rotary embedding is always that of two spatial axes, unscaled."""
    _, rope, _ = _settings(config, _READ_BY_VISION)
    return _theta(config, rope, 10000.0)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the older form, which every reader understands."""
    scaling: dict[str, Any] = {}
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
