"""Requests for the turns of responses, and the inputs of responses that have observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from models.inputs import ModelInput, joined, media_numbers, picked, text_input
from rollout.engine import GenerateRequest, SamplingParams, TokenChunk

from ..base.medium import WHOLE
from ..base.scored import views_of
from ..base.types import ENVIRONMENT, Group, PreparedPrompt, Prompt, Response
from ..coordinator.messages import ABORTED, STOPPED, Request, Turn, request_id


def at_temperature(sampling: SamplingParams, temperature: float | None) -> SamplingParams:
    """Returns the sampling with this temperature, if there is one."""
    return sampling if temperature is None else dataclasses.replace(sampling, temperature=temperature)


def session_of(prompt: Prompt) -> str:
    """Returns the name of a group's conversations (`GenerateRequest.session`); empty without an environment."""
    return f"draw {prompt.draw}" if prompt.environment else ""


def turns_prefix(rid: str) -> str:
    """Returns what the ids of the turns of a request (`rid`) or a response (`rid/i`) begin with."""
    request, _, sample = rid.partition("/")
    return f"{request}.{int(sample):05d}." if sample else f"{request}."


def turn_request(
    turn: Turn, prepared: PreparedPrompt, sampling: SamplingParams, seed: int, merge_unit: int
) -> GenerateRequest:
    """Returns the request of a turn. Its prompt is the conversation so far, as far as `Prompt.context` shows it. The
    engine may still have keys and values of the first part. `seed` is that of the prompt's other requests."""
    response, tokens = turn.response, turn.response.num_tokens
    sampling = at_temperature(sampling, response.temperature)
    parts = [prepared.inputs.laid_out()]
    if tokens:
        parts.append(inputs_of(prepared, response, merge_unit))
        if (context := turn.prompt.context) != WHOLE:
            kept, _ = views_of(np.array(response.versions), media_numbers(parts[1]), context)[-1]
            parts[1] = picked(parts[1], kept, parts[0].next_position, merge_unit)
    return GenerateRequest(
        rid=f"{turns_prefix(response.rid)}{tokens:08d}",  # ids of all turns have the same length
        prompt=joined(parts, merge_unit),
        sampling=dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - tokens),
        # Another seed for each turn, because the random numbers of a request begin with its first new token.
        seed=(seed + tokens * 0x85EBCA6B) % 2**31,
        samples=(response.sample,),
        session=session_of(turn.prompt),
    )


def turns_of_request(request: Request) -> Iterator[Turn]:
    """Yields the turns with which the responses of a request go on that was begun before. A prefix of token ids would
    not have the media of observations."""
    for sample in request.to_come():
        yield Turn(request.prompt, begun_of(request, sample), request.engine)


def begun_of(request: Request, sample: int) -> Response:
    """Returns what a response of a request begins with."""
    rid, before = f"{request.rid}/{sample}", request.begun[sample] if request.begun else None
    if before is None:
        return Response(rid, request.prompt.draw, sample, (), (), (), ABORTED, request.temperature)
    return dataclasses.replace(before, rid=rid, temperature=request.temperature)


def only_begun(prepared: PreparedPrompt, request: Request) -> PreparedPrompt:
    """Returns the prompt without the inputs of responses that the request begins anew."""
    if not prepared.responses:
        return prepared
    begun = {sample for sample, before in enumerate(request.begun) if before is not None}
    responses = {sample: inputs for sample, inputs in prepared.responses.items() if sample in begun}
    return dataclasses.replace(prepared, responses=responses)


def ended_before(response: Response, stop_ids: Sequence[int]) -> Response | None:
    """Returns the response as the end of a turn, if it ends with one; else None."""
    if response.num_tokens and response.versions[-1] != ENVIRONMENT and response.token_ids[-1] in stop_ids:
        return dataclasses.replace(response, finish=STOPPED)
    return None


def longer(response: Response, chunks: Sequence[TokenChunk]) -> Response:
    """Returns the response with the tokens of its turn. `Response.packed` is called here, while other responses are
    generated."""
    finish = chunks[-1].finish
    assert finish is not None
    return dataclasses.replace(
        response,
        token_ids=(*response.token_ids, *(token for chunk in chunks for token in chunk.token_ids)),
        logprobs=(*response.logprobs, *(logprob for chunk in chunks for logprob in chunk.logprobs)),
        versions=(*response.versions, *(version for chunk in chunks for version in chunk.versions)),
        finish=finish.value,
    ).packed()


def inputs_of(prepared: PreparedPrompt, response: Response, merge_unit: int) -> ModelInput:
    """Returns the inputs of a response. `PreparedPrompt.responses` has them up to the newest observation. Raises
    ValueError for observations with media whose inputs are not there."""
    before = prepared.responses.get(response.sample)
    known = 0 if before is None else len(before)
    if response.media and ENVIRONMENT in response.versions[known:]:
        raise ValueError(f"the inputs of the observations in response {response.rid} are missing")
    parts = [] if before is None else [before.laid_out()]
    start = parts[-1].next_position if parts else prepared.inputs.laid_out().next_position
    rest = response.token_ids[len(parts[0]) if parts else 0 :]
    return joined([*parts, text_input(rest, start)], merge_unit)


class Observations:
    """Inputs of responses behind their newest observation, from the environment's answer to the next turn. A response
    that was parked meanwhile goes on without this answer, and gets it again."""

    def __init__(self) -> None:
        self._inputs: dict[str, ModelInput] = {}  # by rid

    def keep(self, rid: str, inputs: ModelInput) -> None:
        self._inputs[rid] = inputs

    def taken(self, turn: Turn, prepared: PreparedPrompt) -> PreparedPrompt:
        """Returns the prompt with the inputs of the response whose next turn begins."""
        inputs = self._inputs.pop(turn.response.rid)
        return dataclasses.replace(prepared, responses={**prepared.responses, turn.response.sample: inputs})

    def forget(self, draw: int) -> None:
        """Forgets the inputs of a prompt's responses."""
        begin = request_id(draw, 0).partition(".")[0] + "."
        self._inputs = {rid: inputs for rid, inputs in self._inputs.items() if not rid.startswith(begin)}


def to_train(prepared: PreparedPrompt, group: Group, merge_unit: int) -> PreparedPrompt:
    """Returns the prompt with the inputs of the group's responses that have observations with media."""
    shown = [sample.response for sample in group.samples if sample.response.media]
    if not shown and not prepared.responses:
        return prepared
    responses = {response.sample: inputs_of(prepared, response, merge_unit) for response in shown}
    return dataclasses.replace(prepared, responses=responses)
