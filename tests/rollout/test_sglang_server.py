"""What SGLang does behind the protocol: streams, pauses, weights that did not arrive, images of its own, its death.

Every test needs `bash scripts/test_sglang.sh`, which runs this file.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rollout_cases
from architecture_cases import up
from doctor_cases import changed
from fleet_cases import run
from protocol_cases import (
    LONGEST,
    ROOT,
    Subject,
    checkpoint,
    client_at,
    command,
    model,
    picture,
    processor,
    prompts,
    sglang_python,
    subject,
)
from rollout_cases import Answer, collect, full_logprobs, request
from session_cases import Episode, text

import models
from fluxjax import doctor
from models.registry import write_config
from rollout import wire
from rollout.engine import FinishReason, WeightsMismatch
from rollout.local_server import LocalServer
from rollout.requests import checked
from rollout.sglang import Refused, SampleReply, ServerClient, ServerError
from rollout.weights.published import Checksums

# Tests that share one server run in every turn; those that start servers of their own say in which.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.turn(0, 1, 2)]
GAP = 1e-4  # absolute, float32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject("sglang", "vl", tmp_path_factory.mktemp("sglang")) as made:

        async def started() -> None:
            await made.serve()
            await collect(made.engine.generate(request("first", prompts("vl")["text"], max_new_tokens=1)), 1)

        run(started())
        yield made


@pytest.fixture(autouse=True)
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_cases, "LONGEST", LONGEST)


def plain(rid: str, ids: list[int], **how: Any) -> dict[str, Any]:
    """A body without anything of ours."""
    sampling = {"temperature": 0, "ignore_eos": True, **how}
    return {"rid": rid, "input_ids": ids, "return_logprob": True, "sampling_params": sampling}


async def ask(client: ServerClient, body: dict[str, Any]) -> Any:
    return await client._order("/generate", body, seconds=60.0)


async def test_streaming_equals_not_streaming(server: Subject) -> None:
    async with client_at(server.address) as client:
        await server.serve()
        for name, prompt in prompts("vl").items():
            asked = checked(request(name, prompt, max_new_tokens=12, temperature=0.0), server.fleet.limits)  # type: ignore[union-attr]
            body = wire.request_body(asked, {0: f"stream-{name}"}, model("vl").config, interval=3)
            reply = SampleReply(f"stream-{name}")
            version = server.engine.stats().version
            ended = [r async for r in client.generate(dict(body), [reply], model("vl").config.text.vocab_size, version)]
            assert ended == [reply]
            whole = (await ask(client, {**body, "stream": False, "rid": [f"whole-{name}"]}))[0]
            assert whole["output_ids"] == reply.ids
            logprobs = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]]
            np.testing.assert_allclose(logprobs, reply.logprobs, rtol=0, atol=GAP)


async def test_a_conversation_goes_on_from_its_cached_turns(server: Subject) -> None:
    """Several turns have images. The server needs only the same tokens again, and the pixels of the last turn."""
    async with client_at(server.address) as client:
        await server.serve()
        config = model("vl").config
        media = [("image", (1, 4, 8), 1), ("video", (2, 4, 4), 2), ("image", (1, 4, 4), 3), ("image", (1, 8, 4), 4)]
        episode = Episode("conversation", 0, [text(20, 1), media[0], text(5, 2)], config=config)
        known, names = 0, set[str]()  # tokens of the last turn, and of its answer but the last token; media so far
        for turn in range(4):
            asked = checked(episode.request(f"turn {turn}"), server.fleet.limits)  # type: ignore[union-attr]
            body = wire.request_body(
                asked, {0: f"turn-{turn}"}, config, interval=3, known=frozenset(names), names=names
            )
            sent = [wire.our_media(field, body[field][0][0])["patches"] for field in wire.FIELDS if field in body]
            assert sum(patches["shape"][0] for patches in sent) == int(np.prod(media[turn][1]))
            (answer,) = await ask(client, {**body, "stream": False})
            assert answer["meta_info"]["cached_tokens"] >= known - 1, "the history was computed again"
            ids, prompt = answer["output_ids"], asked.prompt
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            expected = full_logprobs(model("vl"), prompt, ids, never=asked.sampling.forbidden_ids)
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=GAP)
            known = len(prompt) + len(ids) - 1
            episode.add(Answer(tuple(ids)), text(3, turn), media[(turn + 1) % 4], text(6, 9 + turn))
        forgotten = Episode("forgotten", 0, [text(20, 1), ("image", (1, 4, 8), 99), text(5, 2)], config=config)
        asked = checked(forgotten.request("forgotten"), server.fleet.limits)  # type: ignore[union-attr]
        wire.request_body(asked, {0: "forgotten"}, config, interval=3, names=(lost := set[str]()))
        body = wire.request_body(asked, {0: "forgotten"}, config, interval=3, known=lost)
        with pytest.raises(Refused, match="are not here any more: send them again"):
            await ask(client, {**body, "stream": False})
        reply = SampleReply("forgotten")
        with pytest.raises((Refused, ServerError), match="are not here any more: send them again"):
            async for _ in client.generate(dict(body), [reply], config.text.vocab_size, 0):
                pass
        await server.engine.end_session("conversation")  # SGLang has no such order, which is no error


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_modes(server: Subject, mode: Any) -> None:
    """`abort` ends what runs with what it has; the others go on where they were."""
    async with client_at(server.address) as client:
        whole, _ = await server.serve()
        prompt = prompts("vl")["text"]
        ids = prompt.token_ids_T.tolist()
        body = plain(f"paused-{mode}", ids, max_new_tokens=200, temperature=1.0)
        running = asyncio.create_task(ask(client, body))
        while not (await client.load())["running"]:
            assert not running.done(), "its response ended before anybody saw it run: ask for a longer one"
        await client.pause(mode)
        waiting = asyncio.create_task(ask(client, plain(f"later-{mode}", ids, max_new_tokens=2)))
        await asyncio.sleep(1.0)
        assert not waiting.done() and running.done() == (mode == "abort")
        await client.resume()
        answer = await running
        assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        expected = full_logprobs(whole, prompt, answer["output_ids"])
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=GAP)
        assert len((await waiting)["output_ids"]) == 2


async def test_an_image_to_decode_gives_what_ours_give(server: Subject) -> None:
    """One unexpanded placeholder an image, decoded and normalised by SGLang itself: the same pixels."""
    async with client_at(server.address) as client:
        await server.serve()
        shots = [picture(56, 84, 0), picture(84, 28, 1)]
        prompt = processor("vl").prepare("<image> and <image>", [("image", shot) for shot in shots])
        pad = model("vl").config.image_token_id  # type: ignore[union-attr]
        ids = prompt.token_ids_T.tolist()
        short = [id for place, id in enumerate(ids) if id != pad or ids[place - 1] != pad]
        assert short.count(pad) == 2
        body = plain("decoded", short, max_new_tokens=8) | {"image_data": [base64.b64encode(s).decode() for s in shots]}
        answer = await ask(client, body)
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        expected = full_logprobs(model("vl"), prompt, answer["output_ids"])
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=GAP)


async def test_weights_that_did_not_arrive_are_noticed(server: Subject, tmp_path: pathlib.Path) -> None:
    """SGLang reports success for a checkpoint that lacks a tensor; the checksums do not."""
    async with client_at(server.address) as client:
        await server.serve(5)
        wanted = model("vl", 6)
        models.save(wanted, tmp_path / "whole")
        sums = Checksums(tmp_path / "whole" / "model.safetensors", wanted.config.text.num_kv_heads)
        cut = _without(tmp_path, "model.layers.1.mlp.up_proj.weight")
        await client.pause("retract")
        await client.update_from_disk(str(cut), 1)
        with pytest.raises(WeightsMismatch, match=r"model\.layers\.1\.mlp\.gate_up_proj\.weight has the checksum"):
            sums.check(await client.checksums(), client.address)
        await client.update_from_disk(str(tmp_path / "whole"), 2)
        sums.check(await client.checksums(), client.address)
        with pytest.raises(Refused, match="no-such-folder"):
            await client.update_from_disk(str(tmp_path / "no-such-folder"), 3)
        await client.resume()
        whole, _ = await server.serve()  # the fleet did not know of this
        (answer,) = await collect(server.engine.generate(request("a", prompts("vl")["images"], max_new_tokens=4)), 1)
        np.testing.assert_allclose(
            answer.logprobs, full_logprobs(whole, prompts("vl")["images"], answer.ids), rtol=0, atol=GAP
        )


def _without(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A copy of the checkpoint in `folder / "whole"` that lacks a tensor."""
    from safetensors.numpy import load_file, save_file

    cut = folder / "cut"
    cut.mkdir()
    tensors = load_file(folder / "whole" / "model.safetensors")
    del tensors[name]
    save_file(tensors, cut / "model.safetensors", {"format": "pt"})
    (cut / "config.json").write_bytes((folder / "whole" / "config.json").read_bytes())
    return cut


async def test_a_killed_server_loses_nothing_and_comes_back(server: Subject) -> None:
    whole, version = await server.serve(7)
    prompt = prompts("vl")["mixed"]
    task = asyncio.create_task(collect(server.engine.generate(request("k", prompt, n=3, max_new_tokens=150)), 3))
    await asyncio.sleep(0.4)
    assert not task.done() and server.process is not None
    os.killpg(server.process.running.pid, signal.SIGKILL)
    for answer in await task:  # there is no other server: they wait for this one
        assert (answer.finish, len(answer.ids), set(answer.versions)) == (FinishReason.LENGTH, 150, {version})
        np.testing.assert_allclose(answer.logprobs, full_logprobs(whole, prompt, answer.ids), rtol=0, atol=GAP)


CHECK = """
import sys
from fluxjax_media.processors import _check_fields
from sglang.srt.utils.hf_transformers.config import get_config
for folder in sys.argv[1:]:
    config = get_config(folder, trust_remote_code=False)
    try:
        _check_fields(config.text_config, config.vision_config)
    except RuntimeError as error:
        print(error)
    else:
        print("complete")
"""


@pytest.mark.turn(1)
def test_a_config_without_a_field_is_refused(tmp_path: pathlib.Path) -> None:
    """Our extension refuses a Qwen3.5 as transformers writes it when a server starts. The error has the field."""
    share, stack = "partial_rotary_factor", "deepstack_visual_indexes"
    lacking = [("exported", []), ("nothing", []), (share, [share]), (stack, [stack]), ("both", [share, stack])]
    for name, fields in lacking:
        content = write_config(model("qwen3_5").config)
        text, vision = content["text_config"], content["vision_config"]
        if name != "exported":
            rope = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
            text["rope_parameters"] = {**rope, share: text[share]}
        for field in fields:
            del (text if field in text else vision)[field]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    folders = [str(tmp_path / name) for name, _ in lacking]
    started = command("sglang", tmp_path)
    words = [started.python, "-c", CHECK, *folders]
    done = subprocess.run(words, env=started.variables(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, fields), said in zip(lacking, done.stdout.splitlines()[-len(lacking) :], strict=True):
        assert (said == "complete") == (not fields)
        assert all((field in said) == (field in fields) for field in (share, stack)), said


@pytest.mark.turn(2)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own")
async def test_weights_over_two_ranks(tmp_path: pathlib.Path) -> None:
    """What each rank holds is told from the whole tensors; a wrong one is noticed there, too."""
    with subject("sglang", "vl", tmp_path, ranks=2) as divided:
        whole, _ = await divided.serve(8)
        for name, prompt in prompts("vl").items():
            (answer,) = await collect(divided.engine.generate(request(name, prompt, max_new_tokens=4)), 1)
            expected = full_logprobs(whole, prompt, answer.ids)
            np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=GAP)
        async with client_at(divided.address) as client:
            held = await client.checksums()
        assert len(held) == 2
        models.save(whole, tmp_path / "whole")
        sums = Checksums(tmp_path / "whole" / "model.safetensors", whole.config.text.num_kv_heads)
        sums.check(held, "server")
        held[1] = {**held[1], "model.layers.0.self_attn.o_proj.weight": "0" * 16}
        with pytest.raises(WeightsMismatch, match=r"server, rank 1: .*o_proj"):
            sums.check(held, "server")


@pytest.mark.turn(0)
def test_training_with_two_servers(tmp_path: pathlib.Path) -> None:
    """The shipped configuration, as a user runs it."""
    before = set(pathlib.Path("/dev/shm").glob("fluxjax-weights-*"))  # of other tests
    command = [
        *(sys.executable, "-m", "fluxjax.train", "--config=configs/vlm_sglang.py:debug"),
        f"--config.servers.python={sglang_python()}",
        f"--config.run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["complete"]
    assert 0 < summary["logprob_gap_max"] < GAP
    assert set(pathlib.Path("/dev/shm").glob("fluxjax-weights-*")) <= before


@pytest.mark.turn(1)
def test_the_benchmark_compares_with_it() -> None:
    """The greedy tokens agree, and there is a ratio. How fast anything is, is never asserted."""
    sizes = ["--prompt-tokens=8", "--new-tokens=4", "--repeats=1", "--warmup=1", "--concurrency=2"]
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout_engine.py"), "--sides", "jax", "sglang", *sizes]
    done = subprocess.run(
        [*command, "--sglang", sglang_python(), "--sglang-threads=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["greedy"]["equal"] and line["greedy"]["tokens"] == 4
    assert line["threads"]["sglang-1"] == 1 and line["ratio_is_over"] == {"2": "sglang-1"}
    assert line["ratio"]["2"]["jax"] > 0


def test_the_doctor_finds_nothing(server: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    run(server.serve(0))  # the weights of its folder
    folder = server.process._command.model  # type: ignore[union-attr]
    flags = ["--server", server.address, "--model", folder, "--text", "which of the 3 is red?"]
    status = doctor.main([*flags, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    states = {check["name"]: check["state"] for check in json.loads(out)["checks"]}
    asked = {"token ids", "weights", "text", "image", "video", "image as files", "sampling", "packed rows"}
    assert asked <= {name for name, state in states.items() if state == "ok"}, out
    assert states["template"] == "cannot be asked"  # the tiny checkpoint has none


DUMPED = [pytest.param("qwen3", marks=pytest.mark.turn(0)), pytest.param("qwen3_vl", marks=pytest.mark.turn(2))]


@pytest.mark.parametrize("kind", DUMPED)
def test_the_doctor_names_the_layer_that_differs(
    kind: str, tmp_path: pathlib.Path, monkeypatch: Any, capsys: Any
) -> None:
    """By the dumps of a server that states no checksums."""
    theirs, dumps = tmp_path / "server", tmp_path / "dumps"
    with checkpoint(kind, tmp_path / "trainer") as ours:
        shutil.copytree(ours, theirs)
    models.save(changed(model(kind), "layers", "attention", "o", layer=1), theirs)
    plain = command("sglang", theirs)
    flags = (*plain.flags, "--debug-tensor-dump-output-folder", str(dumps))
    process = LocalServer(dataclasses.replace(plain, flags=flags), tmp_path / "server.log")
    monkeypatch.setattr(ServerClient, "checksums", none_stated)
    process.start()
    try:
        asyncio.run(up(process))
        how = ["--server", process.address, "--dumps", str(dumps), "--text", "which of the 3 is red?", "--json"]
        found = [(doctor.main([*how, "--model", str(folder)]), capsys.readouterr().out) for folder in (theirs, ours)]
    finally:
        process.kill()
    assert [status for status, _ in found] == [0, 1], found
    assert json.loads(found[1][1])["difference"] == "layer 1", found


async def none_stated(_: ServerClient) -> Any:
    raise Refused("no checksums")
