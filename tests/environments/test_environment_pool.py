"""Episodes in processes: what an environment does costs its own episode only, and media come out as they went in."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from hostile import picture
from PIL import Image
from process_cases import gone, until

from fluxjax.base.errors import ConfigError, DataError
from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.scored import Prompt
from fluxjax.data.tickets import ref_of
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool, Fault, Observation
from fluxjax.environments.observed_media import stored
from models.processing.images import load_image
from models.processing.settings import DecodeLimits, FrameSettings, PatchLayout, PixelSettings
from models.processing.videos import VideoReader

SMALL = EnvironmentLimits(
    text_bytes=10_000, media=4, pixels=200 * 200, frames=8, encoded_bytes=1_000_000, concurrency=2, memory_gib=0.3
)


def prompt(text: str = "go") -> Prompt:
    return Prompt("p", "source", text, "answer")


class NotedPool(EnvironmentPool):
    def __init__(self, folder: pathlib.Path, limits: EnvironmentLimits) -> None:
        self.noted: list[tuple[str, str]] = []  # environments and the reasons why they failed
        super().__init__(folder, limits, note=lambda name, text: self.noted.append((name, text)))


@contextlib.asynccontextmanager
async def opened(folder: pathlib.Path, **bounds):
    pool = NotedPool(folder, dataclasses.replace(SMALL, **bounds))
    try:
        yield pool
    finally:
        await pool.close()


async def played(pool, environment, turns=("a", "b", "c"), seed=0, arguments=None, text="go"):
    episode = await pool.start(environment, prompt(text), seed, arguments)
    seen = [episode.observation]
    for turn in turns:
        seen.append(await episode.act(turn))
    await episode.end()
    return seen


@pytest.mark.medium
async def test_an_episode_is_played_in_another_process(tmp_path):
    async with opened(tmp_path) as pool:
        seen = await played(pool, "hostile:Counter", seed=7)
        assert [observed.text for observed in seen] == ["go 7", "a 8", "b 9", "c 10"]
        assert [observed.reward for observed in seen] == [0.0, 0.5, 0.5, 0.5]
        assert [observed.done for observed in seen] == [False, False, False, True]
        pids = {observed.info["pid"] for observed in seen}
        assert len(pids) == 1 and os.getpid() not in pids
        assert seen[0].info["images"] is False  # processes of environments do not import JAX
        again = await played(pool, "hostile:Counter", turns=["a"])
        assert again[0].info["pid"] in pids  # the process stays
        metrics = pool.metrics()
        assert metrics["environments/started"] == 2.0 and metrics["environments/failed"] == 0.0
        assert 0.0 < metrics["environments/busy"] <= 1.0 and metrics["environments/seconds_max"] > 0.0


@pytest.mark.medium
async def test_nothing_follows_the_end(tmp_path):
    async with opened(tmp_path) as pool:
        episode = await pool.start("hostile:Counter", prompt(), 0, {"turns": 1})
        assert (await episode.act("a")).done
        with pytest.raises(RuntimeError, match="is done; no turn can follow"):
            await episode.act("b")
        await episode.end()
        await episode.end()
        with pytest.raises(RuntimeError, match="has ended"):
            await episode.snapshot()
        assert pool.metrics()["environments/failed"] == 0.0 and not pool.noted


async def test_an_async_environment_keeps_its_tasks(tmp_path):
    async with opened(tmp_path) as pool:
        assert [observed.text for observed in await played(pool, "hostile:Async")] == [f"answer {n}" for n in range(4)]


FAULTS = [
    ("hangs", Fault.TIMED_OUT, "timed out after 2 s"),
    ("blocks signals and hangs", Fault.TIMED_OUT, "timed out after 2 s"),
    ("raises", Fault.RAISED, "KeyError: 'nothing here'"),
    ("raises what can't be said", Fault.RAISED, "Mute"),
    ("exits", Fault.RAISED, "SystemExit: 3"),
    ("exits at once", Fault.DIED, "ended its process (exit code 3)"),
    ("kills itself", Fault.DIED, "ended its process (signal 9)"),
    ("leaks", Fault.MEMORY, "needs more than 0.3 GiB of memory"),
    ("corrupt image", Fault.MEDIUM, "a medium can't be used: cannot be decoded as an image: image file is truncated"),
    ("no image", Fault.MEDIUM, "a medium can't be used: not an image in a known format"),
    ("no video", Fault.MEDIUM, "a medium can't be used: cannot be opened as a video"),
    ("floats", Fault.MEDIUM, "a medium can't be used: ValueError: an array of shape (12, 16, 3) and type float64"),
    ("images of another type", Fault.INVALID, "images are of type ndarray, not a list"),
    ("an image of another type", Fault.INVALID, "an image is of type str"),
    ("frames of two sizes", Fault.MEDIUM, "a medium can't be used: ValueError: a video needs frames, all of one size"),
    ("no frames", Fault.MEDIUM, "a medium can't be used: ValueError: a video needs frames, all of one size"),
    ("much text", Fault.TOO_LARGE, "text has more than 10000 bytes"),
    ("much info", Fault.TOO_LARGE, "info has more than 10000 bytes"),
    ("many images", Fault.TOO_LARGE, "more than 4 media in an observation"),
    ("many pixels", Fault.TOO_LARGE, "more than 40000 pixels in an image"),
    ("many encoded bytes", Fault.TOO_LARGE, "more than 1000000 bytes of an encoded medium"),
    ("many frames", Fault.TOO_LARGE, "more than 8 frames in a video"),
    ("another type", Fault.INVALID, "returned str, expected an Observation"),
    ("nothing", Fault.INVALID, "returned NoneType, expected an Observation"),
    ("text of another type", Fault.INVALID, "an observation has text of type bytes and done of type bool"),
    ("half a surrogate", Fault.INVALID, "text has halves of surrogate pairs"),
    ("done of another type", Fault.INVALID, "an observation has text of type str and done of type str"),
    ("info of another type", Fault.INVALID, "info does not fit into JSON: a value is of type object"),
    ("nan", Fault.REWARD, "the reward is nan"),
    ("infinite", Fault.REWARD, "the reward is inf"),
    ("no number", Fault.REWARD, "the reward is str, expected a number"),
    ("too few marks", Fault.INVALID, "1 <image> and 0 <video> marks in the text for 2 images and 0 videos"),
]


@pytest.mark.slow
async def test_what_goes_wrong_is_a_reason_and_the_other_episode_goes_on(tmp_path):
    """Half of the faults come at the reset, half at a turn. Beside them, one episode goes on in the same process."""
    async with opened(tmp_path, seconds=2.0) as pool:
        lasting = await pool.start("hostile:Counter", prompt(), 0, {"turns": 1000})
        for number, (how, fault, text) in enumerate(FAULTS):
            pool.metrics()
            at_reset = number % 2 == 0 and fault is not Fault.TIMED_OUT  # a reset has longer
            with pytest.raises(EnvironmentFailure) as caught:
                episode = await pool.start("hostile:Hostile", prompt(how if at_reset else "fine"), 0)
                await episode.act(how)
            assert (caught.value.fault, caught.value.reason[: len(text)]) == (fault, text), how
            assert len(caught.value.reason) <= 200, how
            assert (await lasting.act("on")).info["pid"] == lasting.observation.info["pid"]
            metrics = pool.metrics()
            assert metrics["environments/failed"] == metrics[f"environments/failed/{fault.value}"] == 1.0, how
        assert lasting.observation.text == f"on {len(FAULTS)}"
        assert len(pool.noted) == len(FAULTS) and {name for name, _ in pool.noted} == {"hostile:Hostile"}
        assert ("hostile:Hostile", "the reward is nan") in pool.noted
        good = await played(pool, "hostile:Hostile", ["fine"])  # all slots are free again, but for one
        assert good[1].text == "good fine"
        assert not list(tmp_path.glob(".*.part"))


@pytest.mark.medium
async def test_a_slow_reset_has_its_own_bound(tmp_path):
    async with opened(tmp_path, seconds=0.3, start_seconds=60.0) as pool:
        assert len(await played(pool, "hostile:lasting", ["a"], arguments={"seconds": 0.5})) == 2
    async with opened(tmp_path, start_seconds=0.3) as pool:
        with pytest.raises(EnvironmentFailure, match=r"timed out after 0\.3 s"):
            await pool.start("hostile:lasting", prompt(), 0, {"seconds": 600})


@pytest.mark.medium
async def test_a_process_that_grew_is_replaced_between_episodes(tmp_path):
    async with opened(tmp_path, memory_gib=0.3) as pool:
        before, grown = await played(pool, "hostile:Hostile", ["leaks a little"], text="fine")
        (after,) = await played(pool, "hostile:Hostile", [], text="fine")
        assert before.info["pid"] == grown.info["pid"] != after.info["pid"]
        assert pool.metrics()["environments/failed"] == 0.0


@pytest.mark.medium
async def test_a_process_that_is_killed_costs_its_episode_alone(tmp_path):
    async with opened(tmp_path, concurrency=3) as pool:
        episodes = [await pool.start("hostile:Counter", prompt(), seed, {"turns": 9}) for seed in range(3)]
        pids = [episode.observation.info["pid"] for episode in episodes]
        assert len(set(pids)) == 3
        os.kill(pids[1], signal.SIGKILL)
        answers = await asyncio.gather(*(episode.act("x") for episode in episodes), return_exceptions=True)
        assert [getattr(answer, "text", None) for answer in answers] == ["x 1", None, "x 3"]
        assert isinstance(answers[1], EnvironmentFailure) and answers[1].fault is Fault.DIED


@pytest.mark.medium
async def test_children_end_with_their_process(tmp_path):
    async with opened(tmp_path) as pool:
        episode = await pool.start("hostile:Hostile", prompt("starts a child"), 0)
        pid, child = episode.observation.info["pid"], int(episode.observation.text)
        await episode.kill()
        until(lambda: gone(pid) and gone(child))


@pytest.mark.medium
async def test_episodes_wait_in_order_and_cancelled_ones_give_up_their_turn(tmp_path):
    async with opened(tmp_path, concurrency=1) as pool:
        first = await pool.start("hostile:Counter", prompt(), 0)
        begun: list[int] = []

        async def play(number):
            episode = await pool.start("hostile:Counter", prompt(), number)
            begun.append(number)
            await episode.act("a")
            await episode.end()

        waiting = [asyncio.create_task(play(number)) for number in range(5)]
        await asyncio.sleep(0.05)
        assert not begun
        waiting[2].cancel()
        await first.end()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert begun == [0, 1, 3, 4] and pool.metrics()["environments/waiting"] == 5.0


@pytest.mark.medium
async def test_a_cancelled_turn_ends_its_episode(tmp_path):
    async with opened(tmp_path, concurrency=1) as pool:
        episode = await pool.start("hostile:Hostile", prompt("fine"), 0)
        pid = episode.observation.info["pid"]
        turn = asyncio.create_task(episode.act("hangs"))
        await asyncio.sleep(0.2)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        until(lambda: gone(pid))
        starting = asyncio.create_task(pool.start("hostile:lasting", prompt(), 0, {"seconds": 600}))
        await asyncio.sleep(0.2)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert len(await played(pool, "hostile:Counter")) == 4  # the slot is free


async def test_closing_ends_turns_under_way(tmp_path):
    async with opened(tmp_path) as pool:
        episode = await pool.start("hostile:Hostile", prompt("fine"), 0)
        turn = asyncio.create_task(episode.act("hangs"))
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        await pool.close()
        with pytest.raises(EnvironmentFailure, match="ended its process"):
            await turn
        assert time.monotonic() - begin < 4.0


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.medium
async def test_a_snapshot_is_restored_in_another_process(tmp_path):
    async with opened(tmp_path) as pool:
        episode = await pool.start("hostile:Counter", prompt(), 3, {"turns": 4})
        assert episode.has_snapshots
        await episode.act("a")
        snapshot = await episode.snapshot()
        assert snapshot is not None
        texts = [(await episode.act(turn)).text for turn in "bc"]
        other = await pool.start("hostile:Counter", prompt(), 3, {"turns": 4})
        await other.restore(snapshot)
        assert [(await other.act(turn)).text for turn in "bc"] == texts == ["b 5", "c 6"]
        assert (await other.act("d")).done


@pytest.mark.medium
async def test_environments_without_snapshots_and_with_bad_ones(tmp_path):
    async with opened(tmp_path) as pool:
        episode = await pool.start("hostile:Hostile", prompt(), 0)
        assert not episode.has_snapshots and await episode.snapshot() is None
        with pytest.raises(ConfigError, match=r"'hostile:Hostile' has no snapshot\(\) and restore\(\)"):
            await episode.restore(b"")
        await episode.end()
        with pytest.raises(EnvironmentFailure, match="a snapshot is of type str, not bytes"):
            await (await pool.start("hostile:BadSnapshots", prompt(), 0)).snapshot()
        with pytest.raises(EnvironmentFailure, match="OSError: no state"):
            await (await pool.start("hostile:BadSnapshots", prompt(), 0)).restore(b"")
        assert len(await played(pool, "hostile:ClosesBadly")) == 4  # a complete episode is no failure, but is counted
        assert pool.noted[-1] == (
            "ClosesBadly" if ":" not in pool.noted[-1][0] else "hostile:ClosesBadly",
            "KeyError: 'still open'",
        )


# --- names ------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(
    ("environment", "arguments", "text"),
    [
        ("chess", {}, "environment is 'chess'; it must be .*module:attribute"),
        ("no_such_module:E", {}, "importing 'no_such_module' raised ModuleNotFoundError"),
        ("hostile:Nothing", {}, "hostile has no 'Nothing'; it has .*Counter"),
        ("hostile:Counter", {"speed": 1}, r"can't take the arguments {'speed': 1}"),
        ("hostile:needs_two", {"first": 1}, "missing a required argument: 'second'"),
        ("hostile:OBJECT", {"turns": 1}, r"an object, which takes no arguments such as {'turns': 1}"),
        ("hostile:no_environment", {}, "has no reset and no step method"),
    ],
)
async def test_an_environment_that_is_not_there_is_said(environment, arguments, text, tmp_path):
    async with opened(tmp_path) as pool:
        with pytest.raises(ConfigError, match=text):
            await pool.start(environment, prompt(), 0, arguments)
        assert not pool.noted


def test_limits_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"environment limits: concurrency is 0; it must"):
        EnvironmentPool(tmp_path / "media", EnvironmentLimits(concurrency=0))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the folder for media of observations can't be made"):
        EnvironmentPool(tmp_path / "file" / "media")


# --- media ------------------------------------------------------------------------------------------


def test_an_image_that_two_processes_write_at_once_keeps_its_version(tmp_path, monkeypatch):
    """Both look for the file before either has written it."""
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: False)
    versions = set()
    for _ in range(2):
        [(_, name)] = stored(Observation(images=[picture(0)]), tmp_path, SMALL)
        versions.add(ref_of(Media(MediaKind.IMAGE, str(tmp_path / name))).stamp)
        time.sleep(0.01)
    assert len(versions) == 1 and [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.medium
async def test_media_are_files_named_by_content(tmp_path):
    (killed := tmp_path / f".x.png.{2**22}.part").write_bytes(b"of a process that was killed")
    os.utime(killed, (1, 1))
    (young := tmp_path / f".y.png.{2**22}.part").write_bytes(b"of a process that writes it now")
    async with opened(tmp_path) as pool:
        forms = ["array", "image", "grey", "palette", "clear", "cmyk", "png", "jpeg", "webp"]
        seen = await played(pool, "hostile:Pictures", forms, seed=5)
        again = await played(pool, "hostile:Pictures", ["array"], seed=5)
        other = await played(pool, "hostile:Pictures", ["array"], seed=6)
    pixels = picture(5)
    assert [medium.kind for medium in seen[0].media] == [MediaKind.IMAGE, MediaKind.VIDEO]
    assert seen[0].text == "first <image> and <video>" and seen[1].text == "<image>"
    paths = dict(zip(forms, (observed.media[0].path for observed in seen[1:]), strict=True))
    assert seen[0].media[0].path == paths["array"] == paths["image"] == paths["clear"]
    assert again[0].media == seen[0].media and other[0].media[1].path != seen[0].media[1].path
    for name in ("array", "png"):
        np.testing.assert_array_equal(np.asarray(load_image(paths[name])), pixels)
    grey = np.asarray(Image.fromarray(pixels).convert("L").convert("RGB"))
    np.testing.assert_array_equal(np.asarray(load_image(paths["grey"])), grey)
    assert pathlib.Path(paths["jpeg"]).read_bytes()[:2] == b"\xff\xd8"
    young.unlink()  # it was left alone
    assert not list(tmp_path.glob(".*.part")) and len(list(tmp_path.iterdir())) == len(
        {medium.path for observed in [*seen, *again, *other] for medium in observed.media}
    )
    frames = []
    video = pathlib.Path(seen[0].media[1].path).read_bytes()
    settings = FrameSettings(num_frames=2), PixelSettings(min_pixels=1), DecodeLimits()

    import io

    layout = PatchLayout(patch_size=2, spatial_merge_size=2)
    VideoReader(io.BytesIO(video), "video", layout, settings[1], settings[0], settings[2]).read(
        lambda slot, count, frame: frames.append(frame)
    )
    assert len(frames) == 2
    for frame in frames:
        np.testing.assert_array_equal(frame, pixels)


async def test_a_full_disk_is_no_fault_of_the_environment(tmp_path):
    async with opened(tmp_path / "media") as pool:
        (tmp_path / "media").rmdir()
        with pytest.raises(DataError, match="media of observations can't be written"):
            await pool.start("hostile:Pictures", prompt(), 0)
        assert pool.metrics()["environments/failed"] == 0.0
