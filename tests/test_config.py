"""Configuration: every shipped file against its golden text, and one clear line for each kind of mistake.

`test_refused_settings` has the settings that cannot work together.
"""

import copy
import dataclasses
import json
import operator
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from fluxjax.config import AprilConfig, Config, ConfigError, DType, FlexUlysses, Importance, cli, run_folder
from fluxjax.config.bounds import Section, children
from fluxjax.config.cli import NEEDS, remarks
from fluxjax.config.help import help_text
from fluxjax.config.run_folder import from_json, to_json
from fluxjax.simulation.options import SimulateConfig as SimulatedConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDENS = pathlib.Path(__file__).parent / "goldens"
SIMULATED = [f"configs/simulation.py{variant}" for variant in ("", ":7b", ":14b", ":32b", ":1024", ":faults")]
TEXTS = ("qwen2_5_7b", "qwen3_8b", "qwen3_32b")
VISUAL = ("qwen2_5_vl_7b", "qwen2_5_vl_32b", "mimo_vl_7b", "qwen3_vl_8b", "qwen3_5_9b")
REAL = [f"configs/{name}.py" for name in (*VISUAL, *TEXTS)] + ["configs/qwen3_vl_8b.py:agent"]
ONE_GPU = [
    f"configs/{name}" for name in ("qwen2_5_vl_3b.py:one_gpu", "qwen2_5_vl_3b.py:one_gpu_full", "qwen3_5_4b.py:one_gpu")
]
FLEET = ["configs/vlm_sglang.py", "configs/vlm_sglang.py:serve", "configs/qwen2_5_vl_7b.py:fleet"]
TINY = [*(f"configs/vlm.py{variant}" for variant in ("", ":debug", ":qwen3_vl", ":qwen3_5")), "configs/text.py"]
TINY += ["configs/text.py:debug", "configs/agent.py", "configs/agent.py:frozenlake"]
SHIPPED = [*TINY, *REAL, *ONE_GPU, *FLEET]


@pytest.mark.parametrize("selected", SHIPPED + SIMULATED)
def test_shipped_config_equals_its_golden(selected):
    """And comes back from JSON. Set FLUXJAX_WRITE_GOLDENS=1 to accept an intended change."""
    config = cli.load([f"--config={selected}"], SimulatedConfig if selected in SIMULATED else Config)
    unread = getattr(config, "unread", ())
    fields = ((n, v) for n, v in cli.flatten(config) if not any(n == u or n.startswith(f"{u}.") for u in unread))
    text = "".join(f"{name}={value}\n" for name, value in fields)
    golden = GOLDENS / (selected.replace("/", "_").replace(":", "_") + ".txt")
    if os.environ.get("FLUXJAX_WRITE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert selected in SIMULATED or from_json(json.loads(json.dumps(to_json(config)))) == config


def test_every_shipped_config_is_covered():
    files = {f"configs/{file.name}" for file in (ROOT / "configs").glob("*.py")}
    assert files == {selected.partition(":")[0] for selected in SHIPPED + SIMULATED}


def test_overrides_are_typed():
    flags = ["optim.lr=2e-6", "model.compute_dtype=bfloat16", "model.tiny.vision_full_attention_layers=(0, 1)"]
    flags += ["data.sources.digits.weight=3", "policy=april", "policy.oversample=2"]
    flags += ["rollout.temperature=linear(1, 0.5)", "optim.betas=(0.8, 0)"]
    config = cli.load([f"--config.{flag}" for flag in flags])
    assert (config.optim.lr, config.optim.betas, config.model.compute_dtype) == (2e-6, (0.8, 0.0), DType.BFLOAT16)
    assert config.model.tiny["vision_full_attention_layers"] == (0, 1)
    assert config.data.sources["digits"].weight == 3.0
    assert config.policy == AprilConfig(oversample=2.0) and config.rollout.temperature == "linear(1, 0.5)"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.optim.lrr=1", "--config.optim.lrr: no such field; did you mean --config.optim.lr?"),
        ("--config.lr=1", "did you mean --config.optim.lr?"),
        ("--config.learning_rate=1", "did you mean --config.optim.lr?"),
        ("--config.optim.learning_rate=1", "did you mean --config.optim.lr?"),
        ("--config.warm_start.learning_rate=1", "did you mean --config.warm_start.lr?"),
        ("--config.num_generations=1", "did you mean --config.rollout.group_size?"),
        ("--config.output_dir=x", "did you mean --config.run_dir?"),
        ("--config.optm.lr=1", "did you mean --config.optim?"),
        ("--config.data.sources.digit.weight=1", "did you mean --config.data.sources.digits?"),
        ("--config=configs/nope.py", "there is no file 'configs/nope.py'"),
        ("--config=configs/vlm.py:nope", "not 'nope'"),
        ("--steps=1", "unknown argument '--steps=1'"),
        ("--config=README.md", "README.md cannot be run: SyntaxError"),
    ],
)
def test_mistakes_end_in_one_clear_line(argument, expected):
    with pytest.raises(ConfigError) as caught:
        cli.load([argument])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_file_prepares_for_another_choice_is_told_and_not_refused():
    config = Config()
    assert remarks(config) == []
    config.critic.lr = 0.1
    assert remarks(config) == ["settings without effect here, because algorithm.name is grpo: critic.lr"]


@pytest.mark.parametrize("field", ["optim.lr", "warm_start.lr"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("linear(2.0, 0)", "must be in [0, 1]"),
        ("0", "above 0"),
        ("cosine(0, 0)", "above 0"),
        ("pid(metric=entropy, target=0.6, low=0.1, high=0.5)", "can't depend on metrics"),
        ("cosine(1e-3", "allowed are"),
        ("math: 0.1; *: 0.2", "one value for all sources"),
    ],
)
def test_a_schedule_that_is_no_learning_rate_is_refused(field: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.load(["--config=configs/text.py", "--config.optim.schedule=constant", f"--config.{field}={value}"])
    assert field in str(caught.value) and expected in str(caught.value)
    cli.load(["--config=configs/text.py", "--config.optim.schedule=constant", f"--config.{field}=cosine(1e-3, 0)"])


def test_two_courses_of_a_learning_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.schedule must be constant, not linear"):
        cli.load(["--config=configs/text.py", "--config.optim.lr=cosine(1e-3, 0)"])


@pytest.mark.parametrize(("devices", "most"), [(12, 4), (96, 32), (7, 1)])
def test_devices_that_are_no_power_of_two_bound_how_far_sequences_are_spread(devices: int, most: int) -> None:
    config = Config()
    assert remarks(config, devices) == []
    config.sharding.strategy = FlexUlysses()
    [line] = remarks(config, devices)
    assert f"flex_ulysses on {devices} devices" in line and f"at most {most} of them" in line
    assert remarks(config, 64) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("policy=adaptive_async", "adaptive_async trains on older versions without an importance correction"),
        ("policy=april", "april trains on older versions without an importance correction"),
        ("policy=tail_batching", "tail_batching trains on older versions without an importance correction"),
        ("policy=april algorithm.importance.decoupled=True", "algorithm.importance.decoupled clips around"),
    ],
)
def test_warnings_name_the_field(settings, expected):
    config = cli.load([f"--config.{setting}" for setting in settings.split()])
    (warning,) = [line for line in remarks(config) if line.startswith("warning: ")]
    assert expected in warning and "algorithm.importance" in warning
    config.algorithm.importance.decoupled = False
    config.algorithm.importance.kind = Importance.TRUNCATE
    assert not [line for line in remarks(config) if line.startswith("warning: ")]


def test_other_peoples_names_are_of_settings_that_exist():
    assert set(cli._OTHER_NAMES.values()) <= set(cli.every_field(Config()))


def test_a_checkpoints_run_does_not_list_the_tiny_models_sizes(tmp_path):
    """It would say that a model of 7B has a width of 64."""
    config = cli.load(["--config=configs/qwen2_5_7b.py", f"--config.run_dir={tmp_path}"])
    run_folder.write(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model"] == {"path": config.model.path, "compute_dtype": "bfloat16"}
    assert run_folder.read_config(tmp_path) == config
    assert "hidden_size" in str(to_json(Config())), "of the tiny model they are settings"


@pytest.mark.parametrize("content", [b"[]", b'{"model": 3}', b'{"data": {"sources": []}}', b'{"seed"', b"\xff"])
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        run_folder.read_config(tmp_path)


def test_settings_that_may_be_unread_exist_and_are_named_once_each():
    """A renamed field must not silently lose its line."""
    names = {name for name, _ in cli.flatten(Config())}
    sections = {name.partition(".")[0] for name in names} | {name.rpartition(".")[0] for name in names}
    assert {field for need in NEEDS for field in need.fields.split()} <= names | sections
    assert {need.setting for need in NEEDS} <= names | {"policy.name"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("config.optim.lrr = 3", "did you mean lr?"),
        ("config.optim.learning_rate = 3", "did you mean optim.lr?"),
        ("config.learning_rate = 3", "did you mean optim.lr?"),
        ("config.model.vision = False", "ModelConfig has no field 'vision'; it has path, "),
        ("config.zzz = 1", "Config has no field 'zzz'; it has name, seed, "),
        ("config.model.tiny['layers'] = 1", "model.tiny has no field 'layers'; it has architecture, hidden_size, "),
        ("config.model.tiny['num_layers'] = 1.5", "model.tiny.num_layers is 1.5; it must be of type int"),
        (
            "config.data.sources['digits'].columns['image'] = 'x'",
            "columns is {'image': 'x'}; it must have only the keys prompt, ",
        ),
        ("config.steps = '5'", "steps is '5'; it must be of type int"),
        ("config.optim.lr = True", "optim.lr is True; it must be a finite number"),
        ("config.data.sources['a'] = 'x.jsonl'", "data.sources.a must be a SourceConfig, not 'x.jsonl'"),
        ("config.rollout = None", "rollout must be a RolloutConfig, not None"),
    ],
)
def test_mistakes_in_a_configuration_file(tmp_path, line, expected):
    file = tmp_path / "mine.py"
    file.write_text(
        "from fluxjax.config import Config, SourceConfig\n\n\ndef get_config(variant=''):\n    config = Config()\n"
        f"    config.data.sources['digits'] = SourceConfig()\n    {line}\n    return config\n"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        cli.load([f"--config={file}"])


NO_CHOICE = (
    r"the saved configuration has (sharding\.strategy|policy): .*, which is not among the choices of this version: "
)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"optim": {"momentum": 1}}, r"optim\.momentum"),
        ({"policy": {"name": "april"}}, NO_CHOICE),  # of an earlier release, as `odc` below
        *(({"sharding": {"strategy": value}}, NO_CHOICE) for value in (None, 3, ["odc"], "odc")),
    ],
)
def test_a_saved_configuration_that_does_not_fit_is_refused_by_name(saved, expected):
    with pytest.raises(ConfigError, match=expected):
        from_json(saved)


HEAVY = {
    "PIL", "av", "flax", "grain", "jax", "jaxlib", "matplotlib", "numpy", "optax", "orbax", "prometheus_client",
    "pyarrow", "rich", "scipy", "sklearn", "skimage", "tensorboardX", "tokenizers", "torch", "transformers",
}  # fmt: skip


def command(*arguments):
    """The whole command in a fresh interpreter: what came of it, its error lines, and the packages that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fluxjax.train", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    imports = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    return done, [line for line in lines if not line.startswith("import time:")], imports


def test_command_line_reports_a_typo_in_one_line_and_imports_nothing_heavy():
    """Exit status 2, one line, no traceback; nobody waits for JAX to be told of a typo, or to read the help."""
    typo, errors, imports = command("--config.optim.lrr=1")
    assert typo.returncode == 2
    assert errors == ["error: --config.optim.lrr: no such field; did you mean --config.optim.lr?"]
    assert "fluxjax" in imports and not imports & HEAVY
    shown, errors, imports = command("--help")
    assert shown.returncode == 0 and errors == []
    assert "fluxjax" in imports and not imports & HEAVY
    for name, _ in cli.flatten(Config()):
        assert f"--config.{name}=" in shown.stdout
    lines = {line.partition("=")[0]: line for line in shown.stdout.splitlines()}
    assert lines["  --config.optim.betas"].endswith("must be two numbers, in [0, 1) and [0, 1)")
    assert lines["  --config.sharding.strategy.max_degree"].endswith("0 or a power of two [ulysses, flex_ulysses, odc]")
    assert "      flex_ulysses: Each sequence is spread over as many devices as balance needs." in shown.stdout
    assert "      cosine" in shown.stdout


BOUNDED = """
    steps seed name packing.tokens_per_row packing.rows_per_device packing.patches_per_device
    rollout.max_sequence_tokens rollout.prompts_per_step rollout.group_size
    rollout.max_new_tokens rollout.slots rollout.kv_tokens rollout.temperature
    optim.lr optim.eps optim.warmup_steps optim.weight_decay optim.max_grad_norm
    warm_start.lr warm_start.batch_size warm_start.steps sharding.devices_per_host sharding.devices
    checkpoint.keep checkpoint.every evaluation.samples
    evaluation.every data.video_frames data.max_pixels report.dump_samples_every
    algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.minibatches algorithm.epochs
    algorithm.kl_coefficient algorithm.reference_every algorithm.entropy_coefficient
    algorithm.importance.decay parallelism.degree parallelism.min_degree
    rollout.max_num_gen_batches rollout.engines speculative_sync
"""


def test_every_bound_refuses_what_lies_beyond_it():
    """A field must not silently lose its bound; the error names the field, the value and what is allowed."""
    config = cli.load([])
    for name in BOUNDED.split():
        changed = copy.deepcopy(config)
        section = operator.attrgetter(name.rpartition(".")[0])(changed) if "." in name else changed
        field = name.rpartition(".")[2]
        wrong = "a/b" if name == "name" else type(getattr(section, field))(-1)
        setattr(section, field, wrong)
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {wrong!r}; it must ")):
            changed.validate()


def sections(held):
    """Yields all sections within a section or a dictionary, itself included."""
    if isinstance(held, Section):
        yield held
    for value in children(held).values():
        yield from sections(value) if isinstance(value, Section | Mapping) else ()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda section: dataclasses.replace(section)])
def test_a_settled_configuration_refuses_changes_and_its_copies_do_not(copied):
    config = cli.load(["--config.policy=april"])
    config.settle()
    settled = list(sections(config))
    assert any(section is config.policy for section in settled)
    assert any(section is config.data.sources["digits"] for section in settled)
    for section in settled:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            with pytest.raises(
                ConfigError, match=f"^{field.name}: the configuration of a FluxTrainer can't be changed"
            ):
                setattr(section, field.name, None)
            assert getattr(section, field.name) is value
        free = copied(section)
        assert free == section and type(free) is type(section)
        for field in dataclasses.fields(section):
            setattr(free, field.name, None)
    assert len(list(sections(copy.deepcopy(config)))) == len(settled)


def test_a_bound_takes_its_ends():
    config = cli.load([])
    config.optim.betas, config.seed = (0, 0.9), 2**31 - 1
    config.validate()
    for wrong in ((0.9, 1.0), (0.9,), (0.9, 0.9, 0.9), (0.9, "x")):
        config.optim.betas = wrong  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ConfigError, match=r"optim\.betas is \(0\.9.*; it must be two numbers, in \[0, 1\)"):
            config.validate()


def test_help_has_words_for_every_setting_and_filters():
    config = cli.load(["--config=configs/text.py"])
    for line in help_text("", config).splitlines():
        assert not line.startswith("  --config.") or re.search(r"=\S*(, \S*)*  +\S|: \S", line), line
    found = help_text("", config, "warmup")
    assert "--config.optim.warmup_steps=" in found and "--config.steps" not in found
    assert help_text("", config, "xyzzy") == "no setting has 'xyzzy' in its name or its help text"
    with_values = help_text("", config)
    assert "--config.steps=200" in with_values and "--config.model.tiny.architecture=qwen2" in with_values


def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.load([]).name == "vlm"
    assert cli.load(["--config=configs/text.py:debug"]).name == "text-debug"


def test_a_tilde_is_the_home_of_the_user(monkeypatch):
    """A shell leaves it alone in `--config.run_dir=~/run`."""
    monkeypatch.setenv("HOME", "/home/somebody")
    flags = ["run_dir=~/run", "model.path=~/model", "data.sources.digits.path=~/data.jsonl"]
    flags += ["lora.rank=1", "lora.adapter=~", "name=a~b"]
    config = cli.load(["--config=configs/vlm.py", *(f"--config.{flag}" for flag in flags)])
    assert (config.run_dir, config.model.path) == ("/home/somebody/run", "/home/somebody/model")
    assert (config.data.sources["digits"].path, config.lora.adapter) == ("/home/somebody/data.jsonl", "/home/somebody")
    assert config.name == "a~b"
