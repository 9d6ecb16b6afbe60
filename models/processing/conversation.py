"""Turns the observations of an environment into token ids that go on behind the model's turns.

The ids that a model sampled are never tokenised again. An observation is tokenised alone, between delimiters that come
from the chat template. `ObservationProcessor.of` compares conversations that are put together in this way with the
template's rendering of the same conversations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from ..config import JsonObject
from .media_file import PromptError, Source
from .processor import MARK, MARKS, PADS, VISION_END, VISION_START, Processor

ONE_TURN = "context='turn', in which a turn sees no earlier turn"
# Texts that stand for a question, an answer and an observation while delimiters are looked for.
_QUESTION, _ANSWER, _OBSERVATION = "the-first-question", "an-answer-of-the-model", "an-observation-behind-it"
_SPACED = f" \n{_OBSERVATION}\n "
_TURN = "The answer."
_THOUGHT = "The reasoning.\n</think>\n\nThe answer."  # a turn whose generation prompt has opened the reasoning
_TEXTS = ("The observation.", "", "\n two lines,\n  spaced \n", "Ünïcode: 漢字 🙂", '"quoted" & <b>marked</b> \\n')
_SHOWN = 12  # tokens of a difference that a message shows


@dataclasses.dataclass(frozen=True)
class TurnDelimiters:
    """The tokens between a turn of the model, an observation, and the next turn, as a chat template writes them:
    `before_ids`, the tokens of `before_text + observation + after_text`, and `after_ids`. `before_ids` end with an
    added token of the tokenizer, and `after_ids` begin with one, so that the texts between can be tokenised alone. The
    defaults put an observation between turns as plain text."""

    before_ids: tuple[int, ...] = ()  # the end of the turn, with its stop token, and the beginning of the observation
    before_text: str = ""
    after_text: str = ""
    after_ids: tuple[int, ...] = ()  # the end of the observation, and the generation prompt
    strips: bool = False  # the template strips the observation

    @classmethod
    def of(cls, processor: Processor, role: str = "user") -> TurnDelimiters:
        """The delimiters of observations by `role` in the processor's chat template. Raises PromptError if the template
        is missing, or refuses or ignores messages of the role."""
        if not processor.chat_template:
            raise PromptError("this checkpoint has no chat template, which delimits turns", "no chat template")
        before, after = _around(processor, role, _OBSERVATION)
        spaced_before, spaced_after = _around(processor, role, _SPACED, _OBSERVATION)
        added = [token.content for token in processor.tokenizer.get_added_tokens_decoder().values()]
        end = max((before.rfind(token) + len(token) for token in added if token in before), default=0)
        start = min((after.find(token) for token in added if token in after), default=len(after))
        return cls(
            tuple(processor.encode(before[:end])),
            before[end:],
            after[:start],
            tuple(processor.encode(after[start:])),
            strips=(spaced_before, spaced_after) == (before, after),
        )

    def ended(self, turn_ids: Sequence[int]) -> bool:
        """Says whether a turn ends with the template's token, not at its length or with another stop token."""
        return len(turn_ids) > 0 and self.before_ids[:1] == (turn_ids[-1],)


def _around(processor: Processor, role: str, observation: str, shown: str = "") -> tuple[str, str]:
    """The rendered text between a turn and an observation behind the turn, and the text from there to the next turn.
    The template shows the observation as `shown`, if given. Raises PromptError."""
    turns = [{"role": "assistant", "content": _ANSWER}, {"role": role, "content": observation}]
    rendered = processor.render_messages([{"role": "user", "content": _QUESTION}, *turns])
    pieces = re.split(f"{_ANSWER}|{shown or observation}", rendered)
    if len(pieces) != 3:
        message = f"the chat template does not show an answer and an observation by the role {role!r} once each"
        raise PromptError(message, "the chat template does not show observations")
    return pieces[1], pieces[2]


@dataclasses.dataclass(frozen=True)
class ObservationProcessor:
    """Turns observations into token ids. `instability` is "" if the template's rendering of a conversation begins
    with that of each shorter conversation. Otherwise it names the first difference: conversations that are put together
    are not those that the template writes. `one_turn` says whether the template writes the question and the newest
    observation as they are put together here: a context without earlier turns then suits the template."""

    processor: Processor
    delimiters: TurnDelimiters = dataclasses.field(default_factory=TurnDelimiters)
    instability: str = ""
    one_turn: bool = True

    @classmethod
    def of(cls, processor: Processor, role: str = "user") -> ObservationProcessor:
        """Derives the delimiters of observations by `role`, such as `user` or `tool`, and compares conversations with
        the template's rendering. Raises PromptError, as `TurnDelimiters.of` does."""
        bare = cls(processor, TurnDelimiters.of(processor, role))
        difference, one_turn = bare._first_difference(role)
        suits = f". The view that suits it: {ONE_TURN}" * (one_turn and difference != "")
        return dataclasses.replace(bare, instability=difference + suits, one_turn=one_turn)

    @property
    def prefix_stable(self) -> bool:
        return not self.instability

    def tokenise(
        self, text: str, media: Sequence[tuple[str, Source]] = (), *, turn_ids: Sequence[int] = ()
    ) -> list[int]:
        """The ids that follow the turn `turn_ids`: an observation between its delimiters, with one placeholder for each
        of `media`. If the turn does not end with the token by which the template ends turns, the ids begin with this
        token. Added tokens of the tokenizer that the text spells, such as `<|im_end|>`, stay text. Raises PromptError
        if marks and media differ, or if the vocabulary can't write the text."""
        self.processor.content(text, media)  # raises PromptError
        between = self.delimiters
        entire = between.before_text + (text.strip() if between.strips else text) + between.after_text
        ids = list(between.before_ids[between.ended(turn_ids) :])
        for part in re.split(f"({MARK.pattern})", entire) if media else [entire]:
            if media and part in MARKS:
                ids += self.processor.encode(f"{VISION_START}{PADS[MARKS[part]]}{VISION_END}")
            else:
                ids += encode_as_text(self.processor, part)
        return [*ids, *between.after_ids]

    def _first_difference(self, role: str) -> tuple[str, bool]:
        """Compares conversations that are put together with those that the template renders. Returns "" or a sentence
        about the first difference, and `one_turn`. Characters that the vocabulary lacks are left out."""
        difference, one_turn = "", True
        processor = self.processor
        write = functools.partial(_writable, processor)
        opened = processor.decode(self.delimiters.after_ids, skip_special_tokens=False).rstrip().endswith("<think>")
        kinds = [("image", ""), ("video", "")] if processor.vision else []
        observations = [(write(text), kinds[:0]) for text in _TEXTS]
        observations += [(f"{write('See ')}<image>{write(' and ')}<video>", kinds)] if kinds else []
        for turn in map(write, [_THOUGHT] if opened else [_TURN, f"<think>\n{_THOUGHT}"]):
            messages: list[JsonObject] = [{"role": "user", "content": write(_QUESTION)}]
            ids = processor.tokenise_messages(messages)
            question = len(ids) - len(self.delimiters.after_ids)
            turn_ids = [*processor.encode(turn), *self.delimiters.before_ids[:1]]
            for text, media in observations:
                messages.append({"role": "assistant", "content": turn})
                messages.append({"role": role, "content": processor.content(text, media)})
                newest = self.tokenise(text, media, turn_ids=turn_ids)
                ids += [*turn_ids, *newest]
                try:
                    rendered = processor.tokenise_messages(messages)
                except PromptError as error:
                    return f"behind the observation {text!r} by the role {role!r}: {error}", False
                for part in (slice(question), slice(-len(newest) - 1, None)):
                    one_turn &= rendered[part] == ids[part]
                if ids != rendered and not difference:
                    difference = self._describe(turn, text, ids, rendered)
        return difference, one_turn

    def _describe(self, turn: str, text: str, ids: Sequence[int], rendered: Sequence[int]) -> str:
        differing = (n for n, pair in enumerate(zip(ids, rendered, strict=False)) if pair[0] != pair[1])
        first = next(differing, min(len(ids), len(rendered)))
        decode = functools.partial(self.processor.decode, skip_special_tokens=False)
        ours, theirs = (decode(found[first : first + _SHOWN]) for found in (ids, rendered))
        thought = _writable(self.processor, _THOUGHT.partition("\n")[0])
        strips = thought in turn and decode(rendered).count(thought) < decode(ids).count(thought)
        cause = "strips earlier thinking" if strips else "writes this conversation in another way"
        return (
            f"the chat template {cause}: a conversation goes on with {ours!r}, but the template, given the turn "
            f"{turn!r} and the observation {text!r}, writes {theirs!r} there"
        )


def encode_as_text(processor: Processor, text: str) -> list[int]:
    """The ids of a text whose spelled added tokens, such as `<|im_end|>` or `</tool_response>`, stay text. Raises
    PromptError, as `Processor.encode` does."""
    ids = processor.encode(text)
    if processor.tokenizer.get_added_tokens_decoder().keys().isdisjoint(ids):
        return ids
    return dataclasses.replace(processor, tokenizer=_without_added_tokens(processor.tokenizer)).encode(text)


@functools.lru_cache(maxsize=4)
def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that has the same vocabulary, and no added tokens. Needs half a second for Qwen's tokenizers."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}))


def _writable(processor: Processor, text: str) -> str:
    """The text without the characters that the vocabulary can't write."""
    try:
        processor.encode(text)
        return text
    except PromptError:
        return "".join(character for character in text if len(text) > 1 and _writable(processor, character))
