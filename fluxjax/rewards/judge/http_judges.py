"""Judges behind HTTP: OpenAI's chat completions, which SGLang and vLLM serve, too, and the native route of a fleet."""

from __future__ import annotations

import json
from typing import Any

import models.processing

from ...base.errors import ConfigError
from .endpoint import Endpoint
from .questions import Answer, Question

CHAT, GENERATE = "/v1/chat/completions", "/generate"


class ChatServer:
    """A server of OpenAI's `/v1/chat/completions`. `extra` has fields of the body, in JSON; null leaves one out."""

    def __init__(self, endpoint: Endpoint, model: str, extra: str = "") -> None:
        """Raises ConfigError for `extra` that is no JSON object."""
        self._endpoint, self._model, self._extra = endpoint, model, _object(extra)

    async def ask(self, question: Question) -> Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": _content(question)}],
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "seed": question.seed,
        } | self._extra
        body = {name: value for name, value in body.items() if value is not None}
        return await self._endpoint.post(body, question.deadline, _chat_answer)


class GenerateServer:
    """An engine of a fleet by its address: `/generate`, as SGLang and `rollout.serve` have it. Questions are tokenised
    here, by the checkpoint that the server has, with its chat template."""

    def __init__(self, endpoint: Endpoint, processor: models.processing.Processor) -> None:
        self._endpoint, self._processor = endpoint, processor

    async def ask(self, question: Question) -> Answer:
        sampling = {
            "max_new_tokens": question.max_tokens,
            "temperature": question.temperature,
            "sampling_seed": question.seed,
            "stop_token_ids": list(self._processor.eos_ids),
        }
        body = {"input_ids": question_ids(self._processor, question), "sampling_params": sampling}
        return await self._endpoint.post(body, question.deadline, self._answer)

    def _answer(self, reply: Any) -> Answer:
        finish = reply["meta_info"]["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise ValueError(f"it ended by {finish}")
        return Answer(self._processor.decode([int(id) for id in reply["output_ids"]]), finish == "stop")


def load_processor(folder: str) -> models.processing.Processor:
    """Returns the processor of a checkpoint folder. Raises ConfigError."""
    if not folder:
        raise ConfigError("judge.tokenizer must be the folder of the judge's checkpoint where judge.api is 'generate'")
    try:
        return models.processing.Processor.load(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"judge.tokenizer: {error}") from error


def question_ids(processor: models.processing.Processor, question: Question) -> list[int]:
    """Returns the tokens of a question in the checkpoint's chat template. No special token of the vocabulary can be
    written in the question: a response could end its turn with it. Raises PromptError."""
    text = question.text
    for token in processor.tokenizer.get_added_tokens_decoder().values():
        if token.special:
            text = text.replace(token.content, f"{token.content[0]} {token.content[1:]}")
    return list(processor.tokenise_chat(text))


def _content(question: Question) -> str | list[dict[str, Any]]:
    if not question.images:
        return question.text
    images = [{"type": "image_url", "image_url": {"url": image}} for image in question.images]
    return [*images, {"type": "text", "text": question.text}]


def _chat_answer(reply: Any) -> Answer:
    choice = reply["choices"][0]
    content = choice["message"].get("content")
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    return Answer(content or "", choice.get("finish_reason") != "length")  # no content: it refused, or only thought


def _object(extra: str) -> dict[str, Any]:
    try:
        found = json.loads(extra or "{}")
    except ValueError as error:
        raise ConfigError(f"judge.extra is {extra!r}, which is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"judge.extra is {extra!r}; it must be a JSON object, of fields of the request")
    return found
