"""The extension point: an algorithm by object, by import path or by name; what is none ends in one clear line."""

import copy
import dataclasses
import json
import sys
import textwrap
import types

import pytest
from conftest import ROOT
from packing_cases import compose, make_config, make_groups

from fluxjax.algorithms import ALGORITHMS, RLAlgorithm, find_algorithm, grpo
from fluxjax.config import OWN_SETTINGS, AlgorithmConfig, ConfigError, cli
from fluxjax.config.run_folder import from_json, to_json
from fluxjax.hosts.gang import fingerprint

MINE = """
    from fluxjax.algorithms import RLAlgorithm
    class Mine(RLAlgorithm):
        def __init__(self, scale=1.0):
            self.scale = scale
        def advantages(self, groups, cfg):
            return list(groups)
        def token_loss(self, logprobs_BT, entropies_BT, batch, cfg):
            return self.scale * logprobs_BT, {}
    doubled = Mine(2.0)
    class Strict(Mine):
        def __init__(self, scale):
            pass
    class Half(RLAlgorithm):
        def advantages(self, groups, cfg):
            return list(groups)
    number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "my_broken.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_algorithms"
    sys.modules.pop("my_algorithms", None)


def test_a_class_is_called_and_an_object_taken_as_it_is(module):
    assert vars(find_algorithm(AlgorithmConfig(name=f"{module}:Mine"))) == {"scale": 1.0}
    assert vars(find_algorithm(AlgorithmConfig(name=f"{module}:doubled"))) == {"scale": 2.0}
    mine = sys.modules[module].Mine(3.0)
    assert find_algorithm(AlgorithmConfig(name=mine)) is mine


def test_a_module_with_the_two_functions_is_an_algorithm():
    found = find_algorithm(AlgorithmConfig(name="fluxjax.algorithms:grpo"))
    assert isinstance(found, RLAlgorithm) and found.token_loss is grpo.token_loss
    assert not found.idle_without_advantage(AlgorithmConfig()), "nobody said so"


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ("grop", r"algorithm.name is 'grop'; it must be one of grpo, .*or module:attribute; did you mean grpo\?"),
        ("sft", "algorithm.name is sft, which only serves the warm start"),
        (":Mine", "it must be one of"),
        ("my_algorithms:Mine2", "has no 'Mine2'; it has .*Mine"),
        ("my_algorithms:Strict", r"Strict\(\) raised TypeError.*name an object of the class instead"),
        ("my_algorithms:Half", r"an algorithm without token_loss\(\)"),
        ("my_algorithms:number", r"algorithm.name=my_algorithms:number is an algorithm without advantages\(\): 3"),
        ("my_broken:Mine", "importing 'my_broken' raised ModuleNotFoundError"),
        ("my_missing:Mine", "importing 'my_missing' raised ModuleNotFoundError"),
        (AlgorithmConfig(name=object()), r"algorithm.name is an algorithm without advantages\(\)"),
        (AlgorithmConfig(name=type("Loose", (grpo.GRPO,), {"coupled": True})()), r"an algorithm without couple\(\)"),
    ],
)
def test_what_is_no_algorithm_ends_in_one_line(module, cfg, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        cfg = AlgorithmConfig(name=cfg) if isinstance(cfg, str) else cfg
        cfg.validate()
        find_algorithm(cfg)
    assert "\n" not in str(caught.value)


def test_an_object_is_neither_copied_nor_written_down_nor_a_flag(module):
    impl = find_algorithm(AlgorithmConfig(name=f"{module}:Mine"))
    config = cli.load(["--config=configs/text.py:debug"])
    config.algorithm.name = impl
    config.validate()
    assert copy.deepcopy(config).algorithm.name is impl
    assert dataclasses.replace(config.algorithm, clip_low=0.1).name is impl
    saved = json.loads(json.dumps(to_json(config)))
    assert saved["algorithm"]["name"] == "my_algorithms:Mine"
    assert from_json(saved).algorithm.label == "my_algorithms:Mine"
    assert dict(cli.flatten(config.algorithm))["name"] == "my_algorithms:Mine"
    assert "--config.algorithm.name=my_algorithms:Mine" in cli.help_text("", config)


def test_a_name_brings_its_own_settings_and_flags_count_more():
    assert OWN_SETTINGS.keys() == ALGORITHMS.keys()
    for name, settings in OWN_SETTINGS.items():
        if name == "sft":
            continue
        teacher = ["--config.algorithm.reference=."] if name == "distillation" else []
        config = cli.load([f"--config.algorithm.name={name}", *teacher])
        assert {field: getattr(config.algorithm, field) for field in settings} == settings
        field = "kl_coefficient" if name == "dpo" else "clip_low"
        assert AlgorithmConfig.of(name, **{field: 0.07}) == AlgorithmConfig(**{"name": name, **settings, field: 0.07})
        config = cli.load([f"--config.algorithm.{field}=0.07", f"--config.algorithm.name={name}", *teacher])
        assert getattr(config.algorithm, field) == 0.07, "whatever the order"


def test_processes_that_would_run_other_code_have_other_fingerprints(module, tmp_path):
    groups, prepared = make_groups([[4]], [[3]])
    config = make_config()
    compositions = [compose(groups, prepared, config)]
    built_in = fingerprint(config, compositions)
    config.algorithm.name = f"{module}:Mine"
    mine = fingerprint(config, compositions)
    config.algorithm.name = find_algorithm(config.algorithm)
    as_object = fingerprint(config, compositions)
    assert as_object == fingerprint(copy.deepcopy(config), compositions)
    assert built_in != mine == as_object, "the same code"
    elsewhere = types.SimpleNamespace(**vars(grpo))
    config.algorithm.name = elsewhere
    assert fingerprint(config, compositions) not in (built_in, mine, as_object)


def test_the_example_is_short():
    lines = (ROOT / "examples" / "own_algorithm.py").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("class "))
    end = next(i for i, line in enumerate(lines) if line.startswith("def main"))
    assert end - begin < 40


@pytest.mark.parametrize("name", ["gspo", "dr_grpo", "reinforce_plus_plus", "cispo"])
def test_another_name_takes_back_what_the_one_before_brought_along(name):
    config = AlgorithmConfig.of(name, entropy_coefficient=0.1)
    config.choose("grpo")
    assert config == AlgorithmConfig(entropy_coefficient=0.1)


def test_an_object_without_the_base_class_keeps_all_of_its_members():
    """A module or an object need not derive from `RLAlgorithm` to be coupled, for instance."""

    def couple(groups, log_ratios, cfg):
        return {}, {}

    mine = types.SimpleNamespace(advantages=print, token_loss=repr, couple=couple, coupled=True, whole_step=True)
    found = find_algorithm(AlgorithmConfig(name=mine))
    assert found.couple is couple and found.coupled and found.whole_step and found.advantages is print
    assert not found.critic and not found.idle_without_advantage(AlgorithmConfig())
