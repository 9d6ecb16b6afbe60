"""Display, metrics, samples, pictures and summary: what they write, and what survives a kill."""

import io
import json
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from tensorboardX.proto import event_pb2

from fluxjax.base.timeline import Span
from fluxjax.base.types import Group, Prompt, Response, Reward, Sample
from fluxjax.report import pictures
from fluxjax.report.display import Display
from fluxjax.report.metrics import MetricsLog, Summary, dump_samples, read

EVENTS: Any = event_pb2  # generated, without types


def test_a_resumed_log_has_every_step_once(tmp_path):
    log = MetricsLog(tmp_path)
    log.log("warm_start", 1, {"loss": 2.0})
    for step in (1, 2, 3):
        log.log("rl", step, {"reward/mean": step / 10})
    log.log("eval", 2, {"accuracy/a": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 4, "rew')  # the kill came here
    log = MetricsLog(tmp_path, resume_step=2)
    log.log("rl", 3, {"reward/mean": 0.9})
    log.close()
    records = read(tmp_path / "metrics.jsonl")
    assert [(r["phase"], r["step"]) for r in records] == [
        ("warm_start", 1),
        ("rl", 1),
        ("rl", 2),
        ("eval", 2),
        ("rl", 3),
    ]
    assert records[-1]["reward/mean"] == 0.9
    assert list((tmp_path / "tensorboard").iterdir())


def test_tensorboard_gets_the_same_numbers(tmp_path):
    log = MetricsLog(tmp_path, resume_step=4)
    log.log("rl", 5, {"loss": 0.5, "reward/mean": 0.25})
    log.log("eval", 5, {"accuracy/a": 0.75})
    log.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    content, events = file.read_bytes(), []
    while content:  # records: length, its checksum, data, their checksum
        length = int.from_bytes(content[:8], "little")
        events.append(EVENTS.Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    assert [e.step for e in events if e.HasField("session_log")] == [5], "later steps of a killed run are forgotten"
    values = {(e.step, value.tag): value.simple_value for e in events for value in e.summary.value}
    assert values == {(5, "loss"): 0.5, (5, "reward/mean"): 0.25, (5, "eval/accuracy/a"): 0.75}


def test_a_fresh_log_forgets_an_older_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    MetricsLog(tmp_path).close()
    assert read(tmp_path / "metrics.jsonl") == []


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with Display(2, console=console) as display:
        display.phase("RL", 2)
        display.evaluated({"digits": 0.5})
        metrics = {"reward/mean": 0.25, "accuracy/digits": 0.1, "tokens_per_second": 1234.5}
        for step in (1, 2):
            display.step(step, metrics, {"rollout": 1.0, "train": 3.0})
        display.note("done")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_display_says_what_matters(terminal):
    text = shown(terminal)
    for expected in ("RL", "2/2", "reward", "0.250", "digits 10%", "held out", "digits 50%", "1,234 tok/s", "75%"):
        assert expected in text, expected
    assert "done" in text


def test_plain_lines_have_no_control_characters():
    text = shown(False)
    assert "\x1b" not in text and "\r" not in text
    assert [line for line in text.splitlines() if line][-1] == "done"


def group(draw: int, source: str) -> Group:
    prompt = Prompt(f"p{draw}", source, "<image>?", "7", draw=draw)
    samples = [
        Sample(Response(f"r{draw}/{i}", draw, i, (1, 2), (-0.5, -0.25), (3, 3), "stop"), Reward(float(i), i == 1), 0.5)
        for i in range(2)
    ]
    return Group(prompt, tuple(samples))


def test_samples_take_turns_between_groups(tmp_path):
    dump_samples(tmp_path / "samples", 20, [group(0, "a"), group(1, "b")], lambda ids: f"{len(ids)} tokens", 3)
    records = [json.loads(line) for line in (tmp_path / "samples" / "000020.jsonl").read_text().splitlines()]
    assert [r["source"] for r in records] == ["a", "b", "a"]
    assert records[0] | {"response": "2 tokens", "reward": 0.0, "logprob": -0.75, "versions": [3]} == records[0]


def test_pictures_are_pictures(tmp_path):
    records = [{"phase": "rl", "step": s, "accuracy/digits": s / 10} for s in range(5)]
    records += [{"phase": "eval", "step": s, "accuracy/digits": s / 10} for s in (0, 4)]
    pictures.learning_curve(records, {"blind": {"digits": 0.1}, "chance": {"digits": 0.05}}, tmp_path / "a.png")
    spans = [Span("rollout", "engine 0", 0.0, 1.0, 1), Span("train", "trainer", 1.0, 2.5, 1)]
    pictures.timeline(spans, tmp_path / "b.png")
    pictures.timeline([], tmp_path / "c.png")
    for name in "abc":
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 24) or []) > 2


def test_summary_round_trip(tmp_path):
    summary = Summary(name="x", accuracy={"digits": {"start": 0.25}}, samples_skipped={"missing file": 2})
    summary.add_seconds("train", 1.5)
    summary.add_seconds("train", 1.0)
    written = json.loads(summary.write(tmp_path).read_text())
    assert written["seconds"] == {"train": 2.5} and written["samples_skipped"] == {"missing file": 2}
    assert Summary.from_state_dict(json.loads(json.dumps(summary.state_dict()))) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
