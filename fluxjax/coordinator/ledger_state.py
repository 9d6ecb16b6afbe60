"""The state of a ledger as JSON, for checkpoints."""

import collections
import dataclasses
from collections.abc import Mapping

from ..base.types import Prompt, Response, Reward, SavedState, State
from .ledger import Entry, Ledger, PromptStage, Skipped

NOTHING_DROPPED = {"groups": [], "in_a_row": 0}  # the value of "dropped" in the state of a new ledger
# numbers of the ledger that are saved unchanged
_COUNTS = ("last_draw", "drawn", "trained", "trained_responses", "accepted")
_OF_PROMPT = ("draw", "id", "source", "row", "epoch")
_OF_ENTRY = ("n", "need", "attempt", "failures", "failure", "born")


def ledger_state(ledger: Ledger) -> State:
    """Returns the books as JSON. A prompt that lacks responses is saved as deferred, with the responses that have
    arrived, and with the turns before the present turn of others. A group that is trained on is saved as scored: the
    resumed run computes its gradients again."""
    dropped = [[source, value, count] for (source, value), count in ledger.dropped.items()]
    return {name: getattr(ledger, name) for name in _COUNTS} | {
        "dropped": {"groups": dropped, "in_a_row": ledger.dropped_in_a_row},
        "skipped": [dataclasses.asdict(s) for s in ledger.skipped],
        "epochs": {str(epoch): count for epoch, count in ledger.epochs.items()},
        "ignored": dict(ledger.ignored),
        "entries": [_entry_to_json(ledger.entries[draw]) for draw in sorted(ledger.entries)],
    }


def load_ledger_state(ledger: Ledger, state: SavedState, prompts: Mapping[int, Prompt]) -> None:
    """Restores the books. `prompts` has the prompts of the state's `entries`, by draw. An entry whose draw is not in
    `prompts` is skipped: its prompt could not be prepared again."""
    for name in _COUNTS:
        setattr(ledger, name, state[name])
    dropped = state["dropped"]
    ledger.dropped = collections.Counter({(source, value): count for source, value, count in dropped["groups"]})
    ledger.dropped_in_a_row = dropped["in_a_row"]
    ledger.skipped = [Skipped(**s) for s in state["skipped"]]
    ledger.epochs = {int(epoch): count for epoch, count in state["epochs"].items()}
    ledger.ignored = collections.Counter(state["ignored"])
    for saved in state.get("entries", []):
        if saved["draw"] in prompts:
            ledger.restore(_entry_from_json(saved, prompts[saved["draw"]]))
        else:
            reason = "could not be prepared again when the run was resumed"
            ledger.skipped.append(Skipped(saved["draw"], saved["id"], saved["source"], reason))


def _entry_to_json(entry: Entry) -> State:
    stage = PromptStage.SCORED if entry.stage is PromptStage.TRAINING else entry.stage
    finished = stage in (PromptStage.COMPLETE, PromptStage.SCORED)
    return {
        **{name: getattr(entry.prompt, name) for name in _OF_PROMPT},
        **{name: getattr(entry, name) for name in _OF_ENTRY},
        "stage": (stage if finished else PromptStage.DEFERRED).value,
        "responses": [entry.responses[sample].to_json() for sample in sorted(entry.responses)],
        "rewards": {str(sample): dataclasses.asdict(reward) for sample, reward in sorted(entry.rewards.items())},
        "begun": [] if finished else [response.to_json() for response in entry.saved().values()],
        "shown": entry.prompt.shown,
    }


def _entry_from_json(saved: SavedState, prompt: Prompt) -> Entry:
    if saved.get("shown", "" if prompt.environment else prompt.shown) != prompt.shown:  # another prompt
        return Entry(prompt, PromptStage.DEFERRED, **{name: saved[name] for name in _OF_ENTRY})
    return Entry(
        prompt,
        PromptStage(saved["stage"]),
        **{name: saved[name] for name in _OF_ENTRY},
        responses={response["sample"]: Response.from_json(response) for response in saved["responses"]},
        rewards={int(sample): Reward(**reward) for sample, reward in saved["rewards"].items()},
        begun={response["sample"]: Response.from_json(response) for response in saved["begun"]},
    )
