"""Profiles: measured, written, read again with clear errors, and asked for a degree."""

import json
import re
from typing import Any

import jax
import pytest
from rollout_cases import TEXT, VOCAB, build, engine

from benchmarks.engine_profile import measure, save
from rollout.throughput import Point, Profile, ProfileError, sizes


def profile(*points):
    return Profile("cpu", 4, sizes(TEXT.text), tuple(Point(*point) for point in points))


@pytest.mark.slow
async def test_measured_written_and_read_again(tmp_path):
    serving, told = engine(build(TEXT), slots=4), []
    how: dict[str, Any] = {"degrees": (1, 2), "batches": (4,), "lengths": (8,), "new_tokens": 5, "repeats": 2}
    how["progress"] = lambda done, total: told.append((done, total))
    points = await measure(serving, jax.devices("cpu"), vocabulary=VOCAB, **how)
    assert [(p.degree, p.batch, p.length) for p in points] == [(1, 4, 8), (2, 4, 8)]
    assert min(min(p.prefill, p.decode) for p in points) > 0
    assert told[0] == (1, 6) and told[-1] == (6, 6)
    assert serving.stats().running == serving.stats().waiting == 0
    whole = Profile("cpu", 8, sizes(TEXT.text), points)
    save(whole, tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == whole
    assert whole.model["num_kv_heads"] == 2


GOOD = {"version": 1, "device": "cpu", "devices": 2, "model": {}, "points": []}
POINT = {"degree": 1, "batch": 8, "length": 16, "prefill": 10.0, "decode": 0.0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no profile of version 1: JSONDecodeError"),
        ("[]", "no profile of version 1: TypeError"),
        (json.dumps({**GOOD, "version": 2}), "no profile of version 1: ValueError: its version is 2"),
        (json.dumps({"version": 1, "device": "cpu"}), "no profile of version 1: KeyError: 'points'"),
        (json.dumps(GOOD), "has no points"),
        (json.dumps({**GOOD, "points": [{"degree": 1}]}), "no profile of version 1: KeyError: 'batch'"),
        (json.dumps({**GOOD, "points": [POINT]}), "must be positive"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, complaint):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ProfileError, match=f"{re.escape(str(file))}.*{re.escape(complaint)}"):
        Profile.load(file)


def test_a_missing_file(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        Profile.load(tmp_path / "none.json")


def test_the_best_degree_follows_batch_length_and_devices():
    # Alone, four devices decode a small batch fastest; with much to do, four engines of one do.
    measured = profile(
        (1, 1, 64, 1.0, 10.0), (1, 64, 64, 1.0, 640.0), (4, 1, 64, 1.0, 30.0), (4, 64, 64, 1.0, 700.0),
        (1, 1, 512, 1.0, 1.0), (1, 64, 512, 1.0, 1.0), (4, 1, 512, 1.0, 9.0), (4, 64, 512, 1.0, 9.0),
    )  # fmt: skip
    assert measured.best_degree(64, 64, 4) == 1
    assert measured.best_degree(1, 512, 4) == 4
    assert measured.best_degree(64, 400, 4) == 4, "the nearer length counts"
    assert measured.best_degree(64, 400, 3) == 1, "there are only three devices"
    with pytest.raises(ProfileError, match="1 devices or fewer"):
        profile((2, 1, 1, 1.0, 1.0)).best_degree(1, 1, 1)
