"""A language model's verdict as a reward."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import statistics
import time

from ...base.errors import ConfigError
from ...base.scored import Completion, Reward
from ...config.bounds import bounded, not_negative, positive, within
from ..named import BuiltIn, Failing, RewardFailure
from .http_judges import ChatForm, GenerateForm, JudgeServer, checked_url, image_url, load_processor, token_of
from .questions import JudgeModel, Question, Rubric, VerdictReader

log = logging.getLogger("fluxjax.rewards")

_SECONDS = 60.0  # the most seconds of a call, until `call_within` sets another bound
_AGAIN = 0.7  # the least temperature of a repeated question, because a greedy answer would be the same
_LOGGED = 3  # the most answers without a verdict that are logged
_SHOWN = 300  # characters at the end of a logged answer


@dataclasses.dataclass(eq=False)
class Judge(BuiltIn):
    """Gives a model's verdict on the response, scaled from the rubric's scale to [0, 1]. `server` is the address of a
    server, or an object of the protocol `JudgeModel`. After an answer without a verdict, the question is asked again
    with another seed. The value is the mean of the `votes` that have a verdict. The reward fails if all votes fail."""

    name = kind = "judge"
    counted = "answers", "answer_seconds", "unparsed", "retries"
    server: str | JudgeModel = dataclasses.field(default="", metadata={"object": True})
    # chat: OpenAI's /v1/chat/completions; generate: the native route of SGLang and rollout.serve, for text only
    api: str = bounded("chat", lambda api: api in ("chat", "generate"), "be 'chat' or 'generate'")
    model: str = "default"  # the model's name on the server (chat)
    tokenizer: str = ""  # the folder of the model's checkpoint (generate)
    token_env: str = ""  # the environment variable that has the server's token
    plain_http: bool = False  # the token may be sent over http to another machine
    extra: str = ""  # JSON object with further fields of a request; null leaves a field out (chat)
    rubric: str = "correct"  # correct, quality, or a file
    scale: str = ""  # scale of the verdict, such as '1 to 10'; empty: the rubric's scale
    json: bool = False  # the verdict is a JSON object, not a line
    pattern: str = ""  # a regular expression whose first group is the verdict, if the rubric asks for another form
    temperature: float = not_negative(0.0)
    max_tokens: int = positive(1024)  # tokens of an answer, thoughts included
    votes: int = positive(1)  # verdicts on a response, requested at once
    retries: int = not_negative(2)  # the most repetitions of a question for lack of a verdict
    correct_from: float = within(1.0, "[0, 1]")  # the least value of a correct response
    request_seconds: float = positive(30.0)  # the most seconds of one request
    most_characters: int = positive(32_000)  # the most characters of a response, from its end, that the judge sees
    images: bool = False  # the prompt's images are shown, too (chat)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.votes > 1 and not self.temperature:
            raise ConfigError(f"judge.votes is {self.votes}, but with judge.temperature=0 all votes are the same")
        if self.images and self.api != "chat":
            raise ConfigError("judge.images needs judge.api='chat': the native route gets text only")
        self._reader = VerdictReader(self.json, self.pattern)
        self._rubric = Rubric.load(self.rubric, self.scale, tells_form=not self.pattern)
        model: object = self.server
        if isinstance(self.server, str):
            token, chat = token_of(self.token_env), self.api == "chat"
            form = ChatForm(self.model, self.extra) if chat else GenerateForm(load_processor(self.tokenizer))
            url = checked_url(self.server, form.route, token, self.plain_http)
            model = JudgeServer(url, token, form, self.request_seconds, self._counts)
        if not isinstance(model, JudgeModel):
            raise ConfigError(f"judge.server is {self.server!r}; it must be an address or an object with ask(question)")
        self._model = model
        self.call_within(_SECONDS)
        self._logged = 0

    def call_within(self, seconds: float) -> None:
        """Bounds a call of `score`. The judge gives up a little before, as its reason says more than a time-out."""
        self._seconds = seconds - min(1.0, 0.2 * seconds)

    async def score(self, completion: Completion) -> Reward:
        """Returns the reward. Raises the first vote's error, such as a RewardFailure, if no vote has a verdict."""
        deadline = time.monotonic() + self._seconds
        prompt, text = completion.prompt, completion.text
        if (cut := len(text) - self.most_characters) > 0:
            text = f"[{cut} characters are left out here]\n{text[cut:]}"
        question, nonce = self._rubric.filled(prompt, text, self._reader.form)
        images = tuple([await asyncio.to_thread(image_url, medium) for medium in prompt.media if self.images])
        votes = [self._vote(question, nonce, images, vote, deadline) for vote in range(self.votes)]
        found = await asyncio.gather(*votes, return_exceptions=True)
        shares = [share for share in found if isinstance(share, float)]
        failures = [error for error in found if isinstance(error, BaseException)]
        if not shares:
            raise failures[0]
        value = statistics.fmean(shares)
        reason = f"{len(failures)} of {self.votes} votes failed: {failures[0]}" if failures else ""
        return Reward(value, value >= self.correct_from, reason)

    async def _vote(self, text: str, nonce: str, images: tuple[str, ...], vote: int, deadline: float) -> float:
        why = ""
        for attempt in range(self.retries + 1):
            temperature = max(self.temperature, _AGAIN) if attempt else self.temperature
            # The seed depends on nothing else, so that a resumed run gets the same answers from a deterministic judge.
            seed = int.from_bytes(hashlib.sha256(f"{vote}/{attempt}/{text}".encode()).digest()[:4]) >> 1
            question = Question(text, images, seed, temperature, self.max_tokens, deadline)
            begin = time.monotonic()
            answer = await self._model.ask(question)
            self._counts["answers"] += 1
            self._counts["answer_seconds"] += time.monotonic() - begin
            number = await self._reader.read(answer.text, nonce) if answer.whole else None
            share = None if number is None else self._rubric.share(number)
            if share is not None:
                return share
            why = "a verdict outside of the scale" if number is not None else "no verdict"
            why = why if answer.whole else f"an answer cut off at judge.max_tokens = {self.max_tokens}"
            self._note(why, answer.text)
        raise RewardFailure(
            Failing.INVALID,
            f"the judge was asked {self.retries + 1} times without a valid verdict; its last reply was {why}",
        )

    def _note(self, why: str, text: str) -> None:
        self._counts["unparsed"] += 1
        self._logged += 1
        if self._logged <= _LOGGED:
            more = "; further ones are not logged" if self._logged == _LOGGED else ""
            log.warning("the judge gave %s: ...%r%s", why, text[-_SHOWN:], more)

    def close(self) -> None:
        self._reader.close()
