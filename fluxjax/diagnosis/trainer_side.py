"""The trainer's log-probs of a server's answers: each answer alone, and all answers packed as a step packs them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import models
from models.config import Qwen25VLConfig
from models.decoder import logprobs
from models.inputs import ModelInput, PackedTokens
from models.parity import one_row, our_parts
from sharding.mesh import make_mesh
from sharding.walk import Walk

from ..algorithms import find_algorithm
from ..base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from ..batch.composer import Composer
from ..batch.composition import unpack
from ..config import Config
from ..learner.gradients import Gradients, TrainingPhase
from ..learner.loss_inputs import logprobs_of


class Reply(NamedTuple):
    """The tokens of one sampled answer, and the server's log-probs of them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def continued(prompt: ModelInput, ids: Sequence[int]) -> ModelInput:
    """The prompt with an answer behind it."""
    n = len(ids)
    following_3T = np.broadcast_to(prompt.next_position + np.arange(n, dtype=np.int32), (3, n))
    return ModelInput(
        np.concatenate([prompt.token_ids_T, np.asarray(ids, np.int32)]),
        np.concatenate([prompt.positions_3T, following_3T], axis=1),
        np.concatenate([prompt.feature_index_T, np.full(n, -1, np.int32)]),
        prompt.next_position + n,
        prompt.vision,
    )


class TrainerSide:
    """A checkpoint as the trainer computes it. Rows of one answer are computed in float32."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.model = models.load(folder, jnp.float32)
        self.config = self.model.config
        self.graphdef, self.params = models.split(self.model)

    def alone(
        self, prompt: ModelInput, answers: Sequence[Reply], temperature: float = 1.0, never: tuple[int, ...] = ()
    ) -> list[np.ndarray]:
        """The log-probs of each answer under `softmax(logits / temperature)` without the ids `never`."""
        found = []
        for answer in answers:
            row, n = one_row(continued(prompt, answer.ids)), len(answer.ids)
            row = dataclasses.replace(row, temperatures_BT=np.full(row.tokens_BT.shape, temperature, np.float32))
            found.append(np.asarray(_scores(self.graphdef, never, self.params, row))[-n:])
        return found

    def final_hidden(self, prompt: ModelInput) -> np.ndarray:
        """The states `[T, D]` behind the final norm."""
        return our_parts(self.model, prompt)["final norm"]

    def packed(
        self, answered: Sequence[tuple[ModelInput, Sequence[Reply]]], dtype: str, never: tuple[int, ...]
    ) -> list[np.ndarray]:
        """The log-probs of each answer, from one row that has each prompt once, computed as in a step."""
        config, vision = Config(), self.config.vision if isinstance(self.config, Qwen25VLConfig) else None
        tokens = sum(len(prompt) + sum(len(answer.ids) for answer in answers) for prompt, answers in answered)
        patches = sum(0 if prompt.vision is None else prompt.vision.num_patches for prompt, _ in answered)
        config.packing.tokens_per_row, config.packing.rows_per_device = 1 << tokens.bit_length(), 1
        config.packing.patches_per_device = 1 << max(patches.bit_length(), 10)
        config.model.compute_dtype = type(config.model.compute_dtype)(dtype)
        prepared: Mapping[int, PreparedPrompt] = {
            draw: PreparedPrompt(Prompt(str(draw), "doctor", "", "", draw=draw), prompt)
            for draw, (prompt, _) in enumerate(answered)
        }
        groups = [
            Group(prepared[draw].prompt, tuple(_sample(draw, *numbered) for numbered in enumerate(answers)))
            for draw, (_, answers) in enumerate(answered)
        ]
        composition = Composer(config, 1, vision, self.config.text).compose(groups, prepared)
        phase = TrainingPhase(find_algorithm(config.algorithm).token_loss, 1.0, never)
        gradients = Gradients(config, self.model, phase, make_mesh(1))
        try:
            found = logprobs_of(composition, gradients, gradients.strategy.shard(self.params))
        finally:
            gradients.close()
        by_key = unpack(composition, found)
        return [by_key[key] for key in sorted(by_key)]


def _sample(draw: int, number: int, answer: Reply) -> Sample:
    versions = (0,) * len(answer.ids)
    response = Response(f"{draw}/{number}", draw, number, answer.ids, answer.logprobs, versions, "length")
    return Sample(response, Reward(0.0, False), 1.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scores(graphdef: Any, never: tuple[int, ...], params: Any, row: PackedTokens) -> Any:
    return logprobs(models.merge(graphdef, params), row, Walk(), never_sampled=never)[0][0]
