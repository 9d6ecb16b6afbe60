"""Our advantages and losses beside those of verl and TRL, on the same numbers; `docs/algorithms.md` has the table.

The peers run in an environment of their own: `bash scripts/test_peers.sh` makes it, and runs these tests.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_algorithms import TOLERANCE, group
from test_objectives import LENGTHS, MAX_NEW_TOKENS, case, laid_out, objective, with_lengths

from fluxjax.algorithms import ALGORITHMS
from fluxjax.algorithms.ppo import gae, value_loss, whitened
from fluxjax.config import AlgorithmConfig, KlEstimator, LossAggregation

PEERS = os.environ.get("FLUXJAX_PEERS", "")
SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "peers" / "losses.py"
pytestmark = pytest.mark.skipif(not PEERS, reason="FLUXJAX_PEERS names no packages: use scripts/test_peers.sh")

SEEDS = range(3)
TOKEN, SEQUENCE, CONSTANT = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"

# What each of ours is, in theirs.
BY_RESPONSE = {"loss_aggregation": LossAggregation.SEQUENCE_MEAN}
LOSSES = {
    "verl grpo, mean over responses": ("grpo", BY_RESPONSE, ("verl_loss", "vanilla", SEQUENCE, {})),
    "verl grpo": ("grpo", {}, ("verl_loss", "vanilla", TOKEN, {})),
    **{
        f"verl grpo {kl.value}": (
            "grpo",
            {"kl_coefficient": 0.3, "kl_estimator": kl},
            ("verl_loss", "vanilla", TOKEN, {"kl": kl.value, "kl_coefficient": 0.3}),
        )
        for kl in KlEstimator
    },
    "verl grpo dual": ("grpo", {"dual_clip": 1.4}, ("verl_loss", "vanilla", TOKEN, {"dual": 1.4})),
    "verl dr_grpo": ("dr_grpo", {}, ("verl_loss", "vanilla", CONSTANT, {"horizon": MAX_NEW_TOKENS})),
    "verl dapo": ("dapo", {}, ("verl_loss", "vanilla", TOKEN, {})),
    "verl gspo": ("gspo", {"clip_low": 0.1, "clip_high": 0.15}, ("verl_loss", "gspo", SEQUENCE, {})),
    "verl cispo": ("cispo", {"clip_low": 0.3, "clip_high": 0.4}, ("verl_loss", "cispo", TOKEN, {})),
    "verl rloo": ("rloo", {}, ("verl_loss", "vanilla", CONSTANT, {"horizon": MAX_NEW_TOKENS})),
    "trl grpo": ("grpo", {"dual_clip": 0.0, **BY_RESPONSE}, ("trl_loss", "grpo", None, {})),
    "trl grpo, mean over tokens": ("grpo", {"dual_clip": 0.0}, ("trl_loss", "bnpo", None, {})),
    "trl grpo k3": (
        "grpo",
        {"dual_clip": 0.0, "kl_coefficient": 0.3, **BY_RESPONSE},
        ("trl_loss", "grpo", None, {"beta": 0.3}),
    ),
    "trl dr_grpo": ("dr_grpo", {"dual_clip": 0.0}, ("trl_loss", "dr_grpo", None, {"horizon": MAX_NEW_TOKENS})),
    "trl dapo": ("dapo", {"dual_clip": 0.0}, ("trl_loss", "dapo", None, {})),
    "trl gspo": ("gspo", {"clip_low": 0.1, "clip_high": 0.15}, ("trl_loss", "grpo", None, {"level": "sequence"})),
    # TRL's bound is of the ratio itself, and there is none below.
    "trl cispo": ("cispo", {"clip_low": 1.0, "clip_high": 0.4}, ("trl_loss", "cispo", None, {"high": 1.4})),
}

ADVANTAGES = {
    "grpo": ("grpo", {}),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
}
REWARDS = [[1.0, 0.0, 0.25], [-1.0, 2.0, 0.5]]  # of as many responses as there are lengths


def padded(one, values):
    """[responses, tokens], zeros behind each response."""
    rows = np.zeros((len(LENGTHS), max(LENGTHS)))
    for row, part in zip(rows, np.split(values, one.ends), strict=True):
        row[: len(part)] = part
    return rows


def requests():
    arrays = {}
    for seed in SEEDS:
        one = case(seed)
        tokens = {name: padded(one, getattr(one, name)) for name in ("behaviour", "policy", "reference")}
        tokens |= {"mask": padded(one, np.ones(sum(LENGTHS))), "advantages": one.advantages}
        for key, (name, own, (function, loss, aggregation, further)) in LOSSES.items():
            cfg = AlgorithmConfig.of(name, **own)
            call = {"function": function, "loss": loss, "low": cfg.clip_low, "high": cfg.clip_high} | further
            if aggregation:
                call["aggregation"] = aggregation
            arrays |= {f"{key} {seed}/{field}": value for field, value in tokens.items()}
            arrays[f"{key} {seed}/call"] = json.dumps(call)
        critic = {"mask": padded(one, np.ones(sum(LENGTHS))), "rewards": padded(one, one.reference)}
        critic |= {"values": padded(one, one.behaviour), "policy": padded(one, one.policy)}
        for key, call in (
            ("gae", {"function": "verl_gae", "gamma": 0.9, "decay": 0.8}),
            ("value loss", {"function": "verl_value_loss", "clip": 0.5}),
        ):
            arrays |= {f"{key} {seed}/{field}": value for field, value in critic.items()}
            arrays[f"{key} {seed}/call"] = json.dumps(call)
    for name, (estimator, further) in ADVANTAGES.items():
        call = {"function": "verl_advantages", "estimator": estimator} | further
        groups = np.repeat(np.arange(len(REWARDS)), [len(some) for some in REWARDS])
        given = {"mask": padded(case(0), np.ones(sum(LENGTHS))), "rewards": np.concatenate(REWARDS), "groups": groups}
        arrays |= {f"{name}/{field}": value for field, value in given.items()} | {f"{name}/call": json.dumps(call)}
    return arrays


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    np.savez(folder / "requests.npz", **requests())
    command = [sys.executable, str(SCRIPT), str(folder / "requests.npz"), str(folder / "replies.npz")]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": PEERS}, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-4000:]
    return np.load(folder / "replies.npz")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("key", LOSSES)
def test_loss_and_gradient_are_the_peers(key, seed, answers):
    name, own, _ = LOSSES[key]
    cfg, one = AlgorithmConfig.of(name, **own), case(seed)
    logprobs, batch = laid_out(one, cfg)
    value, gradient = jax.value_and_grad(lambda x: objective(name, cfg, x, batch))(logprobs)
    np.testing.assert_allclose(value, answers[f"{key} {seed}/loss"], atol=TOLERANCE)
    ours = padded(one, np.asarray(gradient).reshape(-1)[: sum(LENGTHS)])
    np.testing.assert_allclose(ours, answers[f"{key} {seed}/gradient"], atol=TOLERANCE)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_peers(name, answers):
    cfg = AlgorithmConfig.of(name)
    groups = with_lengths([group(some, draw) for draw, some in enumerate(REWARDS)], LENGTHS)
    ours = [sample.advantage for one in ALGORITHMS[name].advantages(groups, cfg) for sample in one.samples]
    mask = padded(case(0), np.ones(sum(LENGTHS)))
    np.testing.assert_allclose(np.array(ours)[:, None] * mask, answers[f"{name}/advantages"] * mask, atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_critics_advantages_and_loss_are_the_peers(seed, answers):
    """Whitened as verl does it; the loss by values, with `behaviour` for the values before the update."""
    one = case(seed)
    estimates = gae(one.reference, one.behaviour, np.array(LENGTHS), np.array(0.9), 0.8)
    mask = padded(one, np.ones(sum(LENGTHS)))
    for name, values in (("advantages", whitened(estimates)), ("returns", estimates + one.behaviour)):
        np.testing.assert_allclose(padded(one, values), answers[f"gae {seed}/{name}"] * mask, atol=TOLERANCE)
    cfg = AlgorithmConfig.of("ppo", loss_aggregation=LossAggregation.TOKEN_MEAN)
    values, batch = laid_out(one, cfg)
    batch = dataclasses.replace(batch, values_BT=batch.behaviour_logprobs_BT, returns_BT=batch.reference_logprobs_BT)
    loss, gradient = jax.value_and_grad(lambda x: (batch.loss_weights_BT * value_loss(x, batch, 0.5)[0]).sum())(values)
    np.testing.assert_allclose(loss, answers[f"value loss {seed}/loss"], atol=TOLERANCE)
    ours = padded(one, np.asarray(gradient).reshape(-1)[: sum(LENGTHS)])
    np.testing.assert_allclose(ours, answers[f"value loss {seed}/gradient"], atol=TOLERANCE)
