"""Runs and times RL steps of fluxjax, stage by stage, in a process of its own: run by `benchmarks/train_step.py`.

The parts are those that `FluxTrainer` puts together, with the same settings. Every step has the same prompts (so the
compiled shapes stay the same) and new responses, each as long as the parent says: the end id is never sampled.

    prepare   the rest of decoding and tokenising, most of which runs during the step before, as in training
    rollout   from queueing the first request to receiving the last token
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
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grain
import jax
import jax.numpy as jnp
import numpy as np
from common import Channel, Stopwatch, peak_rss_mib
from compile_clock import CompileClock

import models
from fluxjax.algorithms import find_algorithm
from fluxjax.base.process import keep_freed_memory
from fluxjax.base.types import Group, MediaKind, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.config import Config
from fluxjax.config.cli import load
from fluxjax.data.loader import PromptLoader, open_sources
from fluxjax.data.prepare import Preparer
from fluxjax.data.sources import Source
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer
from fluxjax.learner.run_models import RunModels
from fluxjax.run.build import build_model
from fluxjax.run.callbacks import SettledHeap
from fluxjax.sizing.run_programs import cache_tokens
from models.decoder import parameter_count
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from rollout.requests import EngineLimits
from rollout.slots import SlotTable

MATMUL = 2048  # rows and columns of the matrices whose product measures this machine's speed


class ForcedSlots(SlotTable):
    """The slots of an engine that ends each response at a given length: `lengths[i][j]` are the tokens of sample `j` of
    the request whose id ends in `-i`."""

    def __init__(self, limits: EngineLimits, lengths: Sequence[Sequence[int]]) -> None:
        super().__init__(limits.slots, limits.max_sequence_tokens, limits.pages)
        self._lengths = lengths

    def assign(self, request: GenerateRequest, samples: list[int], slots: list[int], prefixes: list[tuple]) -> None:
        super().assign(request, samples, slots, prefixes)
        lengths = self._lengths[int(request.rid.rpartition("-")[2])]
        self.limit_N[slots] = [lengths[sample] for sample in samples]


class Steps:
    """The engine and the learner of a run, with one step's prompts. `stage` is `rollout`, `train` or `step` (both);
    only the parts that it needs are built, so that the peak memory of the process belongs to the stage. `lengths` are
    the tokens of each prompt's responses."""

    def __init__(self, config: Config, stage: str, lengths: Sequence[Sequence[int]], *, videos: bool) -> None:
        self.config, self.stage, self.watch, self.lengths = config, stage, Stopwatch(), lengths
        sources = open_sources(config)
        self.model, self.processor = build_model(config, sources)
        self.vision = self.model.config.vision
        if not videos:
            sources = {name: source for name, source in sources.items() if not _has_videos(source)}
            if not sources:
                raise SystemExit("the peer takes no videos, and every source of this configuration has some")
        weights = {name: config.data.sources[name].weight for name in sources}
        loader = PromptLoader(sources, weights, config.seed)
        self.prompts = [loader.order[draw] for draw in range(config.rollout.prompts_per_step)]
        loader.order = grain.MapDataset.source(self.prompts).repeat()  # each step draws the same
        self.preparer = Preparer(self.processor, loader, config)
        self.prepared = asyncio.run(self._prepare())

        rollout = config.rollout
        eos, media = self.processor.eos_ids, self.processor.media_token_ids
        self.sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            forbidden_ids=tuple(sorted({*eos, *media})),
        )
        if stage != "train":
            self.engine = JaxEngine(
                self.model,
                slots=rollout.slots,
                max_sequence_tokens=rollout.max_sequence_tokens,
                kv_tokens=cache_tokens(config),  # fixed at the start
                compute_dtype=config.model.compute_dtype.value,
            )
            self.engine._scheduler.table = ForcedSlots(self.engine._scheduler.limits, lengths)
        if stage != "rollout":
            token_loss = find_algorithm(config.algorithm).token_loss
            learner = Learner(config, self.model, token_loss, never_sampled=self.sampling.forbidden_ids)
            reference = learner.params if config.algorithm.kl_coefficient else None
            self.learner = learner
            self.composer = Composer(config, learner.mesh.size, self.vision, learner.text)
            run_models = RunModels(config, find_algorithm(config.algorithm), learner, reference=reference)
            self.trainer = PolicyTrainer(config, run_models, self.composer)
        self.step_number, self.heap = 0, SettledHeap()

    async def run(self) -> dict[str, Any]:
        """Runs one step, or one stage of it. Returns its seconds, and its numbers of tokens and samples."""
        self.step_number += 1
        watch, metrics = self.watch, {}
        with watch("step"):
            with watch("prepare"):
                prompts = await self._prepare()
            if self.stage == "train":
                groups = self._made_up()
            else:
                with watch("rollout"):
                    groups = await self._rollout()
            if self.stage != "rollout":
                with watch("train"):
                    by_draw = {prepared.prompt.draw: prepared for prepared in prompts}
                    metrics = self.trainer.train(self.step_number, groups, by_draw).metrics
            if self.stage == "step":
                with watch("sync"):
                    await self.engine.update_weights(self.learner.version, self.trainer.weights())
        self.heap.count()  # as `fluxjax.train` does
        responses = [sample.response for group in groups for sample in group.samples]
        return {
            "seconds": watch.take(),
            "tokens": sum(len(response.token_ids) for response in responses),
            "samples": len(responses),
            "logprob_gap": metrics.get("rollout_trainer_logprob_gap"),
        } | (self._batch(groups) if self.stage != "rollout" and self.step_number == 1 else {})

    async def _prepare(self) -> list[Any]:
        prepared, skipped = await self.preparer.draw(len(self.prompts))
        if skipped:
            raise SystemExit(f"prompt {skipped[0][0].id} cannot be used: {skipped[0][1]}")
        return prepared

    async def _rollout(self) -> list[Group]:
        """Generates the responses of a step. Every request is queued before the first is served, as in the runtime."""
        await self.engine.pause()
        streams = []
        for prepared in self.prepared:
            draw = prepared.prompt.draw
            rid, seed = f"{self.step_number}-{draw}", self.step_number * 2**16 + draw
            request = GenerateRequest(rid, prepared.inputs, self.sampling, n=self.config.rollout.group_size, seed=seed)
            streams.append(self.engine.generate(request))
        await self.engine.resume()
        prompts = [prepared.prompt for prepared in self.prepared]
        return list(await asyncio.gather(*map(self._collect, prompts, streams)))

    async def _collect(self, prompt: Prompt, stream: Any) -> Group:
        by_sample: dict[int, list[Any]] = {sample: [] for sample in range(self.config.rollout.group_size)}
        async for chunk in stream:
            by_sample[chunk.sample].append(chunk)
        responses = [
            _response(
                prompt,
                sample,
                chain.from_iterable(chunk.token_ids for chunk in chunks),
                chain.from_iterable(chunk.logprobs for chunk in chunks),
                chain.from_iterable(chunk.versions for chunk in chunks),
            )
            for sample, chunks in by_sample.items()
        ]
        return _group(prompt, responses)

    def _made_up(self) -> list[Group]:
        """Random responses for the stage `train`, which has no engine to sample them."""
        rng = np.random.default_rng(self.step_number)
        allowed = np.setdiff1d(np.arange(self.model.config.text.vocab_size), self.sampling.forbidden_ids)
        logprob, version = -math.log(len(allowed)), self.learner.version
        return [
            _group(
                prompt,
                [
                    _response(prompt, sample, rng.choice(allowed, count).tolist(), [logprob] * count, [version] * count)
                    for sample, count in enumerate(lengths)
                ],
            )
            for prompt, lengths in zip(self.prompts, self.lengths, strict=True)
        ]

    def _batch(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Counts the microbatches and tokens that the groups are packed into; called once, outside the timed steps."""
        by_draw = {prepared.prompt.draw: prepared for prepared in self.prepared}
        batches = self.composer.compose(groups, by_draw).batches
        return {
            "packing": {
                "microbatches": len(batches),
                "tokens": sum(int(np.count_nonzero(batch.inputs.segments_BT)) for batch in batches),
                "padded_tokens": sum(batch.inputs.segments_BT.size for batch in batches),
            }
        }

    def about(self) -> dict[str, Any]:
        """Describes the model, and the batch before packing."""
        inputs = [prepared.inputs for prepared in self.prepared]
        lengths = [len(prompt) for prompt in inputs]
        device = jax.devices()[0]
        return {
            "model": f"{type(self.model).__name__}, {self.config.model.compute_dtype.value}",
            "parameters": parameter_count(self.model),
            "multiplied_parameters": self._multiplied(),
            "device": f"{device.platform} ({device.device_kind})",
            "devices": jax.device_count(),
            "setup_rss_mib": peak_rss_mib(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
            | {"python": sys.version.split()[0]},
            "batch": {
                "prompts": len(inputs),
                "group_size": self.config.rollout.group_size,
                "prompt_tokens": {"mean": round(float(np.mean(lengths)), 1), "max": max(lengths)},
                "patches": sum(prompt.vision.num_patches for prompt in inputs if prompt.vision is not None),
                "videos": sum(item.kind is MediaKind.VIDEO for p in self.prompts for item in p.media),
                "images": sum(item.kind is MediaKind.IMAGE for p in self.prompts for item in p.media),
                "response_tokens": self.sampling.max_new_tokens,
                "all_response_tokens": sum(map(sum, self.lengths)),
            },
            "forbidden_ids": self.sampling.forbidden_ids,
        }

    def _multiplied(self) -> int | None:
        """The number of weights by which each token is multiplied once. None for a model with a vision tower, where
        text and media have different tokens."""
        text = self.model.config.text
        looked_up = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
        return None if self.vision is not None else parameter_count(self.model) - looked_up

    def export(self, folder: pathlib.Path) -> None:
        """Writes model, processor and prompts to a folder, for another implementation to work on."""
        models.save(self.model, folder / "model")
        self.processor.save(folder / "model")
        prompts = [
            {
                "text": prepared.prompt.text,
                "images": [item.path for item in prepared.prompt.media],
                "token_ids": prepared.inputs.laid_out().token_ids_T.tolist(),
            }
            for prepared in self.prepared
        ]
        (folder / "prompts.json").write_text(json.dumps(prompts))


def _response(
    prompt: Prompt, sample: int, ids: Iterable[int], logprobs: Iterable[float], versions: Iterable[int]
) -> Response:
    rid = f"{prompt.draw}/{sample}"
    return Response(rid, prompt.draw, sample, tuple(ids), tuple(logprobs), tuple(versions), "length")


def _group(prompt: Prompt, responses: Sequence[Response]) -> Group:
    """Scores every second response as right, so that each group has advantages; scoring is not measured."""
    return Group(prompt, tuple(Sample(r, Reward(float(r.sample % 2), bool(r.sample % 2))) for r in responses))


def _has_videos(source: Source) -> bool:
    return any(item.kind is MediaKind.VIDEO for item in source[0].media)


def main(settings: Mapping[str, Any]) -> None:
    keep_freed_memory()  # as in `fluxjax.train`
    channel, clock = Channel(), CompileClock()
    steps = Steps(load(settings["arguments"]), settings["stage"], settings["lengths"], videos=settings["videos"])
    if settings["exchange"]:
        steps.export(pathlib.Path(settings["exchange"]))
    channel.say(**steps.about())
    with asyncio.Runner() as runner:
        for request in channel.requests():
            if request["do"] == "matmul":
                channel.say(flops_per_second=_matmul_rate())
            else:
                channel.say(**runner.run(steps.run()), compile_seconds=clock.seconds)
    steps.preparer.close()
    channel.say(peak_rss_mib=peak_rss_mib(), peak_device_mib=_peak_device_mib())


def _matmul_rate(repeats: int = 5) -> float:
    """The most floating-point operations a second that a product of two large float32 matrices reached."""
    x = jnp.ones((MATMUL, MATMUL), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * MATMUL**3 / min(seconds[1:])


def _peak_device_mib() -> float | None:
    """Peak memory of the fullest accelerator; None if JAX does not count it (CPU)."""
    counted = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in counted if stats and "peak_bytes_in_use" in stats]
    return round(max(peaks) / 2**20, 1) if peaks else None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
