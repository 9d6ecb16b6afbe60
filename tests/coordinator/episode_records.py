"""Runs of many episodes whose engines and environments record what they say, which is compared with what is trained on.

The coordinator, the runtime, `Episodes`, and the tokenisation and the layout of observations are the real ones. Engines
sample at random, fail, lose requests, end streams early, move responses to other engines and get new weights. Every
sampled token has a log-prob of its own, which names its record. Environments answer by what they heard and by the seed,
and fail, too. Some are gone between two turns; others get their snapshots, or hear the recorded turns again, and a few
then answer otherwise. Reports come twice, or late. Runs are killed, and go on from their newest checkpoint.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import pickle
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from runtime_cases import Source
from scripted_engine import ScriptedEngine

from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.types import ENVIRONMENT, Group, PreparedPrompt, Prompt, Response
from fluxjax.coordinator import messages
from fluxjax.coordinator.ledger import Entry, PromptStage
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, Fault, Observed
from models.config import PatchLayout
from models.inputs import ModelInput
from models.processing.conversation import TurnDelimiters
from models.processing.media_file import Medium
from models.processing.processor import PADS, VISION_END, VISION_START
from models.processing.tiny import SPECIAL_TOKENS, build
from rollout.engine import FinishReason, GenerateRequest

# Words of several letters are one token, or several that the model sampled: decoding and encoding is no identity.
WORDS = ("ab", "ba", "abba", "aa")
PROCESSOR = build(["abcdefghijklmnopqrstuvwxyz 0123456789.\n"], WORDS, layout=PatchLayout(patch_size=4, window_size=16))
MERGE = PROCESSOR.layout.spatial_merge_size**2
END, START, STOP = SPECIAL_TOKENS.index("<|endoftext|>"), *map(SPECIAL_TOKENS.index, ("<|im_start|>", "<|im_end|>"))
DELIMITERS = TurnDelimiters((END, START), "seen.\n", " so", (STOP, START))
SAMPLED = [PROCESSOR.encode(token)[0] for token in ("a", "b", " ", "c", "\n", *WORDS, "<|im_end|>")]
FAILS = 0.004  # the share of requests, or of turns, of each kind of failure
TURNS = 20


def _pictures() -> dict[str, tuple[Medium, np.ndarray]]:
    """Media that were decoded before: images of several sizes, and a video, by path."""
    grids = [("image", (1, 2 * rows, 2 * columns)) for rows in (1, 2, 3) for columns in (1, 2, 3)]
    found, width = {}, PROCESSOR.settings.patch_bytes
    for number, (kind, grid) in enumerate([*grids, ("video", (2, 2, 4))]):
        patches = np.random.default_rng(number).normal(size=(int(np.prod(grid)), width)).astype(np.float32)
        found[f"{kind}-{number}"] = Medium(kind, grid, 0.5 if kind == "video" else 0.0), patches
    return found


PICTURES = _pictures()
PATHS = list(PICTURES)


def lay_out(ids: Sequence[int], prompt: Prompt, start: int = 0) -> ModelInput:
    """The inputs of ids with a placeholder for each medium."""
    known = [PICTURES[medium.path] for medium in prompt.media]
    patches = np.concatenate([patches for _, patches in known]) if known else None
    return PROCESSOR.lay_out(PROCESSOR.outline_of(ids, [medium for medium, _ in known]), patches, start=start)


def shown(number: int, count: int) -> tuple[Media, ...]:
    paths = [PATHS[(number >> 4 * place) % len(PATHS)] for place in range(count)]
    return tuple(Media(MediaKind(path.partition("-")[0]), path) for path in paths)


class Prompts(Source):
    """Every second prompt shows a picture."""

    async def draw(self, count: int) -> Any:
        drawn, skipped = await super().draw(count)
        return [self.prepared(prepared.prompt.draw) for prepared in drawn], skipped

    @staticmethod
    def prepared(draw: int, saved: Sequence[Mapping[str, Any]] = ()) -> PreparedPrompt:
        """`saved` are responses of a checkpoint."""
        media = shown(draw, draw % 2)
        prompt = Prompt(f"p{draw}", "scripted", "?", "!", draw=draw, environment="sights", media=media)
        text = "what" + "".join(f" <{medium.kind.value}>" for medium in media)
        ids = PROCESSOR.tokenise(text, [(medium.kind.value, medium.path) for medium in media])
        inputs, responses = lay_out(ids, prompt), {}
        for response in map(Response.from_json, saved):
            if response.media:
                known = [PICTURES[medium.path] for medium in response.media]
                patches = np.concatenate([patches for _, patches in known])
                laid_out = functools.partial(PROCESSOR.lay_out_response, start=inputs.next_position)
                responses[response.sample] = laid_out(response.token_ids, [medium for medium, _ in known], patches)
        return PreparedPrompt(prompt, inputs, responses)


@dataclasses.dataclass(eq=False)
class Stream:
    """The tokens that an engine got and sampled for one sample of a request."""

    draw: int
    sample: int
    prompt: int  # tokens of the prompt that the group shares
    context: tuple[int, ...]  # tokens behind this prompt
    next_position: int
    patches: int
    ids: list[int] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    serials: list[int] = dataclasses.field(default_factory=list)
    trained: bool = False
    attempt: int = -1


@dataclasses.dataclass(eq=False)
class Sights:
    """An environment. Its answers depend on its seed and on all turns."""

    records: Records
    draw: int
    state: int
    goal: int = 0  # turns
    heard: list[str] = dataclasses.field(default_factory=list)
    answers: list[Observed] = dataclasses.field(default_factory=list)
    observation: ClassVar[Observed] = Observed("", (), 0.0, False, {})  # of its reset

    async def act(self, text: str) -> Observed:
        await self.records.pause()
        if self.records.happens(FAILS):
            raise EnvironmentFailure(Fault.RAISED, "out of order")
        self.state = zlib.crc32(text.encode(), self.state)
        self.goal = self.goal or 1 + int(TURNS * (self.state / 2**32) ** 2)
        media = shown(self.state, self.state % 3)
        marks = [f"<{medium.kind.value}>" for medium in media]
        observed = f"{self.state % 97} here {' x '.join(marks)}{' end' * (self.state % 2)}"
        self.heard.append(text)
        done = len(self.heard) >= self.goal
        self.answers.append(Observed(observed, media, (self.state % 5) / 4, done, {}))
        return self.answers[-1]

    @property
    def has_snapshots(self) -> bool:
        return self.draw % 3 == 0

    async def snapshot(self) -> bytes | None:
        await self.records.pause()
        if self.has_snapshots and self.records.happens(FAILS):
            raise EnvironmentFailure(Fault.RAISED, "no snapshot")
        return pickle.dumps((self.state, self.goal, self.heard, self.answers)) if self.has_snapshots else None

    async def restore(self, snapshot: bytes) -> None:
        self.records.counts["restored"] += 1
        self.state, self.goal, self.heard, self.answers = pickle.loads(snapshot)

    async def end(self) -> None: ...

    async def kill(self) -> None: ...


class Records:
    """All that was said in a run, and the pool of its environments."""

    limits: ClassVar[EnvironmentLimits] = EnvironmentLimits(turns=TURNS + 1)

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.spoken: list[tuple[Stream, int]] = []  # by serial number: a token's stream and its place there
        self.latest: dict[tuple[int, int], Stream] = {}  # by draw and sample
        self.environments: dict[int, list[Sights]] = collections.defaultdict(list)  # by draw
        self.prompts: dict[int, ModelInput] = {}  # by draw
        self.engines: list[ScriptedEngine] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.lengths: set[int] = set()  # turns of the episodes that were trained on
        self.since: list[Stream] = []  # streams that were trained on since the newest checkpoint
        self.saved: dict[tuple[int, int], tuple[int, ...]] = {}  # by draw and sample: tokens that this checkpoint needs
        self.first: dict[int, int] = {}  # by draw: the attempt that began anew last
        self.resumed: set[tuple[int, int]] = set()  # draw and sample of what has yet to go on from a checkpoint

    def happens(self, share: float) -> bool:
        return self.dice.random() < share

    async def pause(self) -> None:
        for _ in range(self.dice.randint(0, 3)):
            await asyncio.sleep(0)

    async def start(self, name: str, prompt: Prompt, seed: int, arguments: Mapping[str, Any]) -> Sights:
        await self.pause()
        if self.happens(FAILS):
            raise EnvironmentFailure(Fault.DIED, "did not begin")
        fickle = self.dice.choice(range(1, 99)) if self.happens(0.2) else 0
        self.environments[prompt.draw].append(Sights(self, prompt.draw, seed + fickle))
        return self.environments[prompt.draw][-1]

    def failed(self, name: str, failure: EnvironmentFailure) -> EnvironmentFailure:
        assert name == "sights" and "sights of source scripted was begun anew" in failure.reason
        self.counts["named"] += 1
        return failure

    # --- kills -----------------------------------------------------------------------------------

    def needed(self, entries: Mapping[int, Entry]) -> dict[tuple[int, int], tuple[int, ...]]:
        """Returns the tokens of each response that a checkpoint must have: of one that an engine generates now, those
        that the engine got."""
        live = {key: stream for key, stream in self.latest.items() if key[0] in entries}
        whole = {draw for draw, entry in entries.items() if entry.stage is PromptStage.DEFERRED}
        now = {key for key, stream in live.items() if stream.attempt >= self.first[key[0]]}
        return {key: (*s.context, *(s.ids if key[0] in whole else ())) if key in now else () for key, s in live.items()}

    def resume(self) -> None:
        """Forgets what came after the newest checkpoint."""
        self.counts["killed"] += 1
        for stream in self.since:
            stream.trained = False
        self.since, self.engines = [], []
        self.latest = {(draw, n): Stream(draw, n, 0, context, 0, 0) for (draw, n), context in self.saved.items()}
        self.resumed = {key for key, context in self.saved.items() if context}

    # --- what engines get ------------------------------------------------------------------------

    def begin(self, request: GenerateRequest, sample: int) -> Stream:
        draw = int(request.rid[:8])
        if "/" not in request.rid and request.rid.count(".") == 1:
            self.prompts[draw] = request.prompt
        shared = len(self.prompts[draw])
        context = tuple(request.prompt.token_ids_T[shared:].tolist())
        patches = 0 if request.prompt.vision is None else request.prompt.vision.num_patches
        stream = Stream(draw, sample, shared, context, request.prompt.next_position, patches)
        stream.attempt = int(request.rid[9:11])
        assert not any(request.prefix_ids)
        assert request.prompt.token_ids_T[:shared].tolist() == self.prompts[draw].token_ids_T.tolist()
        before = self.latest.get((draw, sample))
        if context:
            assert before is not None and _begins(context, before), f"{request.rid}: turns were lost"
        self.latest[draw, sample] = stream
        return stream

    def say(self, stream: Stream, id: int, version: int) -> float:
        """Records a sampled token, and returns its log-prob."""
        self.spoken.append((stream, len(stream.ids)))
        stream.ids.append(id)
        stream.versions.append(version)
        stream.serials.append(len(self.spoken))
        return -float(len(self.spoken))

    def see(self, said: Sequence[messages.Instruction]) -> None:
        """A response that goes on has all that its engine said before."""
        for order in said:
            for request in order.requests if isinstance(order, messages.Generate) else ():
                draw = request.prompt.draw
                if not request.begun:
                    self.first[draw] = request.attempt
                    self.resumed = {key for key in self.resumed if key[0] != draw}
                for sample, begun in enumerate(request.begun):
                    if (draw, sample) in self.resumed:
                        assert begun is not None, f"{request.rid}: sample {sample} was lost"
                        self.counts["carried"] += bool(begun.media)
                        self.resumed.remove((draw, sample))
                    if begun is not None:
                        self.counts["parked"] += 1
                        assert _begins(begun.token_ids, self.latest[begun.draw, sample]), f"{request.rid}: lost tokens"

    # --- what is trained on -----------------------------------------------------------------------

    def compare(self, group: Group, prepared: PreparedPrompt) -> None:
        samples = [sample.response.sample for sample in group.samples]
        assert len(set(samples)) == len(samples) and prepared.prompt.draw == group.prompt.draw
        for response in (sample.response for sample in group.samples):
            said = self._compare_turns(response, prepared.inputs.laid_out())
            self._compare_observations(response, said, prepared)
            self.counts["episodes"] += 1

    def _compare_turns(self, response: Response, prompt: ModelInput) -> list[list[int]]:
        """Each stream is there once and entirely, behind the tokens that its engine got. Returns the turns."""
        ids, logprobs, versions = response.token_ids, response.logprobs, response.versions
        turns: list[list[int]] = []
        place, between = 0, True
        while place < len(ids):
            if versions[place] == ENVIRONMENT:
                assert not logprobs[place] and turns
                place, between = place + 1, True
                continue
            stream, first = self.spoken[-int(logprobs[place]) - 1]
            stop = place + len(stream.ids)
            assert (stream.draw, stream.sample, first) == (response.draw, response.sample, 0), "tokens of another turn"
            assert not stream.trained, "a turn is trained on twice"
            assert list(ids[place:stop]) == stream.ids and list(versions[place:stop]) == stream.versions
            assert [-logprob for logprob in logprobs[place:stop]] == stream.serials
            assert stream.context == ids[:place], "a turn follows other tokens than its engine got"
            inputs = self._inputs.get(response.sample)
            if inputs is not None:
                assert inputs.positions_3T[:, place].tolist() == [stream.next_position] * 3
            stream.trained = True
            self.since.append(stream)
            if between:
                turns.append([])
            turns[-1] += stream.ids
            self.counts["resumed"] += not between
            place, between = stop, False
        assert turns and sum(map(len, turns)) == response.num_trained
        self.counts["mixed"] += len({*versions} - {ENVIRONMENT}) > 1
        return turns

    _inputs: Mapping[int, ModelInput]

    def _compare_observations(self, response: Response, said: list[list[int]], prepared: PreparedPrompt) -> None:
        """The environment heard each turn once; its answers stand between the turns."""
        texts = [PROCESSOR.decode(turn) for turn in said]
        unheard = len(response.rewards) < len(said)
        if unheard:
            assert response.finish == FinishReason.LENGTH.value and len(response.rewards) == len(said) - 1
            texts.pop()
        candidates = [e for e in self.environments[response.draw] if e.heard == texts]
        if not texts:
            assert len(said) == 1 and not response.media
            return
        assert candidates, f"no environment heard these turns: {texts}"
        # Answers of two environments that heard the same may differ.
        wrong = [self._difference(response, said, environment.answers, unheard) for environment in candidates]
        assert "" in wrong, wrong
        seen = candidates[wrong.index("")].answers
        single = _conversation(said, seen, False)
        self.counts["turns"] += len(said)
        self.counts["media"] += len(response.media)
        self.lengths.add(len(said))
        if response.media:
            before, prompt = prepared.inputs.laid_out().next_position, Prompt("", "", "", "", media=response.media)
            assert_same(self._inputs[response.sample], lay_out(single, prompt, before))

    def hear(self, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> None:
        for group in groups:
            known = prepared[group.prompt.draw]
            self._inputs = {sample: inputs.laid_out() for sample, inputs in known.responses.items()}
            assert set(self._inputs) <= {s.response.sample for s in group.samples if s.response.media}
            self.compare(group, known)

    @staticmethod
    def _difference(response: Response, said: list[list[int]], answers: Sequence[Observed], unheard: bool) -> str:
        """The first difference to what an environment answered; empty if there is none."""
        if list(response.rewards) != [answer.reward for answer in answers]:
            return "other rewards"
        if not (unheard or answers[-1].done or response.finish == FinishReason.LENGTH.value):
            return "an end too early"
        if list(response.media) != [medium for answer in answers[: len(said) - 1] for medium in answer.media]:
            return "other media, or in another order"
        same = list(response.token_ids) == _conversation(said, answers, True)
        return "" if same else "other tokens of observations"


def _conversation(said: list[list[int]], answers: Sequence[Observed], features: bool) -> list[int]:
    """The tokens of turns and of the observations between them."""
    ids = list(said[0])
    for turn, answer, following in zip(said, answers, said[1:], strict=False):
        ids += [*observation_ids(answer, turn, features), *following]
    return ids


def _begins(ids: Sequence[int], stream: Stream) -> bool:
    """Says whether ids begin with what an engine got and said."""
    before = (*stream.context, *stream.ids)
    return tuple(ids[: len(before)]) == before


def observation_ids(answer: Observed, turn: Sequence[int], features: bool) -> list[int]:
    """The tokens of an observation, written here letter by letter; with `features`, placeholders are repeated."""
    token = PROCESSOR.tokenizer.get_vocab().__getitem__
    media = iter(answer.media)
    ids = [*([] if turn[-1] == END else [END]), START]
    for piece in re.findall(r"<\w+>|[\s\S]", f"seen.\n{answer.text} so"):
        if len(piece) == 1:
            ids.append(token(piece))
            continue
        (kind, grid), pad = dataclasses.astuple(PICTURES[next(media).path][0])[:2], PADS[piece[1:-1]]
        assert kind == piece[1:-1]
        count = int(np.prod(grid)) // MERGE if features else 1
        ids += [token(VISION_START), *[token(pad)] * count, token(VISION_END)]
    return [*ids, STOP, START]


def assert_same(inputs: ModelInput, expected: ModelInput) -> None:
    assert inputs.vision is not None and expected.vision is not None
    assert inputs.next_position == expected.next_position
    for name in ("token_ids_T", "positions_3T", "feature_index_T"):
        assert np.array_equal(getattr(inputs, name), getattr(expected, name)), name
    for name in ("patches_PX", "positions_P2", "frame_segments_P", "window_segments_P"):
        assert np.array_equal(getattr(inputs.vision, name), getattr(expected.vision, name)), name
