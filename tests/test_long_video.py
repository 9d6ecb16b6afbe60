"""Behind a video of more than a minute, whose time axis passes its spatial sides, everything stands at one place.

A real file goes through the processor; the answer's positions are computed by hand, and plain decoding, the engine
(from the start and from a prefix) and the trainer give the same log-probabilities of the same tokens.
"""

import asyncio
import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest
from packing_cases import MODEL, answered, compose, make_config
from plain_decode import generate

import models
from fluxjax.algorithms import grpo
from fluxjax.base.types import PreparedPrompt, Prompt
from fluxjax.batch.composition import unpack
from fluxjax.learner.learner import Learner
from models.config import PatchLayout
from models.processing import tiny
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from sharding.mesh import make_mesh

sys.path.insert(0, str(pathlib.Path(__file__).parent / "models"))
from media_files import moving_frames, write_video

SECONDS, FRAMES, ANSWER = 72, 12, 9
TICKS = int(2 * SECONDS / FRAMES * MODEL.vision.tokens_per_second)  # between two frame pairs
BEHIND = 2 + (FRAMES // 2 - 1) * TICKS + 1  # of "a", the start of the video, and its time axis
TOLERANCE = 2e-5  # float32 log-probs of a few nats


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    assert MODEL.vision is not None
    processor = tiny.build(["a which?"], layout=PatchLayout.of(MODEL.vision), num_frames=FRAMES, max_pixels=16 * 16)
    file = write_video(tmp_path_factory.mktemp("media") / "long.mp4", moving_frames(SECONDS, 16, 16), fps=1)
    return processor.prepare("a<video>which?", [("video", str(file))])


@pytest.fixture(scope="module")
def model():
    """Weights so large that a position more or less is seen in every log-probability."""
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 6, "video_token_id": 7}
    text = dataclasses.replace(MODEL.text, initializer_range=0.3)
    return models.create(dataclasses.replace(MODEL, text=text, **ids), seed=7)


@pytest.fixture(scope="module")
def plain(model, prompt):
    return generate(model, prompt, max_new_tokens=ANSWER)


def test_text_and_answer_stand_behind_the_time_axis(prompt):
    text = len("which?") + 1  # and the end of the video
    np.testing.assert_array_equal(prompt.positions_3T[:, -text:], [np.arange(BEHIND, BEHIND + text)] * 3)
    assert prompt.next_position == BEHIND + text
    video = prompt.positions_3T[:, 2:-text]
    assert BEHIND - 1 == video[0].max() > 4 * SECONDS // 2 > 10 * video[1:].max(), "else the video is not long"


@pytest.mark.medium
def test_decoding_depends_on_where_the_answer_stands(model, prompt, plain):
    """A place in ten is noticed: otherwise equal log-probabilities would prove nothing."""
    near = dataclasses.replace(prompt, next_position=prompt.next_position - TICKS)
    moved = generate(model, near, max_new_tokens=ANSWER)
    same = np.equal(moved.token_ids, plain.token_ids).cumprod().sum()  # the first is drawn before any position
    assert np.abs(np.subtract(moved.logprobs, plain.logprobs))[1 : same + 1].max() > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("known", [0, 4])
def test_the_engine_answers_like_plain_decoding(model, prompt, plain, known: int):
    """Also where it computes the first tokens of the answer again, as after a migration."""

    async def answer():
        engine = JaxEngine(model, slots=4, max_sequence_tokens=64, steps_per_sync=2)
        how = SamplingParams(max_new_tokens=ANSWER, temperature=0.0)
        prefix = (plain.token_ids[:known],) if known else ()
        ids, logprobs = [], []
        async for chunk in engine.generate(GenerateRequest("q", prompt, how, 1, 0, prefix)):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
        await engine.close()
        return ids, logprobs

    ids, logprobs = asyncio.run(asyncio.wait_for(answer(), 120))
    assert tuple(ids) == plain.token_ids[known:]
    np.testing.assert_allclose(logprobs, plain.logprobs[known:], atol=TOLERANCE, rtol=0)


@pytest.mark.medium
def test_the_trainer_scores_like_plain_decoding(model, prompt, plain):
    record = Prompt("long", "test", "?", "!", draw=5)
    answers = [plain.token_ids, plain.token_ids[:5]]
    group = answered(record, [(ids, plain.logprobs[: len(ids)]) for ids in answers])
    config = make_config(tokens_per_row=48, rows=1, patches=128)
    composition = compose([group], {5: PreparedPrompt(record, prompt)}, config, vision=MODEL.vision)

    positions = np.concatenate([batch.inputs.positions_3BT.reshape(3, -1) for batch in composition.batches], axis=1)
    expected = np.concatenate([prompt.next_position + np.arange(len(ids)) for ids in answers])
    np.testing.assert_array_equal(positions[:, composition.cells], [expected] * 3)

    learner = Learner(config, model, grpo.token_loss, mesh=make_mesh(1))
    scores = learner.gradients.scores(learner.params, composition.microbatches)
    found = unpack(composition, [jax.device_get(one[0]) for one in scores if one is not None])
    for k, ids in enumerate(answers):
        np.testing.assert_allclose(found[5, k], plain.logprobs[: len(ids)], atol=TOLERANCE, rtol=0)
