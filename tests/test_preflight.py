"""The pre-flight: what it reads in a schedule, what it adds up, and that its programs are those of a run."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_ahead import cuda_environment
from packing_cases import MODEL, QWEN3_5, make_config, make_groups
from turns import by_turns

import models
from fluxjax.algorithms import grpo
from fluxjax.batch.composer import Composer
from fluxjax.batch.rows import Budget
from fluxjax.config import (
    FSDP,
    AlgorithmConfig,
    Config,
    ConfigError,
    FlexUlysses,
    RolloutEngine,
    Strategy,
    Ulysses,
    cli,
)
from fluxjax.learner.learner import Learner
from fluxjax.sizing.account import GIB, Account, RowGrowth, remedies
from fluxjax.sizing.largest import largest_batch, prompt
from fluxjax.sizing.model_sizes import model_sizes
from fluxjax.sizing.run_programs import ATTENTION_CALLS, UNTILED, Compiled, RunShapes, bytes_on_device, cache_bytes
from fluxjax.sizing.schedule import CollectiveTraffic, traffic
from fluxjax.sizing.topology import Topology, find_plugin, kinds, plugin_packages
from rollout.device import DeviceState
from rollout.engine_weights import EngineLayout
from rollout.lowered import EngineArrays
from rollout.requests import EngineLimits
from sharding.kernels.tiles import tile_size
from sharding.mesh import Target, compiling_for, make_mesh

ROOT = pathlib.Path(__file__).resolve().parent.parent
REAL = sorted(file.stem for file in (ROOT / "configs").glob("*_[0-9]*b.py"))

SCHEDULE = """HloModule jit_step, is_scheduled=true

%body.1 (p: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %p = (s32[], bf16[8,64]{1,0}) parameter(0)
  %ag-start = (bf16[1,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(%x), dimensions={0}
  %gemm = f32[8,8]{1,0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.3
  %ag-done = bf16[8,64]{1,0} all-gather-done(%ag-start)
  %rs-start = ((f32[8,64]{1,0}, f32[8]{0}), (f32[1,64]{1,0}, f32[1]{0})) reduce-scatter-start(%a, %b), to_apply=%add
  %small = bf16[4]{0} fusion(%p), kind=kLoop, calls=%fused_add
  %rs-done = (f32[1,64]{1,0}, f32[1]{0}) reduce-scatter-done(%rs-start)
  ROOT %out = (s32[], bf16[8,64]{1,0}) tuple(%small, %ag-done)
}

%cond.1 (p: (s32[], bf16[8,64])) -> pred[] {
  ROOT %less = pred[] compare(%p, %c), direction=LT
}

%branch.1 (p: f32[16]) -> f32[16] {
  ROOT %sum.1 = f32[16]{0} all-reduce(%p), to_apply=%add
}

ENTRY %main (x: bf16[1,64]) -> bf16[8,64] {
  %x = bf16[1,64]{1,0} parameter(0)
  %a2a-start = ((bf16[64]{0}), bf16[64]{0}) all-to-all-start(%x), dimensions={0}
  %large = bf16[512]{0} fusion(%x), kind=kLoop, calls=%fused_multiply
  %a2a-done = bf16[64]{0} all-to-all-done(%a2a-start)
  %loop = (s32[], bf16[8,64]{1,0}) while(%x), body=%body.1, backend_config={"known_trip_count":{"n":"28"}}
  %either = f32[16]{0} conditional(%c, %a, %b), branch_computations={%branch.1, %branch.1}
  ROOT %result = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_schedule_is_read():
    found = traffic(SCHEDULE)
    assert found == {
        "all-gather": CollectiveTraffic(28.0, 28.0 * 8 * 64 * 2),  # behind a matrix product
        "reduce-scatter": CollectiveTraffic(28.0, 28.0 * 2080, 28.0, 28.0 * 2080),  # what runs beside it is too small
        "all-to-all": CollectiveTraffic(1.0, 128.0),  # behind a kernel that writes eight times as much
        "all-reduce": CollectiveTraffic(2.0, 2.0 * 64, 2.0, 2.0 * 64),  # not asynchronous, in both branches
    }
    longer = traffic(SCHEDULE.replace("bf16[512]", "bf16[256]"))
    assert longer["all-to-all"] == CollectiveTraffic(1.0, 128.0, 1.0, 128.0)


def test_the_schedule_of_a_compiled_program_is_read():
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    rows = jax.NamedSharding(mesh, jax.P("d"))

    def step(w, x):
        def layer(x, w):
            whole = jax.lax.all_gather(w, "d", tiled=True)
            return jnp.tanh(x @ whole), None

        return jax.lax.psum(jax.lax.scan(layer, x, w)[0].sum(), "d")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(None, "d"), jax.P("d")), out_specs=jax.P())
    weights = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "d")))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=rows)
    found = traffic(jax.jit(mapped).lower(weights, x).compile().as_text() or "")
    assert found["all-gather"].count == 6 and found["all-gather"].bytes == 6 * 64 * 64 * 4
    assert found["all-reduce"].bytes == 4


def refusing(reason: str) -> jax.stages.Lowered:
    """A program that does not compile, for this reason, unless XLA's Triton kernels of products are off."""

    class Refusing(jax.stages.Lowered):
        def compile(self, compiler_options=None, **more):
            if compiler_options != {"xla_gpu_enable_triton_gemm": False}:
                raise jax.errors.JaxRuntimeError(f"INTERNAL: {reason}")
            return super().compile(**more)  # on CPUs there is no such option

    lowered = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    lowered.__class__ = Refusing
    return lowered


def test_products_that_triton_cannot_compile_are_compiled_without_it():
    assert Compiled.of(refusing(f"{UNTILED} that satisfy hlo: %dot.97")).results == 4 * 8 * 8
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        Compiled.of(refusing("out of memory"))


RESIDENT = {"master weights": 4, "moments": 8, "reference weights": 0, "engine weights": 15, "KV cache": 14}
TEMPORARIES = {"accumulate": 40, "update": 4, "logprobs": 5, "prefill": 3, "decode": 20}
ACCOUNT = Account(
    {kind: size * GIB for kind, size in RESIDENT.items()},
    gradients=4 * GIB,
    batch=GIB,
    largest_weight=2 * GIB,
    temporaries={name: size * GIB for name, size in TEMPORARIES.items()},
    results=dict.fromkeys(TEMPORARIES, 0.0) | {"prefill": GIB},
)


def test_a_peak_is_the_sum_of_what_a_phase_holds():
    phases = ACCOUNT.phases()
    assert ACCOUNT.peak() == ("accumulate", (4 + 8 + 15 + 14 + 4 + 2 + 40) * GIB) == ("accumulate", ACCOUNT.bytes)
    assert phases["accumulate"]["gradients"] == phases["accumulate"]["master weights"]
    assert phases["prefill"]["temporaries"] == 4 * GIB  # results are kept, too
    assert sum(phases["publish"].values()) == (4 + 8 + 15 + 14 + 2) * GIB
    assert "reference weights" not in phases["decode"]


def test_engines_that_sleep_leave_their_memory_to_training():
    awake, asleep = ACCOUNT.phases(), dataclasses.replace(ACCOUNT, sleeping=True).phases()
    engines = {"engine weights": 15 * GIB, "KV cache": 14 * GIB}
    for phase in ("accumulate", "update", "logprobs"):
        assert awake[phase] == asleep[phase] | engines and not asleep[phase].keys() & engines.keys()
    assert asleep["publish"] == {kind: size for kind, size in awake["publish"].items() if kind != "KV cache"}
    assert all(asleep[phase] == awake[phase] for phase in ("prefill", "decode"))


def test_remedies_are_named_with_what_they_need():
    def remat(account):
        return "remat", account.with_temporaries("accumulate", 10 * GIB)

    def slots(account):
        return "slots", account.with_slots(0.5)

    assert [r.settings for r in remedies(ACCOUNT, 70 * GIB, [remat, slots, lambda _: None])] == [("remat",)]
    together = remedies(ACCOUNT, 55 * GIB, [slots, remat])
    assert [r.settings for r in together] == [("slots", "remat")] and together[0].bytes <= 55 * GIB
    (hopeless,) = remedies(ACCOUNT, 20 * GIB, [slots, remat])
    assert hopeless.bytes > 20 * GIB


def test_the_largest_row_just_fits():
    rows = RowGrowth(16384, slope=GIB / 512)
    largest = rows.largest(ACCOUNT, 100 * GIB)
    assert rows.account(ACCOUNT, largest).bytes <= 100 * GIB < rows.account(ACCOUNT, largest + 256).bytes
    assert rows.largest(ACCOUNT, 30 * GIB) == 0  # weights and cache alone are more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"), [(FSDP(), MODEL), (FlexUlysses(), MODEL), (FlexUlysses(), QWEN3_5), (Ulysses(), QWEN3_5)]
)
@pytest.mark.parametrize("devices", [1, 8])
def test_no_batch_is_larger_than_the_largest(strategy, model, devices):
    config = _config(strategy)
    largest = largest_batch(config, model, devices)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(largest))
    if isinstance(strategy, FSDP):
        budget = Budget.of(config, devices, MODEL.vision)
        rows, tokens, patches = budget.rows[-1] * devices, budget.tokens_per_row, budget.patches[-1] * devices
    else:
        rows, tokens, patches = devices, 48 * 4, 128 * devices
    assert largest.inputs.tokens_BT.shape == (rows, tokens) and largest.inputs.vision.num_patches == patches
    rng = np.random.default_rng(0)
    contents = [[int(rng.integers(1, 20)), (1, 4, 4)] for _ in range(24)]
    lengths = [rng.integers(1, 10, 4).tolist() for _ in contents]
    composer = Composer(config, devices, model.vision, model.text)
    for microbatch in composer.compose(*make_groups(contents, lengths)).microbatches:
        assert microbatch.batch.inputs.tokens_BT.size <= rows * tokens
        assert microbatch.batch.inputs.vision.num_patches <= patches


def test_no_table_of_runs_is_larger_than_the_largest():
    """A step of very short responses has the most runs a token. Its entry of the shape book does not make the tables of
    longer rows any larger."""
    config = make_config(tokens_per_row=2048, rows=1)
    config.sharding.strategy = FSDP()
    config.rollout.prompts_per_step, config.rollout.group_size = 24, 8
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens = 256, 512
    largest = largest_batch(config, QWEN3_5, 1).inputs.runs.columns_BNC.shape[1]
    composer = Composer(config, 1, QWEN3_5.vision, QWEN3_5.text)
    for tokens in (1, 200, 8, 30):
        micros = composer.outline(*make_groups([[5]] * 24, [[tokens] * 8] * 24)).micros
        assert all(micro.sizes["chunks"] <= largest for micro in micros)


def _config(strategy: Strategy) -> Config:
    config = make_config()
    config.sharding.strategy = strategy
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens = 10, 44
    return config


@pytest.mark.slow
@pytest.mark.parametrize("model", by_turns([MODEL, QWEN3_5]))
def test_an_abstract_learner_lowers_the_programs_of_a_real_one(model):
    config = _config(FlexUlysses())
    composer = Composer(config, 4, model.vision, model.text)
    groups, prepared = make_groups([[5, (1, 4, 4)], [7]], [[3, 4], [9, 2]])
    batch = composer.compose(groups, prepared).microbatches[0].batch
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    real = Learner(config, models.create(model), grpo.token_loss, mesh=make_mesh(4)).lowered(batch)
    abstract = Learner(config, models.abstract(model), grpo.token_loss, mesh=make_mesh(4)).lowered(shapes)
    assert real.keys() == abstract.keys() == {"accumulate", "logprobs", "update"}
    for name, program in real.items():
        assert program.as_text() == abstract[name].as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "degree"), [(MODEL, 1), (MODEL, 2), (QWEN3_5, 2)])
def test_an_abstract_engine_has_the_arrays_of_a_real_one(config, degree):
    model, devices = models.create(config), jax.devices()[:degree]
    limits = EngineLimits.of(config, 8, 64)
    real = DeviceState(model, limits, EngineLayout.of(devices), jnp.bfloat16)
    arrays = EngineArrays(models.abstract(config), limits, "bfloat16", devices)

    def described(tree):
        return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]

    assert described(arrays.params) == described(real.params)
    assert described(arrays.cache) == described(real._ready_cache())
    longest = prompt(_config(FSDP()), config)
    again = EngineArrays(model, limits, "bfloat16", devices).lowered(longest)
    assert arrays.lowered(longest)["decode"].as_text() == again["decode"].as_text()
    cache, states = cache_bytes(arrays)
    assert cache + states == bytes_on_device(arrays.cache)
    assert (states > 0) == (config.text.delta is not None)


@pytest.mark.medium
def test_caches_are_as_large_as_configured_or_as_there_is_room():
    config, devices = _config(FSDP()), jax.devices()[:2]
    config.rollout.slots = 100

    def pages(usable: float = 1e12) -> int:
        return RunShapes.of(config, MODEL, devices, usable=usable).engine.cache.k_LCKSH.shape[1]

    assert pages() == 100 * 3, "44 tokens are three pages"
    shapes = RunShapes.of(config, MODEL, devices)
    kept, cache = sum(shapes.resident().values()), bytes_on_device(shapes.engine.cache)
    assert pages(kept + cache) == 150, "half of what is free"
    assert pages(kept) == 3, "one sequence"
    config.rollout.kv_tokens = 640
    assert pages(kept) == 40


def test_a_critic_is_counted():
    """Its weights and two moments, all float32; the head of the policy is a row of it."""
    config, devices = _config(FSDP()), jax.devices()[:2]
    plain = RunShapes.of(config, MODEL, devices).resident()
    assert plain["critic weights and moments"] == 0.0
    config.algorithm = AlgorithmConfig.of("ppo")
    with_critic = RunShapes.of(config, MODEL, devices).resident()
    assert with_critic | {"critic weights and moments": 0.0} == plain
    head = 4 * MODEL.text.vocab_size * MODEL.text.hidden_size / len(devices)
    critic = with_critic["critic weights and moments"]
    assert critic == pytest.approx(3 * (plain["master weights"] - head), rel=0.01)
    phases = dataclasses.replace(ACCOUNT, resident=with_critic).phases()
    assert all(sizes["critic weights and moments"] == critic for sizes in phases.values())


def test_servers_are_counted_where_they_are():
    """Elsewhere, they take nothing of these devices; colocated, their share of what training's state leaves."""
    config, devices = _config(FSDP()), jax.devices()[:2]
    config.rollout.engine = RolloutEngine.SGLANG
    apart = RunShapes.of(config, MODEL, devices, usable=1e9)
    assert apart.resident()["engine weights"] == apart.servers(1e9) == 0.0 and not apart.engines_a_device
    config.servers.colocated = True
    state = sum(apart.resident().values())
    assert RunShapes.of(config, MODEL, devices, usable=1e9).servers(1e9) == 0.6 * (1e9 - state)
    with pytest.raises(ConfigError, match=r"servers.colocated: beside training's state, a server has .* needs"):
        RunShapes.of(config, MODEL, devices, usable=state + 1000)
    resident = {kind: size for kind, size in ACCOUNT.resident.items() if kind not in ("engine weights", "KV cache")}
    account = dataclasses.replace(ACCOUNT, resident=resident, servers=30 * GIB)
    training = {name: size for name, size in ACCOUNT.temporaries.items() if name not in ("prefill", "decode")}
    phases = dataclasses.replace(account, temporaries=training).phases()
    assert sum(phases["rollout"].values()) == (4 + 8 + 30) * GIB
    assert not {"servers", "KV cache"} & phases["accumulate"].keys() and not {"prefill", "decode"} & phases.keys()


def test_choices_for_a_gpu_are_made_where_there_is_none():
    assert tile_size(16384) == 128
    with compiling_for(Target("gpu", 90)):
        assert tile_size(16384) == 512
    assert tile_size(16384) == 128


@pytest.mark.slow
def test_programs_are_traced_for_the_described_device():
    program = """
from fluxjax.sizing.topology import Topology, find_plugin
find_plugin()
import jax
from sharding.mesh import Target, compiling_for, target
for kind in ("a100", "h100"):
    with compiling_for(Target.of(Topology.parse(f"1x1x{kind}").devices()[0])):
        print(target().platform, target().capability)
print(target().platform, target().capability)
"""
    environment = cuda_environment("pjrt")
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["gpu", "80", "gpu", "90", "cpu", "0"], done.stderr[-3000:]


# --- what the user may get wrong ----------------------------------------------------------------


@pytest.mark.parametrize("text", ["8", "1x8", "1x8xh900", "0x8xh100", "1x8xh100x2"])
def test_an_unknown_topology_lists_those_that_are_known(text):
    with pytest.raises(ConfigError, match=rf"--topology {text}: give HOSTSxDEVICESxKIND.*kinds are .*h100"):
        Topology.parse(text)


def test_topologies():
    topology = Topology.parse("4x8xH100")
    assert (topology.hosts, topology.devices_per_host, str(topology)) == (4, 8, "4x8xh100")
    assert 79 * GIB < topology.memory < 80 * GIB
    assert all(Topology(1, 1, kind).memory > 39 * GIB for kind in kinds())


def test_a_missing_plugin_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("FLUXJAX_AOT", raising=False)
    said = r"jax-cuda12-plugin, which has .* is not in .*pip install --no-deps --target .aot/.*FLUXJAX"
    with pytest.raises(ConfigError, match=said):
        find_plugin(str(tmp_path))
    monkeypatch.setenv("FLUXJAX_AOT", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"none: no such folder; no GPU is needed: pip install"):
        find_plugin()


def test_sizes_are_found_without_weights(tmp_path):
    assert len(REAL) >= 8
    for name in REAL:
        sizes = model_sizes(cli.load([f"--config=configs/{name}.py"]))
        assert sizes.text.num_layers >= 28 and (sizes.vision is not None) == ("vl" in name or "qwen3_5" in name)
    config = Config()
    with pytest.raises(ConfigError, match=r"model\.path is empty"):
        model_sizes(config)
    config.model.path = str(tmp_path / "Nobody-3B")
    with pytest.raises(
        ConfigError, match=r"no config.json, .*Nobody-3B is no model of known .*Qwen2.5-VL-7B.*--model-config"
    ):
        model_sizes(config)
    with pytest.raises(ConfigError, match=r"nowhere\.json: no such file"):
        model_sizes(config, "nowhere.json")
    (file := tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"unsupported architecture Qwen3MoeForCausalLM; supported are .*Qwen2"):
        model_sizes(Config(), str(file))


def test_help_and_errors_are_quick_lines():
    def run(*arguments):
        command = [sys.executable, "-m", "fluxjax.preflight", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    shown = run("--help")
    assert shown.returncode == 0 and "--topology" in shown.stdout and "--config.rollout.slots" in shown.stdout
    wrong = run("--topology", "1x8xh200000")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: --topology 1x8xh200000: give")
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["triton_kernel_call", "triton_kernel_call_ffi"])  # jax-triton 0.3, 0.4
def test_the_kernels_of_the_head_are_not_taken_for_those_of_attention(target):
    line = f'f32[8] custom-call(%y), custom_call_target="{target}", metadata={{{{op_name="jit(f)/{{}}/triton"}}}}'
    call = ATTENTION_CALLS["triton"]
    assert call.search(line.format("flash_kernels_forward"))
    assert call.search(line.format("transpose(jvp(flash_kernels_forward))"))
    assert call.search(line.format("paged_kernels_attend"))
    assert not call.search(line.format("head_kernels_softmax_sums"))


# --- the whole command --------------------------------------------------------------------------

ATTENDING = ("accumulate", "logprobs", "prefill", "decode")
SIZES = {  # of a text model
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


@pytest.mark.long
@pytest.mark.turn(1)
def test_a_run_is_checked_and_one_that_does_not_fit_is_told_how(tmp_path):
    environment = cuda_environment("pjrt", "jax-triton") | {"PYTHONPATH": str(ROOT)}  # the command finds them itself
    del environment["JAX_PLATFORMS"]
    sizes, picture = tmp_path / "config.json", tmp_path / "memory.png"
    sizes.write_text(json.dumps(SIZES))
    command = [sys.executable, "-m", "fluxjax.preflight", "--config=configs/qwen2_5_7b.py", "--topology=1x8xh100"]
    command += ["--json", "--layers=2", f"--model-config={sizes}", f"--out={picture}"]
    command += ["--config.sharding.strategy=fsdp", "--config.sharding.remat=none"]
    command.append("--config.packing.tokens_per_row=131072")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["fits"] and found["extrapolated"] and found["compiled_layers"] == 2
    totals = {phase: sum(kinds.values()) for phase, kinds in found["memory_gib"].items()}
    assert found["peak_gib"] == pytest.approx(max(totals.values()), abs=0.02)
    assert found["peak_gib"] == pytest.approx(totals[found["peak_phase"]], abs=0.02)
    assert found["peak_gib"] > found["usable_gib"] and found["peak_phase"] == "accumulate"
    fitting = dict(zip(found["settings"], found["settings_gib"], strict=True))
    (remat,) = (setting for setting in fitting if setting.startswith("--config.sharding.remat="))
    assert fitting[remat] <= found["usable_gib"] and found["remat"] == "none"
    cuda_12 = plugin_packages([environment["PYTHONPATH"].split(os.pathsep)[0]])[0] == "jax-cuda12-plugin"
    kernel = "triton" if cuda_12 else "mosaic"
    assert found["attention"] == dict.fromkeys(ATTENDING[:-1], kernel) | {"decode": "triton"}
    assert 0 < found["largest_row_tokens"] < 131072
    # 4 bytes a weight over eight devices, twice as much for the moments; two bytes a weight on each engine's device
    resident = found["memory_gib"]["decode"]
    parameters = found["parameters"]
    assert resident["master weights"] == pytest.approx(parameters * 4 / 8 / GIB, rel=0.01)
    assert resident["moments"] == pytest.approx(parameters * 8 / 8 / GIB, rel=0.01)
    assert resident["engine weights"] == pytest.approx(parameters * 2 / GIB, rel=0.01)
    assert resident["KV cache"] == pytest.approx(64 * 5120 * 2 * 32 * 4 * 128 * 2 / GIB, rel=0.01)
    gathers = found["collectives"]["accumulate"]["all-gather"]
    assert gathers["gb"] == pytest.approx(2 * 2 * parameters / 1e9, rel=0.3)  # bfloat16, forward and backward
    assert picture.stat().st_size > 10_000
