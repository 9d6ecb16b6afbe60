"""Runs and times GRPO steps in google-tunix. `benchmarks/train_step.py` runs it in an interpreter that has tunix.

Model, prompts and the lengths of all responses come from a Hugging Face folder that our side has written.
`GRPOLearner.train()` runs unchanged; the parent decides when each step begins, because prompts are handed out one step
at a time.

    rollout   `RLCluster.generate`: tokenising, prefill, decoding until the longest response has ended
    train     the rest of the step: padding, advantages, forward, backward, clipping, AdamW, the learner's bookkeeping
    step      from the parent's request until the new parameters are there

A subclass replaces tunix' sampler, for two settings that `RolloutConfig` lacks: ids that are never sampled, and a
length for each response.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as tunix_sampler  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import params as qwen2_params  # pyright: ignore[reportMissingImports]
from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from common import Channel, Stopwatch, peak_rss_mib

WITHOUT_END = 10**9  # steps that no run reaches


class ForcedSampler(tunix_sampler.Sampler):
    """tunix' sampler, with responses of given lengths."""

    lengths_B: np.ndarray  # tokens of each response of a step
    end_id: int
    forbidden_ids: tuple[int, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs | {"forbidden_tokens": self.forbidden_ids})

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        state = super()._sample(*args, **kwargs)
        index = state.decoding_step - state.num_input_tokens  # index in the response of the sampled token
        drawn_B = state.token_buffer[:, state.decoding_step]
        token_B = jnp.where(index >= self.lengths_B, self.end_id, drawn_B)
        buffer_BT = state.token_buffer.at[:, state.decoding_step].set(token_B)
        return dataclasses.replace(state, token_buffer=buffer_BT, done=state.done | (index + 1 >= self.lengths_B))


class ToyTokenizer:
    """Encodes each prompt to our side's ids of it; the text of responses is never read."""

    def __init__(self, prompts: list[dict[str, Any]], end_id: int) -> None:
        self._ids, self._end_id = {prompt["text"]: prompt["token_ids"] for prompt in prompts}, end_id

    def encode(self, text: str) -> list[int]:
        return self._ids[str(text)]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int | None:
        return None

    def eos_id(self) -> int:
        return self._end_id

    def pad_id(self) -> int:
        return self._end_id


class TimedCluster(rl_cluster.RLCluster):
    """`RLCluster`, with the wall time of its rollouts."""

    watch: Stopwatch
    tokens = 0
    samples = 0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.watch("rollout"):
            output = super().generate(*args, **kwargs)
        self.tokens, self.samples = sum(map(len, output.tokens)), len(output.tokens)
        return output


class Steps:
    """Hands out the prompts of a step when the parent asks for a step; the step before is done then."""

    def __init__(self, channel: Channel, cluster: TimedCluster, texts: list[str]) -> None:
        self._channel, self._cluster, self._texts = channel, cluster, np.array(texts)
        self._requests, self._began = channel.requests(), 0.0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._began:
            jax.block_until_ready(nnx.state(self._cluster.actor_trainer.model))
            step, rollout = time.perf_counter() - self._began, self._cluster.watch.take()["rollout"]
            seconds = {"rollout": rollout, "train": step - rollout, "step": step}
            self._channel.say(seconds=seconds, tokens=self._cluster.tokens, samples=self._cluster.samples)
        next(self._requests)  # ends the iteration with the last request
        self._began = time.perf_counter()
        return {"prompts": self._texts}


def load(folder: pathlib.Path, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The model of the exchange folder, in float32."""
    hf = json.loads((folder / "config.json").read_text())
    config = qwen2.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["hidden_size"] // hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=(hf.get("rope_parameters") or hf)["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
    )
    return qwen2_params.create_model_from_safe_tensors(str(folder), config, mesh, dtype=jnp.float32)


def cluster_config(settings: dict[str, Any], prompt_tokens: int, mesh: jax.sharding.Mesh) -> rl_cluster.ClusterConfig:
    """The settings of our side in tunix' words; the whole batch is one microbatch."""
    rollout, optim = settings["rollout"], settings["optim"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(optim["max_grad_norm"]),
        optax.adamw(
            optim["lr"], optim["betas"][0], optim["betas"][1], optim["eps"], weight_decay=optim["weight_decay"]
        ),
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE)
    return rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=WITHOUT_END, max_steps=WITHOUT_END
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=rollout["max_new_tokens"],
            max_prompt_length=prompt_tokens,
            kv_cache_size=prompt_tokens + rollout["max_new_tokens"],
            temperature=rollout["temperature"],
            top_p=1.0,
            top_k=None,
        ),
    )


def half_right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Scores every second response as right, so that each group has advantages; scoring is not measured."""
    return [float(i % 2) for i in range(len(completions))]


def main(settings: dict[str, Any]) -> None:
    channel = Channel()
    warnings.simplefilter("ignore")
    folder = pathlib.Path(settings["exchange"])
    prompts = json.loads((folder / "prompts.json").read_text())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = load(folder / "model", mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    algorithm, end_id = settings["algorithm"], settings["forbidden_ids"][0]
    ForcedSampler.lengths_B = np.array(settings["lengths"], np.int32).reshape(-1)
    ForcedSampler.end_id, ForcedSampler.forbidden_ids = end_id, tuple(settings["forbidden_ids"])
    tunix_sampler.Sampler = ForcedSampler
    longest = max(len(prompt["token_ids"]) for prompt in prompts)
    config, tokenizer = cluster_config(settings, longest, mesh), ToyTokenizer(prompts, end_id)
    cluster = TimedCluster(actor=model, tokenizer=tokenizer, cluster_config=config)
    cluster.watch = Stopwatch()
    aggregation = {
        "token_mean": "token-mean",
        "sequence_mean": "sequence-mean-token-mean",
        "constant": "sequence-mean-token-scale",
    }
    learner = GRPOLearner(
        cluster,
        GRPOConfig(
            num_generations=settings["rollout"]["group_size"],
            loss_agg_mode=aggregation[algorithm["loss_aggregation"]],
            beta=algorithm["kl_coefficient"],
            epsilon=algorithm["clip_low"],
        ),
        reward_fns=half_right,
    )
    device = jax.devices()[0]
    channel.say(
        model=f"{type(model).__name__}, float32",
        parameters=parameters,
        device=f"{device.platform} ({device.device_kind})",
        setup_rss_mib=peak_rss_mib(),
        versions={name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax", "optax", "numpy")}
        | {"python": sys.version.split()[0]},
    )
    learner.train(Steps(channel, cluster, [prompt["text"] for prompt in prompts]))
    channel.say(peak_rss_mib=peak_rss_mib())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
