"""Computes advantages and losses of verl and TRL on given numbers: run by tests/test_peers.py where both are installed.

    python losses.py REQUESTS.npz REPLIES.npz

`REQUESTS.npz` has arrays named `case/field`; a case's `call` is a JSON object: a function and its settings. The
arrays of `REPLIES.npz` are named `case/field` as well: `advantages`, or `loss` and its `gradient` by the policy's
log-probs.
"""

import json
import sys
import types

import numpy as np
import torch
from trl import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

DTYPE = torch.float64
TOKEN_MEAN = "token-mean"


def main(requests: str, replies: str) -> None:
    given, answers = np.load(requests), {}
    for case in sorted({name.partition("/")[0] for name in given}):
        call = json.loads(str(given[f"{case}/call"]))
        arrays = {
            name.partition("/")[2]: torch.as_tensor(given[name], dtype=DTYPE)
            for name in given
            if name.startswith(f"{case}/") and not name.endswith("/call")
        }
        for field, value in FUNCTIONS[call.pop("function")](arrays, **call).items():
            answers[f"{case}/{field}"] = value.detach().numpy()
    np.savez(replies, **answers)


def verl_advantages(arrays, estimator, **settings):
    mask = arrays["mask"]
    last = mask.sum(-1).long() - 1
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), last] = arrays["rewards"]
    compute = core_algos.get_adv_estimator_fn(estimator)
    index = arrays["groups"].long().numpy()
    config = AlgoConfig(adv_estimator=estimator)
    advantages, _ = compute(token_level_rewards=rewards, response_mask=mask, index=index, config=config, **settings)
    return {"advantages": advantages}


def verl_gae(arrays, gamma, decay):
    mask = arrays["mask"]
    advantages, returns = core_algos.compute_gae_advantage_return(
        arrays["rewards"], arrays["values"], mask, gamma, decay
    )
    return {"advantages": advantages, "returns": returns}


def verl_value_loss(arrays, clip):
    new, old = arrays["policy"].requires_grad_(), arrays["values"]
    value, _ = core_algos.compute_value_loss(new, arrays["rewards"], old, arrays["mask"], clip, TOKEN_MEAN)
    return _with_gradient(value, new)


def verl_loss(arrays, loss, aggregation, low, high, dual=3.0, kl="", kl_coefficient=0.0, horizon=None):
    policy, mask = arrays["policy"].requires_grad_(), arrays["mask"]
    scale = {} if horizon is None else {"loss_scale_factor": horizon}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        global_batch_info=scale,
    )
    value, _ = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=arrays["behaviour"],
        log_prob=policy,
        advantages=arrays["advantages"][:, None].expand_as(policy),
        response_mask=mask,
        loss_agg_mode=aggregation,
        config=config,
    )
    if kl:
        terms = core_algos.kl_penalty(policy, arrays["reference"], kl)
        value = value + kl_coefficient * core_algos.agg_loss(terms, mask, aggregation, **scale)
    return _with_gradient(value, policy)


def trl_loss(arrays, loss, low, high, beta=0.0, delta=None, level="token", horizon=None):
    """Computes the loss by `GRPOTrainer`'s own method, on a trainer without a model; the forward pass is ours."""
    policy, mask = arrays["policy"].requires_grad_(), arrays["mask"]
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss,
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=horizon,
        use_vllm=False,
        model=types.SimpleNamespace(training=False),
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=delta),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": _Sink()},
    )
    ids = torch.zeros(policy.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["behaviour"],
        "ref_per_token_logps": arrays["reference"],
        "num_items_in_batch": mask.sum(),
    }
    return _with_gradient(GRPOTrainer._compute_loss(trainer, None, inputs), policy)


class _Sink(dict):
    """Metrics that nobody reads."""

    def __missing__(self, name):
        return []


def _with_gradient(value, policy):
    value.backward()
    return {"loss": value, "gradient": policy.grad}


FUNCTIONS = {
    "verl_advantages": verl_advantages,
    "verl_gae": verl_gae,
    "verl_loss": verl_loss,
    "verl_value_loss": verl_value_loss,
    "trl_loss": trl_loss,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
