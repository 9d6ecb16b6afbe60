"""The arrays of the central types have the shapes and dtypes that their annotations say, wherever they are."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import BeartypeConf
from beartype.door import is_bearable
from jaxtyping import jaxtyped
from packing_cases import MODEL, compose, make_config, make_groups

from fluxjax.base.types import TrainBatch
from fluxjax.config import FSDP, STRATEGIES
from models.inputs import PackedTokens, VisionInput

CENTRAL = (TrainBatch, PackedTokens, VisionInput)


def wrong_fields(value: Any) -> list[str]:
    """The fields, also those of fields, that are not as they are annotated: one size for each letter of a value."""
    wrong = []
    with jaxtyped("context"):  # pyright: ignore[reportGeneralTypeIssues]
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if isinstance(held, CENTRAL):
                wrong += wrong_fields(held)
            elif not is_bearable(held, _annotation(type(value), field.name), conf=BeartypeConf()):
                wrong.append(f"{type(value).__name__}.{field.name}")
    return wrong


def _annotation(kind: type, name: str) -> Any:
    # `typing.get_type_hints` says nothing of a class that `no_type_check` keeps from being checked at every creation.
    annotation = kind.__annotations__[name]
    return eval(annotation, vars(sys.modules[kind.__module__])) if isinstance(annotation, str) else annotation


def batches(strategy: Any) -> list[TrainBatch]:
    config = make_config(rows=4)
    config.sharding.strategy = strategy
    config.rollout.max_sequence_tokens = 48
    config.rollout.temperature = "linear"
    groups, prepared = make_groups([[4], [5, (1, 4, 4)], [9]], [[3, 2], [1], [7]])
    return [*compose(groups, prepared, config, 4, vision=MODEL.vision, text=MODEL.text).batches]


@pytest.mark.parametrize("strategy", [kind() for kind in STRATEGIES.values()])
def test_batches_are_as_annotated(strategy: Any) -> None:
    """On the host, on a device, as shapes only, and as what is traced."""
    for batch in batches(strategy):
        assert batch.inputs.temperatures_BT is not None
        assert wrong_fields(batch) == []
        on_device = jax.tree.map(jnp.asarray, batch)
        assert wrong_fields(on_device) == []
        traced = []
        abstract = jax.eval_shape(lambda x, traced=traced: traced.append(wrong_fields(x)) or x, on_device)
        assert wrong_fields(abstract) == [] and traced == [[]]


def test_what_is_not_as_annotated_is_found() -> None:
    """A dtype, a shape of its own, a shape that differs from the others."""
    batch = batches(FSDP())[0]
    inputs, vision = batch.inputs, batch.inputs.vision
    assert vision is not None
    replace = dataclasses.replace
    double = replace(batch, advantages_BT=np.asarray(batch.advantages_BT, np.float64))
    assert wrong_fields(double) == ["TrainBatch.advantages_BT"]
    flat = replace(batch, inputs=replace(inputs, tokens_BT=inputs.tokens_BT.reshape(-1)))
    assert wrong_fields(flat) == ["PackedTokens.tokens_BT"]
    short = replace(batch, inputs=replace(inputs, branches_BT=inputs.branches_BT[:, 1:]))
    assert wrong_fields(short) == ["PackedTokens.branches_BT"]
    pixels = replace(inputs, vision=replace(vision, frame_segments_P=vision.frame_segments_P[1:]))
    assert wrong_fields(pixels) == ["VisionInput.frame_segments_P"]
