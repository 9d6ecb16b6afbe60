"""Writes responses as JSON and reads them back, for the coordinator's part of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ..base.types import Response

State = dict[str, Any]  # JSON-serialisable
SavedState = Mapping[str, Any]  # the state as read from JSON


def responses_to_json(responses: Mapping[int, Response]) -> list[State]:
    """Writes versions as runs of [version, tokens]."""
    return [
        dataclasses.asdict(response)
        | {
            "token_ids": list(response.token_ids),
            "logprobs": list(response.logprobs),
            "versions": [[version, len(list(run))] for version, run in groupby(response.versions)],
        }
        for _, response in sorted(responses.items())
    ]


def responses_from_json(values: list[State]) -> dict[int, Response]:
    responses = {}
    for value in values:
        versions = tuple(version for version, count in value["versions"] for _ in range(count))
        tokens = {"token_ids": tuple(value["token_ids"]), "logprobs": tuple(value["logprobs"]), "versions": versions}
        fields: State = value | tokens
        responses[value["sample"]] = Response(**fields).packed()
    return responses
