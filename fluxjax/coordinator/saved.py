"""Responses and rewards as JSON values: what the books remember of a prompt that is neither trained nor skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ..base.types import Response, Reward


def responses_to_json(responses: Mapping[int, Response]) -> list[dict[str, Any]]:
    """Versions as runs of [version, tokens]."""
    return [
        dataclasses.asdict(response)
        | {
            "token_ids": list(response.token_ids),
            "logprobs": list(response.logprobs),
            "versions": [[version, len(list(run))] for version, run in groupby(response.versions)],
        }
        for _, response in sorted(responses.items())
    ]


def responses_from_json(values: list[dict[str, Any]]) -> dict[int, Response]:
    responses = {}
    for value in values:
        versions = tuple(version for version, count in value["versions"] for _ in range(count))
        tokens = {"token_ids": tuple(value["token_ids"]), "logprobs": tuple(value["logprobs"]), "versions": versions}
        plain: dict[str, Any] = value | tokens
        responses[value["sample"]] = Response(**plain)
    return responses


def rewards_to_json(rewards: Mapping[int, Reward]) -> dict[str, Any]:
    return {str(sample): dataclasses.asdict(reward) for sample, reward in sorted(rewards.items())}


def rewards_from_json(values: Mapping[str, Any]) -> dict[int, Reward]:
    return {int(sample): Reward(**value) for sample, value in values.items()}
