"""One RL step of fluxjax, stage by stage, in a process of its own: run by `benchmarks/train_step.py`.

The parts are those that `FluxTrainer` puts together, with the same settings. Every step has the same prompts (so the
compiled shapes stay the same) and new responses, all of them `rollout.max_new_tokens` long: the end id is never
sampled.

    prepare   media decoded, text tokenised; in training this overlaps with the step before
    rollout   from the first request queued to the last token received
    train     advantages, packing, forward, backward, clipping, AdamW
    sync      the new weights copied to the engine
    step      all of these
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from common import Channel, Stopwatch, peak_rss_mib
from compile_clock import CompileClock

import models
from fluxjax.algorithms import ALGORITHMS
from fluxjax.base.types import Group, MediaKind, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.config import Config
from fluxjax.config.cli import load
from fluxjax.data.loader import PromptLoader
from fluxjax.data.prepare import Preparer
from fluxjax.data.sources import Source, open_sources
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer
from fluxjax.run.build import build_model
from models.config import Qwen25VLConfig
from models.decoder import parameter_count
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine


class Steps:
    """The engine and the learner of a run, with one step's prompts. `stage` is `rollout`, `train` or `step`: what
    the other two need is not even built, so that the peak memory of the process belongs to the stage."""

    def __init__(self, config: Config, stage: str, *, videos: bool) -> None:
        self.config, self.stage, self.watch = config, stage, Stopwatch()
        sources = open_sources(config.data)
        self.model, self.processor = build_model(config, sources)
        self.vision = self.model.config.vision if isinstance(self.model.config, Qwen25VLConfig) else None
        if not videos:
            sources = {name: source for name, source in sources.items() if not _has_videos(source)}
            if not sources:
                raise SystemExit("TRL's GRPOTrainer takes no videos, and every source of this configuration has some")
        weights = {name: config.data.sources[name].weight for name in sources}
        loader = PromptLoader(sources, weights, config.seed)
        self.prompts = [loader.order[draw] for draw in range(config.rollout.prompts_per_step)]
        self.preparer = Preparer(self.processor, loader, config)
        self.prepared = self._prepare()

        rollout = config.rollout
        eos, media = self.processor.eos_ids, self.processor.media_token_ids
        self.sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            forbidden_ids=tuple(sorted({*eos, *media})),
        )
        if stage != "train":
            self.engine = JaxEngine(
                self.model,
                slots=rollout.slots,
                max_sequence_tokens=rollout.max_sequence_tokens,
                compute_dtype=config.model.compute_dtype.value,
            )
        if stage != "rollout":
            token_loss = ALGORITHMS[config.algorithm.name].token_loss
            learner = Learner(config, self.model, token_loss, never_sampled=self.sampling.forbidden_ids)
            reference = learner.params if config.algorithm.kl_coefficient else None
            self.learner = learner
            self.composer = Composer(config, learner.mesh.size, self.vision, learner.text)
            self.trainer = PolicyTrainer(config, learner, self.composer, reference)
        self.step_number = 0

    async def run(self) -> dict[str, Any]:
        """One step, or one stage of it. Returns its seconds, and what it worked through."""
        self.step_number += 1
        watch, metrics = self.watch, {}
        with watch("step"):
            with watch("prepare"):
                prepared = self._prepare()
            if self.stage == "train":
                groups = self._made_up()
            else:
                with watch("rollout"):
                    groups = await self._rollout()
            if self.stage != "rollout":
                with watch("train"):
                    by_draw = {one.prompt.draw: one for one in prepared}
                    metrics = self.trainer.train(self.step_number, groups, by_draw).metrics
            if self.stage == "step":
                with watch("sync"):
                    await self.engine.update_weights(self.learner.version, self.trainer.weights())
        responses = [sample.response for group in groups for sample in group.samples]
        return {
            "seconds": watch.take(),
            "tokens": sum(len(response.token_ids) for response in responses),
            "samples": len(responses),
            "logprob_gap": metrics.get("rollout_trainer_logprob_gap"),
        } | (self._batch(groups) if self.stage != "rollout" and self.step_number == 1 else {})

    def _prepare(self) -> list[Any]:
        prepared, skipped = self.preparer.prepare_all(self.prompts)
        if skipped:
            raise SystemExit(f"prompt {skipped[0][0].id} cannot be used: {skipped[0][1]}")
        return prepared

    async def _rollout(self) -> list[Group]:
        """Every request is queued before the first is served, as in the runtime."""
        await self.engine.pause()
        streams = []
        for one in self.prepared:
            rid, seed = f"{self.step_number}-{one.prompt.draw}", self.step_number * 2**16 + one.prompt.draw
            request = GenerateRequest(rid, one.inputs, self.sampling, n=self.config.rollout.group_size, seed=seed)
            streams.append(self.engine.generate(request))
        await self.engine.resume()
        prompts = [one.prompt for one in self.prepared]
        return list(await asyncio.gather(*map(self._collect, prompts, streams)))

    async def _collect(self, prompt: Prompt, stream: Any) -> Group:
        chunks: dict[int, list[Any]] = {sample: [] for sample in range(self.config.rollout.group_size)}
        async for chunk in stream:
            chunks[chunk.sample].append(chunk)
        responses = [
            _response(
                prompt,
                sample,
                [token for chunk in own for token in chunk.token_ids],
                [logprob for chunk in own for logprob in chunk.logprobs],
                [version for chunk in own for version in chunk.versions],
            )
            for sample, own in chunks.items()
        ]
        return _group(prompt, responses)

    def _made_up(self) -> list[Group]:
        """Random responses, where there is no engine to sample them."""
        rng = np.random.default_rng(self.step_number)
        size, count = self.model.config.text.vocab_size, self.sampling.max_new_tokens
        allowed = np.setdiff1d(np.arange(size), self.sampling.forbidden_ids)
        logprobs, versions = [-math.log(len(allowed))] * count, [self.learner.version] * count
        return [
            _group(
                prompt,
                [
                    _response(prompt, sample, rng.choice(allowed, count).tolist(), logprobs, versions)
                    for sample in range(self.config.rollout.group_size)
                ],
            )
            for prompt in self.prompts
        ]

    def _batch(self, groups: Sequence[Group]) -> dict[str, Any]:
        """How the groups are packed; counted once, outside of what is timed."""
        prepared = {one.prompt.draw: one for one in self.prepared}
        batches = self.composer.compose(groups, prepared).batches
        return {
            "packing": {
                "microbatches": len(batches),
                "tokens": sum(int(np.count_nonzero(batch.inputs.segments_BT)) for batch in batches),
                "padded_tokens": sum(batch.inputs.segments_BT.size for batch in batches),
            }
        }

    def about(self) -> dict[str, Any]:
        """The model, and the batch before packing."""
        inputs = [one.inputs for one in self.prepared]
        lengths = [len(one) for one in inputs]
        device = jax.devices()[0]
        return {
            "model": f"{type(self.model).__name__}, {self.config.model.compute_dtype.value}",
            "parameters": parameter_count(self.model),
            "device": f"{device.platform} ({device.device_kind})",
            "devices": jax.device_count(),
            "setup_rss_mib": peak_rss_mib(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
            | {"python": sys.version.split()[0]},
            "batch": {
                "prompts": len(inputs),
                "group_size": self.config.rollout.group_size,
                "prompt_tokens": {"mean": round(float(np.mean(lengths)), 1), "max": max(lengths)},
                "patches": sum(one.vision.num_patches for one in inputs if one.vision is not None),
                "videos": sum(item.kind is MediaKind.VIDEO for p in self.prompts for item in p.media),
                "images": sum(item.kind is MediaKind.IMAGE for p in self.prompts for item in p.media),
                "response_tokens": self.sampling.max_new_tokens,
            },
            "forbidden_ids": self.sampling.forbidden_ids,
        }

    def export(self, folder: pathlib.Path) -> None:
        """Model, processor and prompts, for another implementation to work on."""
        models.save(self.model, folder / "model")
        self.processor.save(folder / "model")
        prompts = [
            {
                "text": one.prompt.text,
                "images": [item.path for item in one.prompt.media],
                "token_ids": one.inputs.token_ids_T.tolist(),
            }
            for one in self.prepared
        ]
        (folder / "prompts.json").write_text(json.dumps(prompts))


def _response(
    prompt: Prompt, sample: int, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> Response:
    rid = f"{prompt.draw}/{sample}"
    return Response(rid, prompt.draw, sample, tuple(ids), tuple(logprobs), tuple(versions), "length")


def _group(prompt: Prompt, responses: Sequence[Response]) -> Group:
    """Every second response is right, so that each group has something to teach; scoring is not measured."""
    return Group(prompt, tuple(Sample(r, Reward(float(r.sample % 2), bool(r.sample % 2))) for r in responses))


def _has_videos(source: Source) -> bool:
    return any(item.kind is MediaKind.VIDEO for item in source[0].media)


def main(settings: Mapping[str, Any]) -> None:
    channel, clock = Channel(), CompileClock()
    steps = Steps(load(settings["arguments"]), settings["stage"], videos=settings["videos"])
    if settings["exchange"]:
        steps.export(pathlib.Path(settings["exchange"]))
    channel.say(**steps.about())
    with asyncio.Runner() as runner:
        for _ in channel.requests():
            channel.say(**runner.run(steps.run()), compile_seconds=clock.seconds)
    steps.preparer.close()
    channel.say(peak_rss_mib=peak_rss_mib(), peak_device_mib=_peak_device_mib())


def _peak_device_mib() -> float | None:
    """Peak memory of the fullest accelerator; None where JAX does not count it (CPU)."""
    counted = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in counted if stats and "peak_bytes_in_use" in stats]
    return round(max(peaks) / 2**20, 1) if peaks else None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
