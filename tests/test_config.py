"""Configuration: every shipped file against its golden text, and one clear line for each kind of mistake."""

import copy
import inspect
import json
import operator
import os
import pathlib
import re
import subprocess
import sys

import pytest

from fluxjax import config as sections
from fluxjax.config import Config, ConfigError, DType, Importance, algorithms, cli, run_folder, scheduling
from fluxjax.config.cli import NEEDS, remarks
from fluxjax.config.run_folder import from_json, to_json
from fluxjax.simulation.options import SimulateConfig as SimulatedConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDENS = pathlib.Path(__file__).parent / "goldens"
SIMULATED = [f"configs/simulation.py{variant}" for variant in ("", ":7b", ":14b", ":32b", ":1024", ":faults")]
REAL = [f"configs/{name}.py" for name in ("qwen2_5_vl_7b", "qwen2_5_vl_32b", "mimo_vl_7b", "qwen2_5_7b")]
FLEET = ["configs/vlm_sglang.py", "configs/vlm_sglang.py:serve", "configs/qwen2_5_vl_7b.py:fleet"]
SHIPPED = ["configs/vlm.py", "configs/vlm.py:debug", "configs/text.py", "configs/text.py:debug", *REAL, *FLEET]


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
    config = cli.load(
        [
            "--config.optim.lr=2e-6",
            "--config.model.compute_dtype=bfloat16",
            "--config.model.vision_full_attention_layers=(0, 1)",
            "--config.data.sources.digits.weight=3",
            "--config.packing.share_prompts=false",
        ]
    )
    assert config.optim.lr == 2e-6
    assert config.model.compute_dtype is DType.BFLOAT16
    assert config.model.vision_full_attention_layers == (0, 1)
    assert config.data.sources["digits"].weight == 3.0
    assert config.packing.share_prompts is False


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
        ("--config.optim.lr=abc", "--config.optim.lr: 'abc' is not a number"),
        ("--config.rollout.slots=2.5", "--config.rollout.slots: '2.5' is not an integer"),
        ("--config.packing.share_prompts=maybe", "'maybe' is not true or false"),
        ("--config.sharding.strategy=fdsp", "'fdsp' is not one of fsdp"),
        ("--config.optim=1", "--config.optim is a section"),
        ("--config.steps.x=1", "steps is a value and has no field 'x'"),
        ("--config.data.sources.digit.weight=1", "did you mean --config.data.sources.digits?"),
        ("--config=configs/nope.py", "there is no file 'configs/nope.py'"),
        ("--config=configs/vlm.py:nope", "not 'nope'"),
        ("--steps=1", "unknown argument '--steps=1'"),
        ("--config.steps=0", "steps is 0; it must be greater than 0"),
        ("--config.rollout.top_p=1.5", "rollout.top_p is 1.5"),
        ("--config.rollout.group_size=1", "rollout.group_size is 1"),
        ("--config.rollout.max_new_tokens=100000", "rollout.max_sequence_tokens"),
        (
            "--config.rollout.kv_tokens=40",
            "rollout.kv_tokens (40) holds no sequence of rollout.max_sequence_tokens (48)",
        ),
        ("--config.packing.tokens_per_row=8", "packing.tokens_per_row (8)"),
        ("--config.model.num_heads=5", "model.num_heads (5)"),
        ("--config.model.vision_num_heads=7", "model.vision_num_heads"),
        ("--config.model.vision_num_heads=0", "model.vision_num_heads is 0; it must be greater than 0"),
        ("--config.model.mrope_section=(1, 1, 1)", "model.mrope_section (1, 1, 1) must sum to half the head size, 8"),
        ("--config.model.vision_full_attention_layers=(7,)", "model.vision_full_attention_layers has [7]"),
        ("--config.model.window_size=10", "model.window_size (10) must be a multiple"),
        ("--config.rollout.temperature=nan", "rollout.temperature is nan; it must be a finite number"),
        ("--config.optim.beta1=2", "optim.beta1 is 2.0; it must be in [0, 1)"),
        ("--config.report.prometheus_port=99999", "report.prometheus_port is 99999"),
        ("--config.data.sources.digits.weight=0", "data.sources.digits.weight is 0.0; it must be greater than 0"),
        ("--config.name=a/b", "name is 'a/b'"),
        ("--config.seed=3000000000", "seed is 3000000000"),
        ("--config.algorithm.name=sft", "algorithm.name is sft"),
        ("--config.algorithm.minibatches=333", "algorithm.minibatches is 333, but the responses of a prompt stay"),
        ("--config.algorithm.dual_clip=0.5", "algorithm.dual_clip is 0.5; it must be 0 or above 1"),
        ("--config.sharding.balance=lb", "'lb' is not one of lb_mini, lb_micro, local_sort"),
        ("--config.sharding.hybrid=true", "sharding.hybrid needs sharding.strategy odc, not fsdp"),
        ("--config.sharding.deterministic=true", "sharding.deterministic needs sharding.strategy odc, not fsdp"),
        ("--config.sharding.live_layers=4", "strategy odc, not fsdp; set the one or leave the other at 3"),
        ("--config.sharding.balance=lb_micro", "strategy odc, not fsdp; set the one or leave the other at lb_mini"),
        ("--config.sharding.live_layers=1", "sharding.live_layers is 1; it must be at least 2"),
        ("--config.rollout.temperature=0", "rollout.temperature is 0.0; it must be at least 1e-6: greedy responses"),
        ("--config.rollout.temperature=1e-7", "rollout.temperature is 1e-07; it must be at least 1e-6"),
        ("--config.rollout.top_k=3000000000", "rollout.top_k is 3000000000; it must be below 2**31"),
        ("--config=README.md", "README.md cannot be run: SyntaxError"),
    ],
)
def test_mistakes_end_in_one_clear_line(argument, expected):
    with pytest.raises(ConfigError) as caught:
        cli.load([argument])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["servers.addresses=('10.0.0.1:30000',)"],
            "servers.addresses has '10.0.0.1:30000'; an address is like http://",
        ),
        (["servers.addresses=('http://a:1','http://a:1')"], "servers.addresses has http://a:1 twice"),
        (["servers.addresses=('http://a:1',)", "servers.python=python3"], "leave them out"),
        (["servers.flags=('--port','1')"], "servers.flags has --port, which the run sets itself"),
        (["servers.flags=('--pp-size=2',)"], "servers.flags has --pp-size=2: weights that are divided"),
        (["servers.environment=('CUDA_VISIBLE_DEVICES',)"], "an entry is like NAME=value"),
        (["servers.patience=0.0"], "servers.patience"),
        (["policy.engines=2"], "policy.engines is 2, but there are 1 servers"),
        (["policy.engines=0", "stream_trainer.enabled=True"], "set servers.colocated, or rollout.engine to jax"),
        (["servers.colocated=True", "servers.addresses=('http://10.0.0.1:1',)"], "needs servers of this host"),
        (["servers.colocated=True", "policy.name=adaptive_async"], "servers.colocated has them sleep"),
        (["servers.colocated=True", "speculative_sync.enabled=True"], "servers.colocated has them sleep"),
        (["servers.memory_fraction=1.0", "servers.colocated=True"], "servers.memory_fraction"),
        (["servers.memory_fraction=0.5"], "--config.servers.memory_fraction needs servers.colocated"),
        (["parallelism.enabled=True", "servers.count=2"], "in servers.flags: ('--tp-size', '{degree}')"),
        (
            [
                "parallelism.enabled=True",
                "servers.count=3",
                "servers.flags=('--tp-size','{degree}')",
                "policy.engines=2",
            ],
            "policy.engines is 2, but parallelism.enabled has an engine a server (3)",
        ),
        (["weights.route=orbax"], "set weights.folder"),
        (["weights.route=group"], "set weights.python"),
        (["weights.route=ipc", "rollout.engine=serve"], "rollout.serve takes shm, bucket or orbax"),
        (["weights.route=shm", "servers.addresses=('http://10.0.0.1:1',)"], "is for servers of this host"),
        (["weights.agents=('http://a:1',)"], "weights.agents has 1 addresses, servers.addresses 0"),
        (["weights.folder=/shared", "servers.addresses=('http://a:1',)"], "run python -m rollout.weights.agent"),
        (
            ["weights.route=group", "weights.python=python3", "servers.addresses=('http://10.0.0.1:1',)"],
            "weights.address is 127.0.0.1",
        ),
        (["weights.bucket_mib=0"], "weights.bucket_mib"),
        (["parallelism.degree=2"], "in servers.flags: ('--tp-size', '{degree}')"),
        (["rollout.kv_fraction=0.3"], "--config.rollout.kv_fraction needs rollout.engine jax, not sglang"),
    ],
)
def test_servers_that_can_not_work(arguments, expected):
    with pytest.raises(ConfigError) as caught:
        cli.load([f"--config.{argument}" for argument in ("rollout.engine=sglang", *arguments)])
    assert expected in str(caught.value)
    with pytest.raises(ConfigError, match=r"--config\.servers\.count needs rollout\.engine serve or sglang, not jax"):
        cli.load(["--config.servers.count=2"])


UNREAD = [  # settings that do nothing with these others: (what was set, what it would need, with what it is read)
    ("composer.curriculum=True", "policy.name adaptive_async, not tail_batching", "policy.name=tail_batching"),
    ("composer.order=stalest", "policy.name adaptive_async, not april", "policy.name=april"),
    ("april.oversample=2", "policy.name april, not synchronous", ""),
    ("adaptive_async.kp=0.2", "policy.name adaptive_async, not synchronous", ""),
    ("tail_batching.prompts=1.5", "policy.name tail_batching, not adaptive_async", "policy.name=adaptive_async"),
    ("schedules.tail_prompts=1.5", "policy.name tail_batching, not synchronous", ""),
    ("schedules.tail_responses=1.5", "policy.name tail_batching, not april", "policy.name=april"),
    ("schedules.target_staleness=0.3", "policy.name adaptive_async, not synchronous", ""),
    ("policy.max_num_gen_batches=5", "policy.dynamic_sampling True, not False", ""),
    ("policy.dynamic_sampling_by=value", "policy.dynamic_sampling True, not False", ""),
    ("stream_trainer.chunk=2", "stream_trainer.enabled True, not False", ""),
    ("data.preprocessors=2", "data.mode flight, not uri", "data.mode=uri"),
    ("data.preprocessors=2", "data.loader shadow, not central", "data.loader=central"),
    ("data.mode=uri", "data.loader shadow, not central", "data.loader=central"),
    ("data.spill_gib=1", "data.loader shadow, not central", "data.loader=central"),
    ("data.ahead=3", "data.loader shadow, not central", "data.loader=central"),
    ("data.index=/a", "data.loader shadow, not central", "data.loader=central"),
    ("data.lease_seconds=9", "data.preprocessors above 0, not 0", ""),
    ("data.decode_seconds=9", "data.workers above 0, not 0", ""),
    ("speculative_sync.confidence=0.7", "speculative_sync.enabled True, not False", ""),
    ("parallelism.rise=2", "parallelism.enabled True, not False", ""),
    ("parallelism.calm=2", "parallelism.enabled True, not False", ""),
    (
        "rollout.temperature=0.8",
        "schedules.temperature empty, not 0.9",
        "schedules.temperature=0.9",
    ),
    (
        "adaptive_async.target_staleness=0.3",
        "schedules.target_staleness empty, not 0.2",
        "policy.name=adaptive_async schedules.target_staleness=0.2",
    ),
    (
        "tail_batching.prompts=1.5",
        "schedules.tail_prompts empty, not 1.4",
        "policy.name=tail_batching schedules.tail_prompts=1.4",
    ),
    (
        "tail_batching.responses=1.5",
        "schedules.tail_responses empty, not 1.4",
        "policy.name=tail_batching schedules.tail_responses=1.4",
    ),
    ("algorithm.importance.high=3", "algorithm.importance.kind truncate or mask, not none", ""),
    (
        "algorithm.importance.low=0.1",
        "algorithm.importance.kind mask, not truncate",
        "algorithm.importance.kind=truncate",
    ),
    ("algorithm.importance.level=sequence", "algorithm.importance.kind truncate or mask, not none", ""),
    ("algorithm.importance.normalize=True", "algorithm.importance.kind truncate or mask, not none", ""),
    (
        "algorithm.importance.decay=0.9",
        "policy.name april or adaptive_async (or replay.share above 0), not synchronous",
        "",
    ),
    (
        "algorithm.clip_high=0.28",
        "algorithm.importance.decoupled False (or several algorithm.minibatches or epochs), not True",
        "policy.name=april algorithm.importance.decoupled=True",
    ),
    ("sharding.max_degree=2", "sharding.strategy ulysses or flex_ulysses or odc, not fsdp", ""),
    ("sharding.alpha=1.3", "sharding.strategy flex_ulysses or odc, not ulysses", "sharding.strategy=ulysses"),
    ("packing.rounds_per_degree=2", "sharding.strategy ulysses or flex_ulysses or odc, not fsdp", ""),
    ("packing.short=99", "packing.rounds_per_degree above 1, not 1", "sharding.strategy=flex_ulysses"),
    ("model.num_layers=5", "model.path empty, not here", "model.path=here"),
]


@pytest.mark.parametrize(("setting", "needs", "others"), UNREAD)
def test_a_setting_that_would_do_nothing_is_refused(setting, needs, others):
    arguments = [f"--config.{one}" for one in (setting, *others.split())]
    with pytest.raises(ConfigError) as caught:
        cli.load(arguments)
    assert str(caught.value).startswith(f"--config.{setting.partition('=')[0]} needs {needs}; set the one or leave the")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "composer.curriculum=True adaptive_async.kp=0.2 policy.name=adaptive_async algorithm.importance.decay=0.9",
        "april.oversample=2 policy.name=april schedules.temperature=linear(1,0.9)",
        "tail_batching.prompts=1.5 schedules.tail_responses=1.5 policy.name=tail_batching",
        "policy.dynamic_sampling=True policy.max_num_gen_batches=0 optim.max_grad_norm=0",
        "algorithm.importance.kind=mask algorithm.importance.low=0.1 algorithm.importance.high=3",
        "policy.name=april algorithm.importance.decoupled=True algorithm.importance.level=sequence",
        "stream_trainer.enabled=True stream_trainer.chunk=2 policy.engines=2 speculative_sync.enabled=True",
        "sharding.strategy=flex_ulysses packing.rounds_per_degree=2 packing.short=99 sharding.alpha=1.3",
        "sharding.strategy=odc sharding.balance=lb_micro sharding.hybrid=True sharding.tolerance=0.1",
        "rollout.temperature=0.8 model.num_layers=5 adaptive_async.kp=0.1",
    ],
)
def test_a_setting_that_is_read_is_taken(settings):
    cli.load([f"--config.{setting}" for setting in settings.split()])


def test_what_a_file_prepares_for_another_policy_is_told_and_not_refused():
    assert remarks(cli.load(["--config=configs/vlm.py"])) == [
        "settings without effect here, because policy.name is synchronous: adaptive_async.max_staleness"
    ]
    corrected = "--config.algorithm.importance.kind=truncate"
    tail = cli.load(["--config=configs/vlm.py", "--config.policy.name=tail_batching", corrected])
    assert remarks(tail) == [
        "settings without effect here, because policy.name is tail_batching: adaptive_async.max_staleness"
    ]
    assert remarks(Config()) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("policy.name=adaptive_async", "adaptive_async trains on older versions without an importance correction"),
        ("policy.name=april", "april trains on older versions without an importance correction"),
        ("policy.name=tail_batching", "tail_batching trains on older versions without an importance correction"),
        ("policy.name=april algorithm.importance.decoupled=True", "algorithm.importance.decoupled clips around"),
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
    assert set(cli._OTHER_NAMES.values()) <= {name for name, _ in cli.flatten(Config())}


def test_a_checkpoints_run_does_not_list_the_tiny_models_sizes(tmp_path):
    """It would say that a model of 7B has a width of 64. A saved configuration that lists them is read as before."""
    config = cli.load(["--config=configs/qwen2_5_7b.py", f"--config.run_dir={tmp_path}"])
    run_folder.write(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model"] == {"path": config.model.path, "compute_dtype": "bfloat16"}
    assert run_folder.read_config(tmp_path) == config
    saved["model"] |= {"hidden_size": 64, "num_layers": 3}
    assert from_json(saved) == config
    assert "hidden_size" in str(to_json(Config())), "of the tiny model they are settings"


def test_settings_that_may_be_unread_exist_and_are_named_once_each():
    """A renamed field must not silently lose its line."""
    names = {name for name, _ in cli.flatten(Config())}
    sections = {name.partition(".")[0] for name in names}
    assert {field for need in NEEDS for field in need.fields} <= names | sections
    assert {need.setting for need in NEEDS} <= names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("config.optim.lrr = 3", "did you mean lr?"),
        ("config.optim.learning_rate = 3", "did you mean optim.lr?"),
        ("config.learning_rate = 3", "did you mean optim.lr?"),
        ("config.steps = '5'", "steps is '5'; it must be of type int"),
        ("config.optim.lr = True", "optim.lr is True; it must be of type float"),
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


def test_saved_config_with_unknown_field_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.momentum"):
        from_json({"optim": {"momentum": 1}})


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


BOUNDED = """
    steps seed name model.intermediate_size model.vision_hidden_size model.vision_intermediate_size
    model.vision_depth model.vision_num_heads model.patch_size model.window_size model.rope_theta
    model.initializer_range model.num_layers model.num_heads model.num_kv_heads model.hidden_size
    packing.tokens_per_row packing.rows_per_device packing.patches_per_device packing.rounds_per_degree
    packing.short packing.group_cap rollout.max_sequence_tokens rollout.prompts_per_step rollout.group_size
    rollout.max_new_tokens rollout.slots rollout.kv_tokens rollout.kv_fraction
    rollout.temperature rollout.top_p rollout.top_k optim.lr optim.eps
    optim.beta1 optim.beta2 optim.warmup_steps optim.weight_decay optim.max_grad_norm warm_start.lr
    warm_start.batch_size warm_start.steps sharding.max_shapes sharding.devices_per_host sharding.devices
    sharding.vocab_chunk sharding.max_degree sharding.tolerance sharding.alpha sharding.live_layers
    checkpoint.keep checkpoint.every evaluation.samples evaluation.samples_during evaluation.every
    data.video_frames data.max_decoded_pixels data.max_decoded_frames data.min_pixels data.max_pixels
    report.logprob_gap_alarm report.timeline_steps report.prometheus_port report.dump_samples_every
    report.dump_samples algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.minibatches
    algorithm.epochs algorithm.kl_coefficient algorithm.reference_every
    algorithm.entropy_coefficient algorithm.importance.low algorithm.importance.high algorithm.importance.decay
    tail_batching.prompts tail_batching.responses april.oversample april.max_staleness adaptive_async.min_ratio
    adaptive_async.ratio adaptive_async.max_ratio adaptive_async.ema adaptive_async.kp adaptive_async.ki
    adaptive_async.kd adaptive_async.kl_normalizer adaptive_async.variance_normalizer
    adaptive_async.sync_interval adaptive_async.max_staleness policy.max_num_gen_batches policy.engines
    parallelism.degree parallelism.min_degree parallelism.max_degree parallelism.rise parallelism.calm
    stream_trainer.first stream_trainer.last stream_trainer.every stream_trainer.chunk
    speculative_sync.confidence
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


def test_a_bound_takes_its_ends():
    config = cli.load([])
    config.rollout.top_p, config.optim.beta1, config.seed, config.adaptive_async.ema = 1.0, 0.0, 2**31 - 1, 1.0
    config.validate()
    config.optim.beta2 = 1.0
    with pytest.raises(ConfigError, match=r"optim\.beta2 is 1\.0; it must be in \[0, 1\)"):
        config.validate()


@pytest.mark.slow
def test_help_shows_bounds():
    lines = {line.partition("=")[0]: line for line in cli.help_text("").splitlines()}
    assert lines["  --config.optim.beta1"].endswith("must be in [0, 1)")
    line = lines["  --config.sharding.live_layers"]
    assert line.endswith("  odc: layers whose weights are on a device at once, at most; must be at least 2")


def test_every_comment_of_a_field_is_shown_by_the_help():
    """A comment that does not stand behind the field's name is not found; a formatter may move it."""
    for module in (sections, algorithms, scheduling):
        source = inspect.getsource(module)
        assert not re.findall(r"^    \)  #.*", source, re.MULTILINE)


@pytest.mark.parametrize("value", ["verl_native", "VERL_NATIVE"])
def test_the_scheduler_of_verl_is_called_lb_micro(tmp_path, value):
    file = tmp_path / "mine.py"
    file.write_text(
        "from fluxjax.config import Balance, Config\n\n\ndef get_config(variant=''):\n"
        "    return Config(sharding=Balance.VERL_NATIVE)\n"
    )
    for attempt in (
        lambda: cli.load(["--config.sharding.strategy=odc", f"--config.sharding.balance={value}"]),
        lambda: cli.load([f"--config={file}"]),
        lambda: from_json({"sharding": {"balance": value}}),
    ):
        with pytest.raises(ConfigError, match="set lb_micro: verl_native is the same"):
            attempt()


@pytest.mark.parametrize("value", [None, 3, ["odc"]])
def test_a_saved_choice_that_is_no_text_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"the saved configuration has sharding\.strategy: "):
        from_json({"sharding": {"strategy": value}})


def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.load([]).name == "vlm"
    assert cli.load(["--config=configs/text.py:debug"]).name == "text-debug"


def test_a_tilde_is_the_home_of_the_user(monkeypatch):
    """A shell leaves it alone in `--config.run_dir=~/run`."""
    monkeypatch.setenv("HOME", "/home/somebody")
    flags = ["run_dir=~/run", "model.path=~/model", "data.sources.digits.path=~/data.jsonl", "data.spill=~", "name=a~b"]
    config = cli.load(["--config=configs/vlm.py", *(f"--config.{flag}" for flag in flags)])
    assert (config.run_dir, config.model.path) == ("/home/somebody/run", "/home/somebody/model")
    assert (config.data.sources["digits"].path, config.data.spill) == ("/home/somebody/data.jsonl", "/home/somebody")
    assert config.name == "a~b"
