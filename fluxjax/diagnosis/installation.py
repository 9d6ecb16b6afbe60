"""Checks of this machine, and of some records of a configuration's sources as a run would prepare and score them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator

import jax
import numpy as np
from PIL import Image

from models.processing.media import MediaSettings
from rollout.weights.published import scratch_folder
from sharding.mesh import triton_trouble

from ..base.types import Prompt
from ..config import Config, ConfigError
from ..data.loader import open_sources, read_row
from ..data.prepare import Sorted
from ..rewards.sandbox import find_sandbox
from ..rewards.scorer import Scorer
from ..run.build import describe_model, training_prompts
from ..tasks.pans import PansRecipe, encode
from . import Finding

CUDA = "pip install 'fluxjax[cuda12]', or 'fluxjax[cuda13]' for drivers since 580"
FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think></think><answer>\\boxed{{{}}}</answer>")  # of an answer


async def installation(config: Config | None, samples: int) -> AsyncIterator[Finding]:
    """Yields the findings of this machine and of each source of a configuration. Raises what `inspected` raises."""
    driver, device = _driver(), jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    blind = driver and on_cpu and os.environ.get("JAX_PLATFORMS") != "cpu"
    yield Finding("devices", f"{jax.local_device_count()} x {device.device_kind}", CUDA if blind else "")
    yield _driver_and_cuda(driver)
    trouble = "not needed without a GPU" if on_cpu else triton_trouble()
    yield Finding("jax-triton", trouble or "can be imported", CUDA if trouble else "", asked=not on_cpu)
    stats, scratch = device.memory_stats() or {}, scratch_folder()
    free = {str(scratch): shutil.disk_usage(scratch).free}
    free["host"] = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free |= {"device": stats["bytes_limit"] - stats["bytes_in_use"]} if "bytes_limit" in stats else {}
    yield Finding("memory", "free GiB: " + ", ".join(f"{name} {size / 2**30:.1f}" for name, size in free.items()))
    try:
        find_sandbox("bubblewrap", slots=1)
        yield Finding("bubblewrap", "runs code of responses")
    except (ConfigError, OSError) as error:
        yield Finding("bubblewrap", f"needed by rewards that run code (docs/rewards.md): {error}", asked=False)
    try:
        for kind, data in (("image", picture_file()), ("video", clip_file())):
            MediaSettings().load(kind, data)
        yield Finding("decoder", "an image and a video")
    except Exception as error:  # libraries raise errors of many kinds
        yield Finding("decoder", repr(error), "pip install --force-reinstall av pillow")
    if config is not None:
        async for name, (prompts, troubles) in inspected(config, samples):
            source, tokens = config.data.sources[name], max((len(prompt.inputs) for prompt in prompts), default=0)
            detail = f"{len(prompts)} prompts of {source.path or name}, up to {tokens} tokens, {source.reward_names}"
            lines = [f"row {prompt.row} ({prompt.id}): {why}" for prompt, why in troubles]
            fix = "mend these records, or choose a reward that grades them (docs/rewards.md)"
            many = len(troubles) > config.rewards.max_unreadable * len(prompts)
            yield Finding(f"data {name}", "; ".join([detail, *lines]), fix if many else "")


def _driver() -> str:
    """The output of nvidia-smi; empty without a driver or a GPU."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True).stdout
    return ""


def _driver_and_cuda(driver: str) -> Finding:
    """Says whether JAX has a plugin, in jaxlib's version, for a CUDA version that the driver supports."""
    versions: dict[str, str] = {}
    for package in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    stated = re.search(r"Driver Version: (\S+).*?CUDA Version: (\d+)", driver)
    driver = f"driver {stated[1]}, CUDA {stated[2]}" if stated else "nvidia-smi shows no GPU"
    detail = ", ".join([driver, *map(" ".join, versions.items())])
    usable = [versions.get(f"jax-cuda{cuda}-plugin") for cuda in (12, 13) if stated and cuda <= int(stated[2])]
    return Finding("driver and CUDA", detail, "" if versions["jaxlib"] in usable else CUDA, asked=bool(stated))


def picture_file(turns: int = 0) -> bytes:
    """Returns a PNG file with gradients of three colours, rotated by `turns` times 90 degrees."""
    ramp = Image.linear_gradient("L").rotate(90 * turns)
    picture = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])
    picture.resize((180, 120)).save(file := io.BytesIO(), "PNG")  # no multiples of the side of a patch
    return file.getvalue()


def clip_file() -> bytes:
    """Returns an MP4 file of one second, in which a picture moves to the right."""
    pixels = np.asarray(Image.open(io.BytesIO(picture_file())).resize((128, 96)))
    return encode(np.stack([np.roll(pixels, 6 * frame, axis=1) for frame in range(8)]), PansRecipe())


async def inspected(config: Config, samples: int) -> AsyncIterator[tuple[str, Sorted]]:
    """Reads `samples` records of each source, at even distances. Yields (source name, (prompts as engines get them,
    [(prompt, trouble)])), with one trouble for each skipped prompt or wrong reward. Raises ConfigError, DataError."""
    sources = open_sources(config)
    _, processor = describe_model(config, sources)
    training = {name: dataclasses.replace(source, eval_reward="") for name, source in config.data.sources.items()}
    scorer, preparer = Scorer(training, processor.decode, config.rewards), training_prompts(config, sources, processor)
    try:
        for name, source in sources.items():
            rows = np.unique(np.linspace(0, len(source) - 1, samples).astype(int)).tolist()
            prompts, troubles = preparer.prepare_all(read_row(source, name, row) for row in rows)
            scored = [(prepared.prompt, await _trouble(scorer, prepared.prompt)) for prepared in prompts]
            yield name, (prompts, [*troubles, *((prompt, why) for prompt, why in scored if why)])
    finally:
        scorer.close()


async def _trouble(scorer: Scorer, prompt: Prompt) -> str:
    """Returns what is wrong with a prompt's rewards, or "". A reward may fail, an empty answer may be correct, or the
    reference answer may be correct in none of `FORMS`."""
    empty, *given = [await scorer.score_text(prompt, form.format(prompt.answer)) for form in ("", *FORMS)]
    if reasons := [reward.reason for reward in (empty, *given) if reward.reason]:
        return reasons[0]
    wrong = "" if any(reward.correct for reward in given) else f"the reference {prompt.answer[:40]!r} is not correct"
    return "an empty answer is correct" if empty.correct else wrong
