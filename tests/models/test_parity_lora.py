"""`peft` loads the adapters that are written here onto the model of `transformers`, and computes the same; and back."""

import dataclasses
import warnings
from typing import Any

import pytest
from flax.traverse_util import unflatten_dict
from hf_reference import BUILD, TOLERANCE, build_text, question, torch, worst
from lora_cases import LORA, given_adapters
from media_files import parity
from tiny import logits, run

import models
from fluxjax.config.learning import DELTA_TARGETS
from models.config import NameLayout
from models.lora import adapted, load_adapters, save_adapters
from sharding import weights as arithmetic
from sharding.walk import Walk
from sharding.weights import by_path, specs

MEDIA = (5, ("image", (1, 4, 8)), 7)

# transformers speaks of its own next release where PEFT calls it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


def merged(model, adapters, lora):
    """The model with the adapters in its weights."""
    graphdef, params = models.split(model)
    declared = specs(adapted(model, lora))
    changed = arithmetic.with_adapters(arithmetic.adapted(params, declared), unflatten_dict(adapters), declared)
    return models.merge(graphdef, unflatten_dict(by_path(params) | by_path(changed)))


def computed(model, adapters, lora, inputs):
    return run(merged(model, adapters, lora), logits, inputs, Walk())


@pytest.fixture
def peft() -> Any:
    return parity("peft")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2_5_vl", LORA.targets),
        ("qwen2", ("o_proj", "up_proj")),
        ("qwen3", LORA.targets),
        ("qwen3_vl", LORA.targets),
        ("qwen3_5", (*LORA.targets, *DELTA_TARGETS)),
    ],
)
def test_peft_computes_the_same(kind, targets, peft, tmp_path):
    pair = BUILD[kind](tmp_path / "base")
    vision = pair.model.config.vision is not None
    lora = dataclasses.replace(LORA, targets=targets)
    adapters = given_adapters(pair.model, lora)
    flat = dataclasses.replace(pair.model.config, names=NameLayout.FLAT) if vision else pair.model.config
    save_adapters(flat, unflatten_dict(adapters), tmp_path / "adapter", lora, str(pair.folder))
    asked = question(pair.model, *(MEDIA if vision else (20,)))
    with torch.no_grad():
        before = pair.reference(**asked.reference).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of keys that are missing or unexpected
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            with_adapter = peft.PeftModel.from_pretrained(pair.reference, tmp_path / "adapter").eval()
        after = with_adapter(**asked.reference).logits
    assert worst(computed(pair.model, adapters, lora, asked.inputs), after) < TOLERANCE
    assert (after - before).abs().max() > 0.3, "the adapter does nothing"
    adapted_modules = {name.split(".lora_A")[0] for name, _ in with_adapter.named_modules() if name.endswith(".lora_A")}
    # five layers of Qwen3.5; the fourth has attention
    count = 4 + 5 * 3 + 4 * len(DELTA_TARGETS) if kind == "qwen3_5" else 3 * len(targets)
    assert len(adapted_modules) == count and not any("visual" in name for name in adapted_modules)


def test_adapters_of_peft_are_read(peft, tmp_path):
    pair = build_text(tmp_path / "base")
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=list(LORA.targets), task_type="CAUSAL_LM", init_lora_weights=False
    )
    with_adapter = peft.get_peft_model(pair.reference, settings).eval()
    with_adapter.save_pretrained(tmp_path / "adapter")
    adapters = load_adapters(pair.model.config, tmp_path / "adapter", LORA)
    asked = question(pair.model, 20)
    with torch.no_grad():
        want = with_adapter(**asked.reference).logits
    assert worst(computed(pair.model, adapters, LORA, asked.inputs), want) < TOLERANCE
