"""`python -m rollout.serve`: its options, what it prints, and its end."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from conftest import ROOT
from forked import forked
from rollout_cases import HANG
from serve_cases import help_of, refused_flags

from rollout.serve import main


@pytest.mark.medium
def test_wrong_options_are_one_line(checkpoints, capsys, monkeypatch):
    monkeypatch.delenv("FLUXJAX_TOKEN", raising=False)
    model = ("--model", str(checkpoints["vl"]))
    for flags, complaint in [
        ((), "--model"),
        (("--model", "/no/such"), "/no/such: no such folder"),
        ((*model, "--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from other machines"),
        ((*model, "--host", "::"), "give a --token, or set FLUXJAX_TOKEN"),
        ((*model, "--host", "0.0.0.0", "--token", "a b"), "--token must be ASCII"),
        ((*model, "--port", "70000"), "--port"),
        ((*model, "--weight-version", "v1"), "--weight-version"),
        ((*model, "--slots", "0"), "--slots"),
        ((*model, "--tp", "64"), "--tp 64: there are"),
        ((*model, "--tp", "3"), "1, 2, 4"),
    ]:
        refused_flags(main, flags, complaint, capsys)


def test_help_comes_at_once_and_names_the_options():
    shown = help_of("rollout.serve")
    for word in (
        "--model",
        "--token",
        "FLUXJAX_TOKEN",
        "--tp",
        "--kv-tokens",
        "listening on http://HOST:PORT",
        "SIGTERM",
    ):
        assert word in shown


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(checkpoints, tmp_path):
    sizes = ("--slots", "4", "--max-sequence-tokens", "4096", "--kv-tokens", "4096", "--steps-per-sync", "2")
    flags = ("--model", str(checkpoints["vl"]), *sizes, "--weight-version", "5", "--dtype", "bfloat16")
    errors, environment = tmp_path / "err", os.environ | {"FLUXJAX_TOKEN": "secret"}
    command = [sys.executable, "-m", "rollout.serve", *flags]
    with (
        errors.open("w") as to,
        forked(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=to, text=True, env=environment) as process,
    ):
        try:
            talked_to(process, errors)
        finally:
            process.kill()


def talked_to(process: Any, errors: pathlib.Path) -> None:
    line = process.stdout.readline().split()
    assert line[:2] == ["listening", "on"] and line[2].startswith("http://127.0.0.1:"), errors.read_text()

    def opened(path: str, body: Any = None, token: str = "secret") -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(line[2] + path, data, headers), timeout=HANG)

    def shown(path: str) -> Any:
        with opened(path) as reply:
            return json.load(reply)

    with opened("/health", token="") as reply:
        assert reply.status == 200
    with pytest.raises(urllib.error.HTTPError, match="401") as refusal:
        opened("/model_info", token="wrong")
    refusal.value.close()
    info = shown("/model_info")
    assert info["weight_version"] == "5" and info["model_type"] == "qwen2_5_vl" and info["dtype"] == "bfloat16"
    assert info["architectures"] == ["Qwen2_5_VLForConditionalGeneration"] and info["has_image_understanding"]
    assert shown("/server_info")["max_total_tokens"] == 4096
    body = {"input_ids": [8, 9, 10], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
    with opened("/generate", body) as stream:
        assert stream.readline().startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        events = [json.loads(event[6:]) for event in stream if event.startswith(b"data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < events[-1]["meta_info"]["completion_tokens"] < 4000
    assert process.wait(20) == 0
    assert process.stdout.read() == "" and errors.read_text() == ""
