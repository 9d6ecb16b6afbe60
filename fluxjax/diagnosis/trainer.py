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
from ..batch.composition import unpack
from ..config import Config
from ..learner.gradients import Gradients, TrainingPhase
from ..learner.loss_inputs import logprobs_of

Answered: TypeAlias = tuple[GenerateRequest, Sequence[Response]]


class Trainer:
    """A checkpoint as the trainer computes it in `dtype`, on one device."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._model = models.load(folder, jnp.float32)
        self.config, self.params = self._model.config, models.split(self._model)[1]
        self._run = Config()
        self._run.model.compute_dtype = type(self._run.model.compute_dtype)(dtype)
        self._gradients = functools.cache(self._compiled)

    def logprobs(self, answered: Sequence[Answered]) -> list[np.ndarray]:
        """Returns the log-probs `[T]` of each answer. One packed row has all prompts, each once, and all answers; the
        requests have the same sampling parameters."""
        groups, prepared, patches = [], {}, 0
        for draw, (request, answers) in enumerate(answered):
            prompt = Prompt(str(draw), "doctor", "", "", draw=draw)
            responses = [dataclasses.replace(answer, draw=draw) for answer in answers]
            groups.append(Group(prompt, tuple(Sample(response, Reward(0.0, False), 1.0) for response in responses)))
            prepared[draw] = PreparedPrompt(prompt, request.prompt)
            patches += request.prompt.frame_edges[-1] if request.prompt.vision is not None else 0
        tokens = sum(len(request.prompt) + sum(a.num_tokens for a in answers) for request, answers in answered)
        packing, sampling = self._run.packing, answered[0][0].sampling
        packing.tokens_per_row, packing.rows_per_device = 1 << tokens.bit_length(), 1
        packing.patches_per_device = 1 << max(patches.bit_length(), 10)
        composition = Composer(self._run, 1, self.config.vision, self.config.text).compose(groups, prepared)
        gradients = self._gradients(sampling.temperature, sampling.forbidden_ids)
        found = unpack(composition, logprobs_of(composition, gradients, gradients.strategy.shard(self.params)))
        return [found[key] for key in sorted(found)]

    def _compiled(self, temperature: float, never_sampled: tuple[int, ...]) -> Gradients:
        phase = TrainingPhase(find_algorithm(self._run.algorithm).token_loss, temperature, never_sampled)
        return Gradients(self._run, self._model, phase, make_mesh(1))
