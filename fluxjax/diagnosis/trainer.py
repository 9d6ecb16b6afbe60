"""The trainer's log-probs of a server's answers, computed as a training step computes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

import models
from rollout.engine import GenerateRequest
from sharding.mesh import make_mesh

from ..algorithms import find_algorithm
from ..base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from ..batch.composer import Composer
from ..config import Config, DType
from ..learner.gradients import Gradients, TrainingPhase
from ..learner.loss_inputs import logprobs_of

Answered: TypeAlias = tuple[GenerateRequest, Sequence[Response]]


class Trainer:
    """A checkpoint as the trainer computes it in `dtype`, on one device."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.model, self.dtype, self._config = models.load(folder, jnp.float32), dtype, Config()
        self.params = models.split(self.model)[1]
        self._config.model.compute_dtype, self._config.packing.rows_per_device = DType(dtype), 1
        self._gradients = functools.cache(self._gradients_of)

    def gap(self, answered: Sequence[Answered]) -> float:
        """Returns the mean difference between the log-probs of the answers and the trainer's, in nats. One packed row
        has all prompts, each once, and all answers; the requests have the same sampling parameters."""
        groups, prepared, tokens = [], {}, 0
        for draw, (request, answers) in enumerate(answered):
            prompt = Prompt(str(draw), "doctor", "", "", draw=draw)
            samples = [Sample(dataclasses.replace(answer, draw=draw), Reward(0.0, False), 1.0) for answer in answers]
            groups.append(Group(prompt, tuple(samples)))
            prepared[draw] = PreparedPrompt(prompt, request.prompt)
            tokens += len(request.prompt) + sum(answer.num_tokens for answer in answers)
        vision, packing, sampling = self.model.config.vision, self._config.packing, answered[0][0].sampling
        packing.tokens_per_row = 1 << tokens.bit_length()
        packing.patches_per_device = packing.tokens_per_row * (1 if vision is None else vision.merge_unit)
        composition = Composer(self._config, 1, vision, self.model.config.text).compose(groups, prepared)
        gradients = self._gradients(sampling.temperature, sampling.forbidden_ids)
        ours = composition.of_responses(logprobs_of(composition, gradients, gradients.strategy.shard(self.params)))
        theirs = composition.of_responses([batch.behaviour_logprobs_BT for batch in composition.batches])
        return float(np.abs(ours - theirs).mean())

    def _gradients_of(self, temperature: float, never_sampled: tuple[int, ...]) -> Gradients:
        phase = TrainingPhase(find_algorithm(self._config.algorithm).token_loss, temperature, never_sampled)
        return Gradients(self._config, self.model, phase, make_mesh(1))
