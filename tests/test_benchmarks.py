"""The benchmark runs and prints what it promises. How fast anything is, is never asserted."""

import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from cuda_ahead import run_ahead

ROOT = pathlib.Path(__file__).resolve().parent.parent

TINY = [
    "--repeats=2",
    "--warmup=1",
    "--config.rollout.prompts_per_step=2",
    "--config.rollout.group_size=2",
    "--config.rollout.max_new_tokens=2",
    "--config.rollout.slots=4",
    "--config.model.tiny.num_layers=1",
    "--config.model.tiny.vision_depth=1",
    "--config.model.tiny.vision_full_attention_layers=(0,)",
]


def run(script: str, *arguments: str, one_device: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark; on one device, or on as many as this process has."""
    env = dict(os.environ)
    if one_device:
        env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # the last one counts
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600)


def result(script: str, *arguments: str, **how: bool) -> dict:
    """The one line that a benchmark prints."""
    done = run(script, *arguments, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()  # exactly one
    return json.loads(line)


def refusal(script: str, *arguments: str) -> str:
    """The one line with which a benchmark refuses its arguments."""
    done = run(script, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def check_side(side: dict, stages: set[str], tokens: int) -> None:
    assert stages <= set(side["seconds"])
    for seconds in side["seconds"].values():
        assert 0 <= seconds["min"] <= seconds["median"] <= seconds["max"]
    parts = [name for name in side["seconds"] if name != "step"]
    assert side["seconds"]["step"]["max"] >= max(side["seconds"][name]["min"] for name in parts)
    for stage in ("rollout", "train", "step"):
        rate, seconds = side[stage]["response_tokens_per_second"], side["seconds"][stage]["median"]
        assert rate == pytest.approx(tokens / seconds, rel=0.1)  # both are rounded
    assert 50 < side["peak_rss_mib"]["step"] < 100_000
    assert side["setup_rss_mib"] <= side["peak_rss_mib"]["step"]


@pytest.mark.long
@pytest.mark.turn(1)
def test_one_json_line() -> None:
    line = result("train_step", *TINY)
    assert line["benchmark"] == "train_step" and line["repeats"] == 2
    assert line["batch"]["prompts"] == 2 and line["batch"]["response_tokens"] == 2
    ours = line["fluxjax"]
    check_side(ours, {"prepare", "rollout", "train", "sync", "step"}, tokens=2 * 2 * 2)
    assert set(ours["peak_rss_mib"]) == {"step", "rollout", "train"}
    assert ours["compile_seconds"] > 0 and ours["compile_seconds_while_timed"] == 0
    # The two halves measured the same policy on the same tokens; float32.
    assert ours["logprob_gap"] < 1e-4
    # Two prompts and four responses of two tokens, and nothing else, were trained on.
    assert ours["packing"]["tokens"] == round(2 * line["batch"]["prompt_tokens"]["mean"]) + 8
    assert "peer" not in line and "ratio" not in line


def python_with(package: str, variable: str) -> str:
    """The interpreter that an environment variable names, or this one. Other frameworks are too large for CI: where
    nobody names an interpreter that has one, its comparison is skipped."""
    python = os.environ.get(variable, sys.executable)
    if python == sys.executable and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; {variable} names an interpreter that has it")
    return python


def check_ratios(line: dict) -> None:
    """Both sides train as many parameters, and ratios are those of the medians."""
    assert line["peer"]["parameters"] == line["fluxjax"]["parameters"]
    for stage in ("rollout", "train", "step"):
        ours, peer = (line[side]["seconds"][stage]["median"] for side in ("fluxjax", "peer"))
        assert line["ratio"][stage] == pytest.approx(peer / ours, abs=1e-3)


@pytest.mark.long
@pytest.mark.turn(0)
def test_peer() -> None:
    python = python_with("trl", "FLUXJAX_PEER_PYTHON")
    line = result("train_step", "--peer=trl", f"--peer-python={python}", "--peer-threads=1", *TINY)
    check_side(line["fluxjax"], {"prepare", "rollout", "train", "sync", "step"}, tokens=8)
    check_side(line["peer"], {"prepare", "rollout", "train", "step"}, tokens=8)
    assert line["batch"]["videos"] == 0 and line["batch"]["images"] == 2
    check_ratios(line)


@pytest.mark.long
@pytest.mark.turn(2)
def test_natural_lengths() -> None:
    """Every response is as long as it was told to be, on the side of the engine and on that of the learner."""
    lengths = ["--lengths=natural", "--config.rollout.max_new_tokens=12"]
    line = result("train_step", "--config=configs/text.py", *TINY[:-2], *lengths)
    batch, ours = line["batch"], line["fluxjax"]
    assert 4 < batch["all_response_tokens"] < 4 * 12
    assert ours["packing"]["tokens"] == round(2 * batch["prompt_tokens"]["mean"]) + batch["all_response_tokens"]
    rate, seconds = ours["rollout"]["response_tokens_per_second"], ours["seconds"]["rollout"]["median"]
    assert rate == pytest.approx(batch["all_response_tokens"] / seconds, rel=0.1)
    assert ours["logprob_gap"] < 1e-4
    assert all(share > 0 for share in ours["share_of_matmul_rate"].values())


@pytest.mark.long
@pytest.mark.parametrize("lengths", ["equal", "natural"])
@pytest.mark.turn(1)
def test_tunix_peer(lengths: str) -> None:
    python = python_with("tunix", "FLUXJAX_TUNIX_PYTHON")
    arguments = ["--peer=tunix", f"--peer-python={python}", "--size=0.13M", f"--lengths={lengths}", *TINY[:-2]]
    line = result("train_step", *arguments, "--config.rollout.max_new_tokens=6")
    tokens = line["batch"]["all_response_tokens"]
    assert (tokens == 4 * 6) == (lengths == "equal")
    check_side(line["fluxjax"], {"prepare", "rollout", "train", "sync", "step"}, tokens=tokens)
    check_side(line["peer"], {"rollout", "train", "step"}, tokens=tokens)
    check_ratios(line)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeats=0"], "--repeats"),
        (["--peer=tunix"], "text models"),
        (["--peer=trl", "--lengths=natural"], "--lengths"),
        (["--size=2.6M", "--config=configs/vlm.py"], "--size"),
        (["--config.rollout.group_sise=4"], "group_size"),
        (["--peer=trl", "--peer-python=/nowhere/python"], "/nowhere/python"),
    ],
)
def test_wrong_settings_end_in_one_line(arguments: list[str], says: str) -> None:
    assert says in refusal("train_step", *arguments)


def test_help() -> None:
    done = run("train_step", "--help")
    assert done.returncode == 0 and "--peer-python" in done.stdout


@pytest.mark.long
@pytest.mark.turn(2)
def test_two_processes_compute_the_same_under_every_plan():
    """Real processes with a device each: FSDP's gathers and Ulysses' all-to-alls between them."""
    few = ["--repeats=1", "--warmup=1", "--lengths", "48", "16", "9", "5"]
    plans = result("flex_ulysses_step", "--part=measured", *few)["measured"]["given"]["plans"]
    assert plans["fsdp_bucketing"]["degrees"] == {"1": 4} and plans["ulysses"]["degrees"] == {"2": 4}
    losses = [plan["loss"] for plan in plans.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.long
@pytest.mark.turn(2)
def test_generation_beside_transformers():
    """Both sides have the same weights and prompts, and so the same tokens. How fast they are is another matter."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    answer = result("generate", "--shape=tiny", "--repeats=1", "--new-tokens=6")
    assert answer["equal_tokens"] == 1.0
    assert set(answer["ratio"]) == {"1", "8"}
    for batch, ratio in answer["ratio"].items():
        ours, peer = (answer[side]["tokens_per_second"][batch] for side in ("fluxjax", "peer"))
        assert ratio == pytest.approx(ours / peer, rel=1e-2) and ours > 0


@pytest.mark.slow
@pytest.mark.turn(2)
def test_the_plan_benchmark_takes_other_mixes(tmp_path):
    mixes = tmp_path / "mixes.json"
    lengths = [900, 30, 20, 200, 150, 80, 60, 40]
    mixes.write_text(json.dumps([{"name": "own", "devices": 4, "sequences": [{"length": n} for n in lengths]}]))
    answer = result("flex_ulysses_plan", "--mixes", str(mixes), "--repeats=1")
    assert answer["seconds_4096_on_1024"] > 0 and answer["seconds_4096_on_1024_by_cost"] > 0
    assert 1.0 <= answer["worst_balance"] < 1.03 and answer["worst_memory"] <= 1.1


@pytest.mark.slow
@pytest.mark.turn(1)
def test_the_shapes_benchmark_counts_programs_and_padding(tmp_path):
    sequences = [
        {"frames": frames, "vision_tokens": 90 * frames, "prompt_tokens": 40, "response_tokens": 20 * frames}
        for frames in (1, 2, 7, 12, 30)
    ]
    mixes = tmp_path / "mixes.json"
    mixes.write_text(json.dumps([{"name": "clips", "devices": 4, "sequences": sequences}]))
    settings = ["--steps=8", "--sequences=12", "--devices=4", "--tokens-a-device=4096", "--max-shapes=4"]
    answer = result("shapes", "--mixes", str(mixes), *settings)
    for strategy in ("fsdp", "ulysses", "flex_ulysses", "odc"):
        figures = answer[strategy]
        assert 1 <= figures["programs"] <= 4 and figures["new_after_half"] <= 3
        assert 0 < figures["padding"] < 1 and figures["mixes"]["clips"]["padding"] == figures["padding"]
    line = refusal("shapes", "--mixes", str(tmp_path / "none.json"))
    assert line.startswith("error: no mixes at ") and "--mixes" in line


def test_closing_figures_are_of_pairs(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    paired_points = importlib.import_module("policies_learning").paired_points
    # differences of 1, 2 and 3 points: standard error 1 / sqrt(3), and 4.303 standard errors of two degrees of freedom
    compared = paired_points([0.51, 0.92, 0.23], [0.50, 0.90, 0.20])
    assert compared["mean"] == 2.0
    assert compared["interval_95"] == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5], abs=0.01)
    assert paired_points([0.5], [0.4]) == {"mean": 10.0}  # a single pair has no interval
    with pytest.raises(ValueError):
        paired_points([0.5, 0.4], [0.5])


@pytest.mark.long
@pytest.mark.turn(2)
def test_the_engine_alone_says_what_its_cache_held() -> None:
    few = ["--shape=tiny", "--repeats=1"]
    line = result("engine_alone", *few, "--prompt-tokens=40", "--new-tokens=8", "--kv-tokens=192", one_device=False)
    assert set(line["cases"]) == {"one", "eight", "group of eight"} and line["programs"] > 0
    assert line["cache"]["pages"] == 12 >= line["cache"]["peak_pages"] > 0
    assert line["cache"]["bytes"] == 2 * 192 * 2 * 2 * 16 * 4  # keys and values: tokens, layers, heads, numbers, bytes
    wrong = run("engine_alone", *few, "--kv-tokens=16", one_device=False)
    assert wrong.returncode == 2 and "raise rollout.kv_tokens" in wrong.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.turn(1)
def test_rollout_engines_side_by_side_without_sglang() -> None:
    few = ["--concurrency", "1", "2", "--prompt-tokens=8", "--new-tokens=4", "--repeats=1", "--warmup=1"]
    done = run("rollout_engine", *few, "--sides", "jax", "serve", one_device=False)
    assert done.returncode == 0 and "SGLang is not measured" in done.stderr, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["benchmark"] == "rollout_engine" and line["shape"]["name"] == "tiny"
    assert line["ratio"] is None and line["no_ratio_because"]
    assert line["greedy"]["equal"] and line["greedy"]["tokens"] == 4
    for side in ("jax", "serve"):
        assert line["threads"][side] == line["cores"]
        for count in (1, 2):
            rate, seconds = line["tokens_per_second"][side][str(count)], line["seconds"][side][str(count)]["median"]
            assert rate == pytest.approx(4 * count / seconds, rel=0.1)  # both are rounded
    wrong = run("rollout_engine", "--concurrency", "1", "2", "--sglang=/no/such/python", one_device=False)
    assert (wrong.returncode, wrong.stdout) == (2, "") and "there is no program /no/such/python" in wrong.stderr


@pytest.mark.long
@pytest.mark.turn(1)
def test_routes_of_weights_are_measured_without_sglang() -> None:
    few = ["--sizes", "tiny", "--servers", "serve", "--repeats=1", "--steps=1", "--rates", "1e-6", "1e-3"]
    line = result("weight_sync", *few, one_device=False)
    routes, shares = line["routes"]["tiny"]["serve"], line["delta_share"]["tiny"]
    assert set(routes) == {"shm", "bucket", "orbax", "orbax with delta"}
    for route in routes.values():
        assert 0 < route["paused_seconds"]["median"] < route["seconds"]["median"] and route["bytes"] > 0
    assert routes["bucket"]["bytes"] == routes["shm"]["bytes"] * 4 // 3
    assert 0 < shares["1e-06"] < shares["0.001"] <= 1.1
    assert line["stall_share"]["tiny"] == line["stall"]["tiny"]["share"]


@pytest.mark.long
@pytest.mark.turn(0)
def test_what_deciding_for_all_costs():
    """Real processes and scripted ones are told as many bytes each, which grow with the responses."""
    few = ["--groups=1", "--group-size=2", "--devices=1", "--repeats=1", "--warmup=0"]
    answer = result("hosts", "--part=controller", "--processes", "2", "--scripted", "6", *few)
    found = answer["controller"]["by_processes"]
    assert {processes: one["followers"] for processes, one in found.items()} == {"2": "real", "6": "scripted"}
    for one in found.values():
        assert 4 < one["bytes_a_token"] < 12 and one["share"] > 0
    assert found["6"]["bytes"] > found["2"]["bytes"]


@pytest.mark.long
@pytest.mark.turn(0)
def test_a_step_of_two_processes_is_compared_with_one_of_one():
    few = ["--models", "0.2M", "--strategies", "odc", "--repeats=1", "--warmup=1"]
    found = result("hosts", "--part=scaling", *few)["weak_scaling"]["0.2M"]
    assert list(found) == ["machine", "odc"]
    for one in found.values():
        assert 0 < one["efficiency"] < 2 and one["tokens"]["two"] > one["tokens"]["one"]


@pytest.mark.long
@pytest.mark.turn(0)
def test_waiting_gains_what_the_schedules_say():
    """Eight real processes; the waits are long beside what else a loaded machine does."""
    settings = ["--settings", "longalign:1", "longalign:8", "--minibatches=1", "--waiting-repeats=1", "--ideal=4"]
    found = result("hosts", "--part=waiting", *settings)["waiting"]
    assert found["longalign:1"]["predicted_by_the_schedules"] == 1.0, "one sample a device: nothing to balance"
    for one in found.values():
        for side, seconds in one["seconds"].items():
            assert seconds >= one["seconds_predicted"][side]


@pytest.mark.long
@pytest.mark.turn(0)
def test_slices_of_materializers_are_counted(tmp_path) -> None:
    few = ["--part", "bytes", "--materializers", "2", "--media", str(tmp_path)]
    line = result("shadow_loader", *few, one_device=False)
    found = line["bytes"]["by_materializers"]["2"]
    assert line["benchmark"] == "shadow_loader" and line["bytes"]["largest_over_share"] == found["largest_over_share"]
    assert found["sum_over_whole"] == 1.0, "every row is fetched once"
    assert 1 <= found["largest_over_share"] < found["whole_samples_over_share"]


@pytest.mark.slow
def test_both_forms_of_the_delta_rule_are_measured():
    line = result(
        "deltanet", "--tokens", "70", "128", "--heads", "1", "2", "8", "8", "--blocks", "2", "1", "--repeats", "1"
    )
    assert list(line["tokens"]) == ["70", "128"] and line["speedup"] == line["tokens"]["128"]["speedup"]
    assert list(line["tokens"]["70"]) == ["chunked", "chunked, blocks of 1", "by_token", "speedup"]
    assert line["shared"]["response_tokens"] == 4 and line["shared_prompt_saving"] == line["shared"]["saving"]
    assert "multiple" in refusal("deltanet", "--heads", "2", "3", "8", "8")


HLO = """HloModule round

%rows (table: bf16[1000,4], ids: s32[2,1]) -> bf16[2,4] {
  %table = bf16[1000,4]{1,0} parameter(0)
  %ids = s32[2,1]{1,0} parameter(1)
  %flat = bf16[500,8]{1,0} bitcast(%table)
  ROOT %found = bf16[2,4]{1,0} gather(%flat, %ids), slice_sizes={1,4}
}

%written (cache: f32[3,50], ids: s32[2,1], new: f32[2,50]) -> f32[3,50] {
  %cache = f32[3,50]{1,0} parameter(0)
  %ids.1 = s32[2,1]{1,0} parameter(1)
  %new = f32[2,50]{1,0} parameter(2)
  ROOT %put = f32[3,50]{1,0} scatter(%cache, %ids.1, %new), to_apply=%last
}

%token (state: (f32[3,50], bf16[1000,4])) -> (f32[3,50], bf16[1000,4]) {
  %state = (f32[3,50]{1,0}, bf16[1000,4]{1,0}) parameter(0)
  %cache.1 = f32[3,50]{1,0} get-tuple-element(%state), index=0
  %table.1 = bf16[1000,4]{1,0} get-tuple-element(%state), index=1
  %ids.2 = s32[2,1]{1,0} constant({{0},{1}})
  %found.1 = bf16[2,4]{1,0} fusion(%table.1, %ids.2), kind=kLoop, calls=%rows
  %new.1 = f32[2,50]{1,0} custom-call(%found.1, %cache.1), custom_call_target="triton", metadata={op_name="KERNEL"}
  %cache.2 = f32[3,50]{1,0} fusion(%cache.1, %ids.2, %new.1), kind=kInput, calls=%written
  ROOT %out = (f32[3,50]{1,0}, bf16[1000,4]{1,0}) tuple(%cache.2, %table.1)
}

ENTRY %main (cache.3: f32[3,50], table.2: bf16[1000,4]) -> (f32[3,50], bf16[1000,4]) {
  %cache.3 = f32[3,50]{1,0} parameter(0)
  %table.2 = bf16[1000,4]{1,0} parameter(1)
  %copied = f32[3,50]{1,0} copy(%cache.3)
  %state.1 = (f32[3,50]{1,0}, bf16[1000,4]{1,0}) tuple(%copied, %table.2)
  ROOT %loop = (f32[3,50]{1,0}, bf16[1000,4]{1,0}) while(%state.1), condition=%more, body=%token
}
"""


def test_bytes_of_a_decoded_token_are_those_that_its_instructions_read(monkeypatch):
    """A token looks up two rows, calls the kernel (7 bytes), and replaces two rows of the cache; a round copies it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    decode_bytes = importlib.import_module("decode_bytes")
    program = decode_bytes.Program(HLO.replace("KERNEL", decode_bytes.KERNEL), kernel_bytes=7, turns=1)
    rows, kernel, written = 2 * 4 * 2 + 2 * 4, 7, 2 * 4 + 2 * 50 * 4
    assert program.round() == (3 * 50 * 4, rows + kernel + written)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_decoded_token_reads_little_more_than_weights_and_real_keys_and_values():
    found = run_ahead(ROOT / "benchmarks" / "decode_bytes.py")
    assert 1 <= found["over_floor"] <= 1.3 and len(found["cases"]) == 2


@pytest.mark.long
@pytest.mark.turn(2)
def test_episodes() -> None:
    """In three turns half of the tokens and pixels are saved; tail batching gains by chance in so few steps."""
    line = result("episodes", "--small")
    assert line["benchmark"] == "episodes" and line["turns"] == 3
    assert min(line["prefill_saving"], line["prefill_saving_qwen3_5"]) > 0.3
    assert line["pixel_saving"] == min(line[f"pixel_saving_{way}"] for way in ("servers", "tickets", "trainer")) > 0.4
    assert line["prefill"]["tokens"]["kept"] > 0 and line["tail_speedup"] > 0
    assert refusal("episodes", "--turns=1").startswith("error: --turns must be 2 to 16")
