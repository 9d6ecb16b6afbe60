"""Random episodes: responses of several turns, with images and videos in the observations between them. What a turn
sees of its episode is found here piece by piece, and laid out as a conversation of its own."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from learner_cases import MEDIA, learner
from packing_cases import IMAGE, MODEL, TEXT_VOCABULARY, VIDEO, Content, model_input

from fluxjax.base.types import ENVIRONMENT, Group, PreparedPrompt, Prompt, Response, Reward, Sample, TrainBatch
from fluxjax.batch.composition import Microbatch
from models.inputs import ModelInput, PackedTokens, VisionInput, blank, concatenate, cut

MERGE = MODEL.vision.merge_unit if MODEL.vision is not None else 1
Episode = tuple[Group, Sample, ModelInput, int]  # group, sample, the whole conversation, tokens of its prompt


def random_content(rng: np.random.Generator, most_media: int) -> Content:
    content: Content = [int(rng.integers(1, 12))]
    for grid in rng.integers(0, len(MEDIA), rng.integers(0, most_media + 1)):
        content += [MEDIA[grid], int(rng.integers(1, 5))]
    return content


class Stretch(NamedTuple):
    """Neighbouring tokens of a response, from `start` to `stop`: what the model said in a turn, or a text or a medium
    of the observation before it. A medium has a grid, and a first patch in the conversation."""

    turn: int
    kind: str  # said, text or media
    start: int
    stop: int
    grid: tuple[int, int, int] = (0, 0, 0)
    patch: int = 0


def seen_before(stretches: Sequence[Stretch], turn: int, context: str) -> list[Stretch]:
    """Returns the stretches of an episode that the model sees in a turn."""
    before = [each for each in stretches if each.turn < turn or (each.turn == turn and each.kind != "said")]
    if context == "turn":
        ends = [each._replace(start=each.stop - 1) for each in before if each.kind == "said" and each.turn == turn - 1]
        return ends + [each for each in before if each.turn == turn]
    if context == "whole":
        return before
    newest = [each for each in before if each.kind == "media"][-int(context.removeprefix("images:")) :]
    return [each for each in before if each.kind != "media" or each in newest]


def views_by_walking(stretches: Sequence[Stretch], context: str) -> list[tuple[list[Stretch], int]]:
    """The stretches of each view, and its first turn. A turn goes on with the view before if it sees all of it; one
    that sees the newest observation only has a view of its own."""
    views: list[tuple[list[Stretch], int]] = []
    for each in (each for each in stretches if each.kind == "said"):
        before = seen_before(stretches, each.turn, context)
        if views and context != "turn" and before[: len(views[-1][0])] == views[-1][0]:
            views[-1] = [*before, each], views[-1][1]
        else:
            views.append(([*before, each], each.turn))
    return views


def random_episodes(seed: int, context: str = "whole") -> tuple[list[Group], dict[int, PreparedPrompt], list[Episode]]:
    """Groups of two to four episodes of one to three turns. Returns the groups, their prompts, and all episodes, or all
    views of them."""
    rng = np.random.default_rng(seed)
    groups, prepared, episodes = [], {}, []
    for number in range(int(rng.integers(2, 5))):
        draw = 50 + 2 * number
        prompt = Prompt(f"prompt-{draw}", "test", "?", "!", draw=draw, context=context)
        content = random_content(rng, 2)
        inputs = model_input(content, rng)
        samples, responses, wholes = [], {}, []
        for sample in range(int(rng.integers(2, 5))):
            conversation, versions, stretches = [*content], list[int](), list[Stretch]()
            patch = 0 if inputs.vision is None else inputs.vision.num_patches
            for turn in range(int(rng.integers(1, 4))):
                observed = random_content(rng, 2) if turn else []
                said = int(rng.integers(1, 7))
                conversation += [*observed, said]
                at = len(versions)
                for part in observed:
                    if isinstance(part, int):
                        stretches.append(Stretch(turn, "text", at, at + part))
                    else:
                        patches = math.prod(part)
                        stretches.append(Stretch(turn, "media", at, at + 2 + patches // MERGE, part, patch))
                        patch += patches
                    at = stretches[-1].stop
                stretches.append(Stretch(turn, "said", at, at + said))
                versions += [ENVIRONMENT] * (at - len(versions)) + [int(rng.integers(0, 9))] * said
            whole = _with_prompt(model_input(conversation, rng), inputs)
            response = _response(whole, len(inputs), draw, sample, versions, rng)
            samples.append(Sample(response, Reward(0.0, False), float(np.float32(rng.normal()))))
            part = part_of(whole, inputs)
            if part.vision is not None:
                responses[sample] = part
            wholes.append((whole, stretches))
        group = Group(prompt, tuple(samples))
        if number % 2:  # advantages of turns
            others = np.random.default_rng([seed, number])
            group = group.with_turn_advantages(
                [others.normal(size=len(s.response.turn_tokens)).astype(np.float32).tolist() for s in samples]
            )
        groups.append(group)
        prepared[draw] = PreparedPrompt(prompt, inputs, responses)
        for sample, (whole, stretches) in zip(group.samples, wholes, strict=True):
            episodes += [
                (group, *_view(sample, whole, inputs, content, *view), len(inputs))
                for view in views_by_walking(stretches, context)
            ]
    return groups, prepared, episodes


def _view(
    sample: Sample, whole: ModelInput, prompt: ModelInput, content: Content, stretches: list[Stretch], first: int
) -> tuple[Sample, ModelInput]:
    """A view as a sample of its own, and its conversation, which is laid out anew."""
    response, parts, kept = sample.response, [*content], list[int]()
    own = np.zeros(len(response.versions), bool)
    patches = [np.arange(0 if prompt.vision is None else prompt.vision.num_patches)]
    for each in stretches:
        kept += range(each.start, each.stop)
        own[each.start : each.stop] = each.kind == "said" and each.turn >= first
        if each.kind == "media":
            parts.append(each.grid)
            patches.append(each.patch + np.arange(math.prod(each.grid)))
        else:
            parts.append(each.stop - each.start)
    laid_out = model_input(parts, np.random.default_rng(0))
    tokens = np.concatenate([prompt.token_ids_T, np.array(response.token_ids)[kept]]).astype(np.int32)
    vision = laid_out.vision
    if vision is not None:
        assert whole.vision is not None
        vision = dataclasses.replace(vision, patches_PX=whole.vision.patches_PX[np.concatenate(patches)])
    ids, versions = tokens[len(prompt) :], np.where(own, response.versions, ENVIRONMENT)[kept]
    columns = {"token_ids": ids, "logprobs": np.where(own, response.logprobs, 0.0)[kept], "versions": versions}
    view = dataclasses.replace(response, **{name: tuple(values.tolist()) for name, values in columns.items()})
    advantages = sample.turn_advantages[first:]
    sample = dataclasses.replace(sample, response=view, turn_advantages=advantages)
    return sample, dataclasses.replace(laid_out, token_ids_T=tokens, vision=vision)


def _with_prompt(whole: ModelInput, prompt: ModelInput) -> ModelInput:
    """The conversation with the tokens and pixels of `prompt`, which every episode of a group begins with."""
    tokens = np.concatenate([prompt.token_ids_T, whole.token_ids_T[len(prompt) :]])
    if prompt.vision is None or whole.vision is None:
        return dataclasses.replace(whole, token_ids_T=tokens)
    first = prompt.vision.patches_PX
    patches = np.concatenate([first, whole.vision.patches_PX[len(first) :]])
    return dataclasses.replace(whole, token_ids_T=tokens, vision=dataclasses.replace(whole.vision, patches_PX=patches))


def _response(
    whole: ModelInput, prompt: int, draw: int, sample: int, versions: list[int], rng: np.random.Generator
) -> Response:
    ids = whole.token_ids_T[prompt:].tolist()
    logprobs = [0.0 if version == ENVIRONMENT else float(-rng.uniform(0.1, 5.0)) for version in versions]
    return Response(f"{draw}/{sample}", draw, sample, tuple(ids), tuple(logprobs), tuple(versions), "stop")


def part_of(whole: ModelInput, prompt: ModelInput) -> ModelInput:
    """The inputs of the response: the conversation without its prompt. Features count from the response's first."""
    P = len(prompt)
    before = 0 if prompt.vision is None else prompt.vision.num_patches
    index = whole.feature_index_T[P:]
    vision: VisionInput | None = None
    if (index >= 0).any():
        assert whole.vision is not None
        vision = cut(whole.vision, before, whole.vision.num_patches)
        vision = concatenate([vision])  # numbers its frames and windows from 1
        index = np.where(index >= 0, index - before // MERGE, -1)
    return ModelInput(whole.token_ids_T[P:], whole.positions_3T[:, P:], index, whole.next_position, vision)


def alone(episodes: list[Episode], heads: tuple[int, int], model, newest: int):
    """Each episode in a batch of its own, built here without the composer: tally, gradients, and the log-probs of the
    model's tokens by (draw, sample). All batches have one shape."""
    one, total = learner(heads, 1, model), sum(sample.response.num_trained for _, sample, _, _ in episodes)
    columns = -(-max(len(whole) for _, _, whole, _ in episodes) // 16) * 16
    most = max((whole.vision.num_patches for _, _, whole, _ in episodes if whole.vision is not None), default=MERGE)
    micros, masks = [], []
    for _, sample, whole, prompt in episodes:
        response = sample.response
        trained = np.zeros(columns, bool)
        trained[prompt : len(whole)] = np.array(response.versions) != ENVIRONMENT

        def row(values, dtype: type = np.float32, fill=0, first=prompt):
            values = np.asarray(values, dtype)
            return np.pad(values, (first, columns - first - len(values)), constant_values=fill)[None]

        parts = [] if whole.vision is None else [whole.vision]
        used = sum(part.num_patches for part in parts)
        assert MODEL.vision is not None
        vision = concatenate([*parts, blank(most - used, MODEL.vision.patch_values)])
        positions = np.pad(whole.positions_3T, ((0, 0), (0, columns - len(whole))))[:, None]
        inputs = PackedTokens(
            row(whole.token_ids_T, np.int32, first=0),
            row(np.ones(len(whole)), np.int32, first=0),
            np.zeros((1, columns), np.int32),
            positions.astype(np.int32),
            np.maximum(np.arange(columns, dtype=np.int32) - 1, 0)[None],
            row(whole.feature_index_T, np.int32, -1, first=0),
            dataclasses.replace(vision, frame_bound=64),
        )
        inputs = inputs.with_runs() if model.text.delta is not None else inputs
        said = trained[prompt : len(whole)]
        batch = TrainBatch(
            inputs,
            row(np.where(said, 1 / total, 0.0)),
            row(token_advantages(sample)),
            row(response.logprobs),
            row(np.zeros(len(said))),
            row(np.zeros(len(said))),
            row(np.where(said, newest - np.array(response.versions), -1), np.int32, -1),
        )
        micros.append(Microbatch(batch))
        masks.append((response.draw, response.sample, trained))
    grads, tally = one.accumulate(micros)
    scores = one.gradients.scores(one.params, micros)
    found: dict[tuple[int, int], np.ndarray] = {}
    for (*key, mask), score in zip(masks, scores, strict=True):  # the views of an episode follow each other
        assert score is not None
        found[tuple(key)] = np.append(found.get(tuple(key), []), np.asarray(score[0])[0, mask]).astype(np.float32)
    return tally, jax.tree.map(np.asarray, grads), found


def token_advantages(sample: Sample) -> list[float]:
    """The advantage of each token, by walking through the response; 0 for tokens of the environment."""
    turn, values, before = -1, list[float](), ENVIRONMENT
    for version in sample.response.versions:
        turn += before == ENVIRONMENT != version
        value = sample.turn_advantages[turn] if sample.turn_advantages else sample.advantage
        values.append(0.0 if version == ENVIRONMENT else value)
        before = version
    return values


def kinds(episodes: list[Episode]) -> set[str]:
    """The kinds of the episodes: `turns` (several), and `image` or `video` (in observations)."""
    found = set()
    for _, sample, whole, prompt in episodes:
        ids = whole.token_ids_T[prompt:]
        found |= {"turns"} if ENVIRONMENT in sample.response.versions else set()
        found |= {name for name, id in (("image", IMAGE), ("video", VIDEO)) if (ids == id).any()}
    return found


assert IMAGE >= TEXT_VOCABULARY  # random text shows no media
