"""Batches of shadows are, bit for bit, those of whole prompts that keep their pixels: real files, real stores."""

import contextlib
import functools
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import MODEL, make_config, random_group
from PIL import Image
from run_cases import clip, write_jsonl
from turns import third_of

from fluxjax.base.types import Group
from fluxjax.batch.composer import Composer
from fluxjax.config import STRATEGIES
from fluxjax.data.loader import PromptLoader, open_source
from fluxjax.data.local_store import LocalStore
from fluxjax.data.materializer import Materializer
from fluxjax.data.near_pixels import NearPixels
from fluxjax.data.prepare import Preparer, tokenised
from fluxjax.data.shadows import MediaIndex, ProxyMedia, outlined, rows_of
from fluxjax.data.sources import all_texts
from fluxjax.data.tickets import Ticket
from fluxjax.hosts.orders import Learn, decode, encode, shares_of, told
from models.config import PatchLayout
from models.processing import Processor, tiny

DEVICES = 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Sources of pictures, clips, prompts with several media of both kinds, and texts."""
    folder = tmp_path_factory.mktemp("media")
    random = np.random.default_rng(0)
    for number in range(8):
        pixels = random.integers(0, 256, (*random.integers(12, 48, 2), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for number in range(4):
        clip(folder / f"{number}.mp4", (40 * number, 200 - 40 * number, 90), frames=4 + 3 * number)
    records = {
        "pictures": [{"prompt": "<image>What?", "images": [f"{k}.png"]} for k in range(8)],
        "clips": [{"prompt": "<video>Where to?", "videos": [f"{k}.mp4"]} for k in range(4)],
        "both": [
            {"prompt": "<image>as<video>or<image>?", "images": [f"{k}.png", f"{7 - k}.png"], "videos": [f"{k % 4}.mp4"]}
            for k in range(5)
        ],
        "texts": [{"prompt": "How" + " so" * k + "?"} for k in range(4)],
    }
    return {
        name: write_jsonl(folder / f"{name}.jsonl", [{"id": str(k), "answer": "a", **r} for k, r in enumerate(own)])
        for name, own in records.items()
    }


@pytest.fixture(scope="module")
def process(paths):
    """Makes what a process has: a preparer over all sources, with a store of its own, or (`central`) with none."""
    with contextlib.ExitStack() as opened:

        def make(strategy: str, seed: int, shadow: bool) -> types.SimpleNamespace:
            config = settings_of(strategy)
            sources = {name: open_source(path, name) for name, path in paths.items()}
            assert MODEL.vision is not None
            layout = PatchLayout.of(MODEL.vision)
            processor = tiny.build(all_texts(sources.values()), layout=layout, max_pixels=40 * 40)
            proxy = store = None
            if shadow:
                store = LocalStore(processor.settings, config.data, workers=0, slice_bytes=4 * 1024)
                opened.callback(store.close)
                proxy = ProxyMedia(store, MediaIndex())
            loader = PromptLoader(sources, dict.fromkeys(sources, 1.0), seed)
            return types.SimpleNamespace(store=store, prompts=Preparer(processor, loader, config, proxy=proxy))

        yield functools.cache(make)


def settings_of(strategy: str, together: bool = True):
    config = make_config(tokens_per_row=128, rows=1 if strategy == "odc" else 2, patches=512, share=together)
    config.sharding.strategy = STRATEGIES[strategy]()
    config.sharding.devices = DEVICES
    config.data.cache_gib = 1e-5  # ten kilobytes: much is decoded again
    config.rollout.max_sequence_tokens, config.rollout.max_new_tokens = 160, 16
    return config


def answered(prepared, seed: int) -> list[Group]:
    """A group for each prompt, of responses of random lengths."""
    rng = np.random.default_rng(seed)
    sizes = {draw: rng.integers(1, 12, rng.integers(1, 4)).tolist() for draw in sorted(prepared)}
    return [random_group(prepared[draw].prompt, own, rng) for draw, own in sizes.items()]


def by_draw(prepared):
    return {one.prompt.draw: one for one in prepared}


@pytest.mark.medium
@pytest.mark.parametrize("strategy", ["fsdp", "flex_ulysses", "odc"])
@given(
    seed=st.integers(0, 3),
    first=st.integers(0, 200),
    count=st.integers(1, 7),
    processes=st.sampled_from([1, 2, 4]),
    together=st.booleans(),
    near=st.sampled_from([0, 1 << 13, 1 << 30]),
)
@settings(deadline=None, max_examples=third_of(12))
def test_batches_of_every_process_are_those_of_central(
    strategy, process, seed, first, count, processes, together, near
):
    draws = range(first, first + count)
    central, zero = process(strategy, seed, False), process(strategy, seed, True)
    plain, shadowed = by_draw(central.prompts.again(draws)), by_draw(zero.prompts.again(draws))
    assert sorted(plain) == sorted(shadowed) == list(draws)
    assert [one.prompt for one in plain.values()] == [one.prompt for one in shadowed.values()]
    groups = answered(plain, seed + first)
    make = functools.partial(Composer, settings_of(strategy, together), DEVICES, MODEL.vision, MODEL.text)
    wanted, planned = (make().outline(groups, prepared).cut(processes) for prepared in (plain, shadowed))
    fetched = 0
    for number, (want, share) in enumerate(zip(wanted, planned, strict=True)):
        # Each process has a store of its own, and may have decoded nothing of this before.
        here = zero if number == 0 else process(strategy, seed + 100 * number, True)
        here.prompts.loader = zero.prompts.loader

        def inputs(media, here=here):
            told_media = {draw: heard for draw, heard in media.items() if heard is not None}
            assert all(place == f"place of {ticket}" for heard in told_media.values() for ticket, place in heard)
            tickets = {draw: [ticket for ticket, _ in heard] for draw, heard in told_media.items()}
            texts = here.prompts.again(draw for draw, heard in media.items() if heard is None)
            assert all(one.inputs.patches_PX is None for one in texts), "pixels are never decoded for an order"
            return here.prompts.laid_out(tickets) | {draw: one.inputs for draw, one in by_draw(texts).items()}

        rows, responses = told(share, lambda ticket: f"place of {ticket}")
        order = decode(b"".join(encode(Learn(1, [rows], responses))))
        assert isinstance(order, Learn)
        [read] = shares_of(order, inputs)
        got, expected = make().lay_out(read), make().lay_out(want)
        assert [m.owner for m in got.microbatches] == [m.owner for m in expected.microbatches]
        with (
            contextlib.closing(NearPixels(here.store, near)) as pixels,
            contextlib.closing(Materializer(pixels.fetch if near else here.store.fetch)) as materializer,
        ):
            for one in shadowed.values():
                pixels.expect(rows_of(one.inputs))
            materializer.expect(got.batches)
            for ours, theirs in zip(got.batches, expected.batches, strict=True):
                assert_same(materializer.read(ours), theirs)
            fetched += materializer.totals.bytes
    pixels = sum(one.inputs.patches_PX.nbytes for one in plain.values() if one.inputs.patches_PX is not None)
    pieces = sum(len(group.samples) for group in groups)
    assert (fetched > 0) == (pixels > 0)
    assert fetched <= pieces * pixels, "no process fetches what others compute"


def assert_same(ours, theirs) -> None:
    """Bit for bit, or abstract alike."""
    own, others = (jax.tree_util.tree_leaves_with_path(tree) for tree in (ours, theirs))
    assert [path for path, _ in own] == [path for path, _ in others]
    for (path, got), (_, want) in zip(own, others, strict=True):
        assert type(got) is type(want), path
        assert (got.shape, got.dtype) == (want.shape, want.dtype), path
        if isinstance(got, np.ndarray):
            assert got.tobytes() == want.tobytes(), jax.tree_util.keystr(path)


def test_prompts_of_equal_tokens_and_grids_are_laid_out_once(process, monkeypatch):
    prompts, calls = process("fsdp", 77, True).prompts, []
    original = Processor.lay_out
    monkeypatch.setattr(Processor, "lay_out", lambda *args: calls.append(args[1]) or original(*args))
    kept = prompts.again(range(63))
    laid_out = [each.inputs.laid_out() for each in kept for _ in range(3)]
    assert len(calls) == len({(len(said), said.token_ids.tobytes(), said.media) for said in calls}) < len(kept)
    for own, inputs in zip(kept, laid_out[::3], strict=True):
        tickets = [Ticket.parse(rows.ticket) for rows in rows_of(own.inputs)]
        token_ids = tokenised(prompts.processor, own.prompt, False)
        alone = original(prompts.processor, *outlined(prompts.processor, token_ids, tickets))
        assert inputs.patches_PX == own.inputs.patches_PX == alone.patches_PX, "pixels are the prompt's own"
        assert (inputs.frame_edges, inputs.next_position) == (alone.frame_edges, alone.next_position)
        for name in ("token_ids_T", "positions_3T", "feature_index_T"):
            np.testing.assert_array_equal(getattr(inputs, name), getattr(alone, name))
        with pytest.raises(ValueError, match="read-only"):
            inputs.positions_3T[:] = 0
