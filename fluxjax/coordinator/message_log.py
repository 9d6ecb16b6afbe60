"""The last messages that the coordinator heard and said, for people who look for what went wrong.

Not part of a checkpoint. Lines are written when they are read: to keep a message costs about a microsecond. A step of
8,192 responses has some 25,000 messages, so in runs of that size the log reaches back less than a step.
"""

import collections
from collections.abc import Sequence

from . import messages
from .messages import Message

KEPT = 20_000  # messages, of some hundred bytes each
_SHOWN = 4  # ids of a message that concerns many prompts


class MessageLog:
    """`Coordinator.story` and `CoordinatorError` read it."""

    def __init__(self) -> None:
        # Step under way, seconds, type of the message, what it concerns, and its %-format with the values.
        self._kept: collections.deque[tuple[int, float, type[Message], Sequence[str | int], str, object]]
        self._kept = collections.deque(maxlen=KEPT)

    def add(self, step: int, now: float, message: Message) -> None:
        """Ticks are left out: every line has its time."""
        kind = type(message)
        if kind is not messages.Tick:
            self._kept.append((step, now, kind, *_told(message)))

    def last(self, count: int) -> list[str]:
        """The lines of the last messages, oldest first."""
        return [_line(*kept) for kept in list(self._kept)[-count:]]

    def story(self, draw: int) -> list[str]:
        """The lines that concern one prompt, oldest first."""
        prefix = messages.request_id(draw, 0).partition(".")[0] + "."
        lines = []
        for step, now, kind, ids, form, values in list(self._kept):  # another thread may add some meanwhile
            if hit := [i for i in ids if i == draw or (isinstance(i, str) and i.startswith(prefix))]:
                lines.append(_line(step, now, kind, hit, form, values))
        return lines


def _told(message: Message) -> tuple[Sequence[str | int], str, object]:
    """Returns what the log keeps of a message: the prompts that it concerns (draws, or ids of requests or responses),
    and a %-format with its values. No tokens and no prompts: they would live as long as the log does."""
    match message:
        case messages.ResponseFinished(response):
            return (response.rid,), "%d tokens, %s", (len(response.token_ids), response.finish)
        case messages.RewardReady(rid, reward):
            return (rid,), "%g", reward.value
        case messages.Score(response):
            return (response.rid,), "", ()
        case messages.Generate(requests):
            return [r.rid for r in requests], "on engines %s", sorted({r.engine for r in requests})
        case messages.Abort(rid):
            return (rid,), "", ()
        case messages.Park():
            return (message.request,), "keep=%s", message.keep
        case messages.Skip(prompt, reason):
            return (prompt.draw,), "%s", reason
        case messages.EngineFailed(request_ids, reason):
            return request_ids, "%s", reason
        case messages.PromptsDrawn(prompts, skipped):
            draws = [prompt.draw for prompt in (*prompts, *(prompt for prompt, _ in skipped))]
            return draws, "%d of them skipped", len(skipped)
        case messages.Accumulate(step, groups, engines):
            return [group.prompt.draw for group in groups], "for step %d, on engines %s", (step, engines)
        case messages.Train(step, groups):
            return [group.prompt.draw for group in groups], "step %d", step
        case messages.Trained(version):
            return (), "version %d", version
        case _:
            return (), "%s", vars(message)


def _line(step: int, now: float, kind: type[Message], ids: Sequence[str | int], form: str, values: object) -> str:
    begin = f"step {step}" + (f", {now:.1f} s" if now else "")
    says = "says" if issubclass(kind, messages.Instruction) else "hears"
    shown = ", ".join(map(str, ids[:_SHOWN])) + (f", ... ({len(ids)})" if len(ids) > _SHOWN else "")
    return " ".join(part for part in (begin, says, kind.__name__, shown, form % values) if part)
