"""Runs of configurations with environments, from their warm start to their summary, on a tiny model."""

import dataclasses
import json
import pathlib
import signal
from typing import Any

import numpy as np
import pytest
from counting import LETTERS, Counting
from run_cases import (
    POLICIES,
    Diary,
    as_if_killed,
    assert_same_run,
    flags,
    logged,
    signal_when,
    summary,
    trained,
    write_jsonl,
)
from turns import by_turns

from fluxjax import evaluate
from fluxjax.base.types import ENVIRONMENT, Media, MediaKind, Prompt, Response
from fluxjax.config import Config, ConfigError, SourceConfig
from fluxjax.config.cli import load
from fluxjax.data.loader import SkippedPrompt
from fluxjax.environments.opening import Openings, spells_added
from fluxjax.report.metrics import read
from fluxjax.rewards import Scorer
from fluxjax.run import play
from fluxjax.run.callbacks import Callback
from fluxjax.run.play import observations_of
from fluxjax.run.trainer import FluxTrainer
from fluxjax.runtime.episodes import Episodes
from models.processing.tiny import build as build_processor

TROUBLE = {  # of an environment in its turn, and what the summary says of it
    "hangs": "2 s",
    "raises": "KeyError: 'nothing here'",
    "leaks": "needs more than 0.3 GiB of memory",
    "corrupt image": "a medium can't be used",
    "much text": "text has more than 10000 bytes",
    "another type": "returned str, expected an Observation",
}
TEXT, VLM = "configs/text.py:debug", "configs/vlm.py:debug"


def episodes(folder: pathlib.Path, file: str = "", environment: str = "", **arguments: Any) -> list[str]:
    """Flags of a run whose only source is `environment`, and a file with this source."""
    records = [{"id": str(n), "prompt": "go on", "answer": LETTERS} for n in range(12)]
    path = str(write_jsonl(folder / "records.jsonl", records))
    config = folder / "own.py"
    config.write_text(
        f"""import importlib.util
spec = importlib.util.spec_from_file_location("base", {file.partition(":")[0]!r})
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
from fluxjax.config import SourceConfig

def get_config(variant=''):
    config = base.get_config("debug")
    source = SourceConfig(path={path!r}, eval_path={path!r}, reward="environment")
    source.environment, source.environment_arguments = {environment!r}, {arguments!r}
    config.data.sources = {{"count": source}}
    return config
"""
    )
    return [f"--config={config}"]


def own(
    folder: pathlib.Path,
    file: str = TEXT,
    arguments: dict[str, Any] | None = None,
    environment: str = "counting:Counting",
    **settings: Any,
) -> list[str]:
    [name] = episodes(folder, file, environment, **(arguments or {}))
    more = {"rollout__max_new_tokens": 16, "rollout__max_sequence_tokens": 48, "data__environments__concurrency": 4}
    return [name, *flags(**(more | {"warm_start__steps": 30} | settings))]


def run(folder: pathlib.Path, words: list[str], *callbacks: Any) -> Any:
    [config, *settings] = words
    return trained(folder / "run", config.partition("=")[2], settings, *callbacks)


@pytest.mark.slow
def test_episodes_are_demonstrated_learned_and_measured(tmp_path: pathlib.Path) -> None:
    diary = Diary()
    result = run(tmp_path, own(tmp_path, arguments={"skill": 0.8}, steps=6, optim__lr=2e-2), diary).summary
    assert result.complete and set(result.accuracy["count"]) == {"start", "end"}
    assert result.accuracy["count"]["end"] >= result.accuracy["count"]["start"]
    assert not result.environments_failed and not result.samples_skipped and not result.chance
    for sample in diary.samples:
        response = sample.response
        assert sample.reward.value == pytest.approx(sum(response.rewards)) and 1 <= len(response.rewards) <= 3
        assert response.num_trained < response.num_tokens or len(response.rewards) == 1
    step = read(tmp_path / "run" / "metrics.jsonl")[-2]
    assert 1 <= step["response/mean_turns"] <= 3 and step["environments/started"] >= 16
    assert max(len(sample.response.rewards) for sample in diary.samples) == 3


@pytest.mark.slow
def test_a_record_that_comes_again_is_learned_from_without_being_played_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another beginning of the same record is: the first picture and the letter depend on the draw."""
    played, real = list[tuple[str, str]](), Episodes.demonstrated

    async def demonstrated(self: Episodes, prepared: Any) -> Any:
        played.append((prepared.prompt.id, prepared.prompt.shown))
        return await real(self, prepared)

    monkeypatch.setattr(Episodes, "demonstrated", demonstrated)
    losses, words = [], own(tmp_path, VLM, {"pictures": True}, steps=1, warm_start__steps=12, warm_start__batch_size=4)
    for kept in (1 << 22, 0):
        monkeypatch.setattr(play, "_KEPT", kept)
        played.clear()
        run(tmp_path / str(kept), words)
        assert len(played) == (len(set(played)) if kept else 48) and len(set(played)) < 45
        losses.append([line["loss"] for line in read(tmp_path / str(kept) / "run" / "metrics.jsonl")[:12]])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("context", by_turns(["whole", "turn", "images:1"]))
def test_pictures_of_a_reset_and_of_turns_are_trained_on(tmp_path: pathlib.Path, capsys: Any, context: str) -> None:
    """Also by a warm start and an evaluation, when what a turn sees is rewritten."""
    diary = Diary()
    settings: dict[str, Any] = {"rollout__max_new_tokens": 24, "rollout__max_sequence_tokens": 64}
    settings |= {"data__sources__count__context": context}
    run(tmp_path, own(tmp_path, VLM, {"pictures": True}, steps=2, **settings), diary)
    seen = {len(sample.response.media) for sample in diary.samples}
    prompts = [group.prompt for groups in diary.groups.values() for group in groups]
    assert max(seen) > 0 and all(len(prompt.media) == 1 and prompt.opening[1] == 1 for prompt in prompts)
    assert all(metrics["rollout_trainer_logprob_gap"] < 1e-4 for metrics in diary.metrics.values())
    files = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert evaluate.main(["--run", str(tmp_path / "run"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["accuracy"]["count"] == summary(tmp_path / "run")["accuracy"]["count"]["end"]
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.slow
def test_an_environment_that_raises_is_named_and_costs_its_prompt_alone(tmp_path: pathlib.Path) -> None:
    """A letter that the environment does not like fails the attempt of a group."""
    words = own(tmp_path, arguments={"trouble": "c", "skill": 0.5}, steps=2, rollout__temperature=2.0)
    result = run(tmp_path, words).summary
    assert result.complete
    [(name, reasons)] = result.environments_failed.items()
    assert name == "counting:Counting" and all("does not like c" in reason for reason in reasons)


@pytest.mark.slow
def test_hostile_environments_are_named_and_the_end_is_clean(tmp_path: pathlib.Path) -> None:
    words = own(tmp_path, steps=2, warm_start__steps=0, data__environments__seconds=2.0, evaluation__samples=12)
    config = load([*words, f"--config.run_dir={tmp_path / 'run'}"])
    source, environments = config.data.sources["count"], config.data.environments
    source.environment, environments.memory_gib, environments.text_bytes = "counting:Troubled", 0.3, 10_000
    records = [{"id": str(n), "prompt": how, "answer": LETTERS} for n, how in enumerate([*TROUBLE, *["go on"] * 6])]
    source.path = source.eval_path = str(write_jsonl(tmp_path / "hostile.jsonl", records))
    with FluxTrainer(config) as trainer:
        result = trainer.fit().summary
    assert result.complete and result.steps == 2 and set(result.accuracy["count"]) == {"start", "end"}
    [(name, reasons)] = result.environments_failed.items()
    assert name == "counting:Troubled"
    for text in TROUBLE.values():
        assert any(text in reason for reason in reasons), text
    assert any(reason.startswith("failed ") for reason in result.samples_skipped)


@pytest.mark.long
def test_a_run_of_episodes_that_is_killed_goes_on_with_the_same_bits(tmp_path: pathlib.Path, commands: Any) -> None:
    (alone := tmp_path / "alone").mkdir()
    (killed := tmp_path / "killed").mkdir()
    words = own(tmp_path, steps=6)
    run(alone, words)
    config, settings = words[0].partition("=")[2], words[1:]
    process = commands.start(killed / "run", config, settings)
    assert signal_when(process, logged(killed / "run", "rl", 4), signal.SIGKILL) == -signal.SIGKILL
    run(killed, words)
    assert_same_run(killed / "run", alone / "run")


@pytest.mark.long
@pytest.mark.parametrize(("policy", "file", "other"), [("april", VLM, "step"), ("adaptive_async", TEXT, "reset")])
def test_episodes_in_flight_go_on_behind_a_checkpoint(
    policy: str, file: str, other: str, tmp_path: pathlib.Path
) -> None:
    """They keep their tokens. If their environment says something else now, it is named, and they begin anew."""
    mood, folder = tmp_path / "mood", tmp_path / "complete"
    sizes: dict[str, Any] = {"rollout__max_new_tokens": 36, "rollout__max_sequence_tokens": 64, "steps": 3}
    sizes |= {"policy": policy, **POLICIES[policy], "checkpoint__every": 1, "checkpoint__keep": 9}
    arguments = {"turns": 4, "patient": True, "pictures": file is VLM, "mood": str(mood)}
    arguments["seconds"] = 0.1 * (policy == "adaptive_async")  # else all have ended when the first step is trained
    (own_dir := tmp_path / "own").mkdir()
    words = own(own_dir, file, arguments, warm_start__steps=15, evaluation__samples=2, evaluation__every=0, **sizes)
    config, settings = words[0].partition("=")[2], words[1:]
    trained(folder, config, settings)
    step, begun = max(((step, in_flight(folder, step)) for step in (1, 2)), key=lambda found: len(found[1]))
    for name in ("same", "other"):
        resumed = as_if_killed(folder, tmp_path / name, step)
        if name == "other":
            mood.write_text(other)
        else:
            (folder / "observations").rename(tmp_path / "observations")  # the run has moved
        trained(resumed, config, settings, diary := Diary())
        if name == "same":
            (tmp_path / "observations").rename(folder / "observations")
        result = summary(resumed)
        assert result["complete"] and result["steps"] == 3 and not result["samples_skipped"]
        assert all(metrics.get("rollout_trainer_logprob_gap", 0) < 1e-4 for metrics in diary.metrics.values())
        responses = {(s.response.draw, s.response.sample): s.response for s in diary.samples}
        went_on = {key for key, r in responses.items() if key in begun and begins_with(r, begun[key])}
        if name == "same":
            assert went_on == begun.keys() & responses.keys() and went_on
            assert not result["environments_failed"]
        else:
            assert not went_on
            [(named, reasons)] = result["environments_failed"].items()
            does = "answers turn 1 otherwise than before" if other == "step" else "begins otherwise than before the"
            assert named == "counting:Counting" and all("source count" in reason for reason in reasons)
            assert any(does in reason for reason in reasons), reasons


def in_flight(run_dir: pathlib.Path, step: int) -> dict[tuple[int, int], Response]:
    """The responses in a checkpoint that have heard their environment and have not ended."""
    state = json.loads((run_dir / "checkpoints" / str(step) / "state" / "metadata").read_text())
    entries = state["coordinator"]["ledger"]["entries"]
    begun = [Response.from_json(saved) for entry in entries for saved in entry["begun"] if saved["rewards"]]
    return {(response.draw, response.sample): response for response in begun}


def begins_with(response: Response, begun: Response) -> bool:
    pairs = ((getattr(response, name), getattr(begun, name)) for name in ("token_ids", "logprobs", "versions"))
    return all(whole[: len(part)] == part for whole, part in pairs) and begun.num_tokens > 0


@pytest.mark.long
def test_an_environment_that_is_killed_changes_no_bit(tmp_path: pathlib.Path) -> None:
    """Its process is killed in the second turn of a demonstration, of an episode of RL and of a held-out episode:
    another process goes on. In another episode of RL it raises, too: the attempt that is made again says the same."""
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
        arguments = {"turns": 4, "skill": 0.9, "deaths": str(tmp_path / name / "deaths")}
        words = own(tmp_path / name, arguments=arguments, environment="counting:Mortal", steps=3)
        deaths = Deaths(tmp_path / name / "deaths", "kkrk" if name == "killed" else "")
        deaths.on_step(None, 0)
        run(tmp_path / name, words, deaths)
    killed, alone = (tmp_path / name / "run" for name in ("killed", "alone"))
    written = json.loads((killed / "summary.json").read_text())
    failed = written.pop("environments_failed")
    assert failed == {"counting:Mortal": {"ended its process (signal 9)": 3, "RuntimeError: out of order": 1}}
    (killed / "summary.json").write_text(json.dumps(written | {"environments_failed": {}}))
    assert_same_run(killed, alone)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"environment": "test_episode_runs:Silent"}, "data.sources.count: environment 'test_.*' has no demonstrate"),
        (
            {"environment": "no_such:Thing"},
            "sources.count: environment is 'no_such:Thing', but importing 'no_such'",
        ),
        ({"environment_arguments": {"speed": 1}}, "data.sources.count: .*can't take the arguments {'speed': 1}"),
    ],
)
def test_what_a_user_must_mend_is_named(tmp_path: pathlib.Path, changed: Any, text: str) -> None:
    words = own(tmp_path, steps=1)
    config = load([*words, f"--config.run_dir={tmp_path / 'run'}"])
    for name, value in changed.items():
        setattr(config.data.sources["count"], name, value)
    with pytest.raises(ConfigError, match=text), FluxTrainer(config) as trainer:
        trainer.fit()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            SourceConfig(environment_arguments={"a": 1}),
            r"data.sources.s.environment_arguments are given, but .*is empty",
        ),
        (SourceConfig(reward="environment"), r"data.sources.s.reward 'environment' is given, but"),
    ],
)
def test_settings_that_only_an_environment_has_need_one(source: SourceConfig, text: str) -> None:
    config = Config()
    config.data.sources = {"s": source}
    with pytest.raises(ConfigError, match=text):
        config.validate()


# --- openings and rewards ---------------------------------------------------------------------------


def test_a_prompt_is_opened_and_its_record_remains() -> None:
    picture = Media(MediaKind.IMAGE, "a.png")
    for text, seen, both in (("ask", "seen", "ask\nseen"), ("", "seen", "seen"), ("ask", "", "ask")):
        record = Prompt("p", "s", text, "answer", (Media(MediaKind.IMAGE, "b.png"),))
        opened = record.opened(seen, (picture,))
        assert (opened.text, opened.media[1:], opened.record) == (both, (picture,), record)
    assert Prompt("p", "s", "ask", "").record == Prompt("p", "s", "ask", "")


@pytest.mark.medium
def test_prompts_whose_environment_begins_badly_are_skipped_with_a_reason(tmp_path: pathlib.Path) -> None:
    config = Config()
    config.data.sources = {
        "s": SourceConfig(environment="test_episode_runs:Beginning"),
        "plain": SourceConfig(),
    }
    noted: list[str] = []
    processor = build_processor(["hello world"], words=["hello"])
    openings = Openings(config.data, tmp_path, processor, 7, lambda name, text: noted.append(text))
    try:
        drawn = {how: openings(Prompt("p", "s", how, "", draw=3)) for how in ("fine", "raises", "done", "token")}
        reasons = {how: one.reason for how, one in drawn.items() if isinstance(one, SkippedPrompt)}
        name = "test_episode_runs:Beginning"
        assert reasons == {
            "raises": f"the environment {name} failed to begin",
            "done": f"the environment {name} is done before the first turn",
            "token": f"the environment {name} begins with a special token",
        }
        fine = drawn["fine"]
        assert isinstance(fine, Prompt) and fine.text == "fine\nhello 3" and fine.environment == name
        assert noted == ["RuntimeError: no"] or "no" in noted[0]
        untouched = Prompt("p", "plain", "x", "")
        assert openings(untouched) is untouched
        assert openings(drawn["done"]) is drawn["done"]
    finally:
        openings.close()
    assert spells_added(processor, "<|im_end|>") and not spells_added(processor, "hello")


@pytest.mark.long
@pytest.mark.usefixtures("forked_servers")
def test_a_server_that_is_killed_changes_no_token(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollout.serve` draws by seeds, so that another server says the same. Log-probs differ in their last bits, which
    depend on the requests that a server computes together. Small steps keep such differences from changing a token."""
    seen = []
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
        words = own(
            tmp_path / name,
            arguments={"turns": 4, "patient": True},
            **{"steps": 2, "warm_start__steps": 15, "optim__lr": 1e-6, "evaluation__samples": 2},
            **{"evaluation__every": 0, "rollout__engine": "serve", "servers__count": 2, "rollout__max_new_tokens": 24},
        )
        config = load([*words, f"--config.run_dir={tmp_path / name / 'run'}"])
        killed: list[str] = []
        with FluxTrainer(config) as trainer, monkeypatch.context() as patch:
            if name == "killed":
                patch.setattr(Episodes, "act", killing(trainer, killed))
            trainer.fit(callbacks=[diary := Diary()])
        result = summary(tmp_path / name / "run")
        assert result["complete"] and not result["environments_failed"] and not result["samples_skipped"]
        assert 0 < result["logprob_gap_max"] < 1e-4
        assert len(killed) == (name == "killed")
        seen.append({(s.response.draw, s.response.sample): s.response for s in diary.samples})
    alone, other = seen
    assert alone.keys() == other.keys()
    for key, response in alone.items():
        assert response.token_ids == other[key].token_ids and response.versions == other[key].versions
        np.testing.assert_allclose(response.logprobs, other[key].logprobs, rtol=0, atol=1e-5)
        assert response.rewards == other[key].rewards


def killing(trainer: FluxTrainer, killed: list[str]) -> Any:
    """`Episodes.act`, which kills a server that generates, once an episode has gone on in the second step."""
    act = Episodes.act

    async def watched(episodes: Episodes, prepared: Any, response: Response, *how: Any) -> Any:
        busy = [server for server in trainer.pool.fleet.members if server.open]  # type: ignore[attr-defined]
        if not killed and trainer.coordinator.step == 1 and response.rewards and busy:
            busy[0].process.send(signal.SIGKILL)
            killed.append(busy[0].name)
        return await act(episodes, prepared, response, *how)

    return watched


class Deaths(Callback):
    """Lets `Mortal` fail once after each step, by the kinds in their order."""

    def __init__(self, file: pathlib.Path, kinds: str) -> None:
        self.file, self.kinds = file, kinds

    def on_step(self, trainer: Any, step: int, *_: object) -> None:
        if kind := self.kinds[step : step + 1]:
            written = self.file.with_suffix(".new")
            written.write_text(kind)
            written.replace(self.file)


class Silent:
    """An environment that demonstrates nothing."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        from fluxjax.environments import Observation

        return Observation("a")

    step = reset


class Beginning(Counting):
    def reset(self, prompt: Prompt, seed: int) -> Any:
        from fluxjax.environments import Observation

        if prompt.text == "raises":
            raise RuntimeError("no")
        return Observation("<|im_end|>" if prompt.text == "token" else "hello 3", done=prompt.text == "done")


def test_rewards_see_the_last_turn_and_those_of_the_environment() -> None:
    import asyncio

    ids, versions = (1, 2, 3, 4, 5, 6), (0, 0, ENVIRONMENT, ENVIRONMENT, 1, 1)
    response = Response("1/0", 1, 0, ids, (0.0,) * 6, versions, "stop", rewards=(0.25, 0.5)).packed()
    assert response.last_turn == (5, 6) and dataclasses.replace(response, versions=(0,) * 6).last_turn == ids
    seen: list[Any] = []

    class Watching:
        def score(self, completion: Any) -> float:
            seen.append(completion)
            return 0.0

    sources = {"s": SourceConfig(reward="environment", environment="x:y"), "own": SourceConfig()}
    scorer = Scorer(sources, lambda ids: " ".join(map(str, ids)), given={"own": Watching()})
    try:
        reward = asyncio.run(scorer.score(Prompt("p", "s", "", ""), response))
        assert (reward.value, reward.correct) == (0.75, True)
        lost = dataclasses.replace(response, rewards=(-1.0, 0.5))
        assert not asyncio.run(scorer.score(Prompt("p", "s", "", ""), lost)).correct
        asyncio.run(scorer.score(Prompt("p", "own", "", ""), response))
        assert (seen[0].text, seen[0].num_tokens, seen[0].rewards) == ("5 6", 4, (0.25, 0.5))
    finally:
        scorer.close()


def test_observations_follow_turns_by_the_role_that_keeps_earlier_turns(monkeypatch: Any) -> None:
    """Plain text has no roles. A template that strips behind a user's message is asked for a tool's."""
    config = Config()
    processor = build_processor(["hello"])
    assert observations_of(config, processor).delimiters.before_ids == ()
    config.data.chat_template = True
    with pytest.raises(ConfigError, match=r"data.chat_template: .*by the role user: this checkpoint has no chat templ"):
        observations_of(config, processor)
