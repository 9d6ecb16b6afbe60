"""Preparation ahead of use: order, states, limits, and files that cannot be used."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from run_cases import write_jsonl

from fluxjax.base.errors import DataError
from fluxjax.base.types import Media, MediaKind, PreparedPrompt, Prompt
from fluxjax.config import Config
from fluxjax.data.loader import PromptLoader, SkippedPrompt, open_source
from fluxjax.data.local_store import LocalStore
from fluxjax.data.prepare import Preparer, PromptLimits, prepare_prompt
from fluxjax.data.shadows import MediaIndex, ProxyMedia
from fluxjax.data.sources import all_texts, common_words
from fluxjax.tasks.digits import DigitsRecipe
from fluxjax.tasks.embedded import StringsRecipe, ensure
from fluxjax.tasks.pans import PansRecipe
from models.config import PatchLayout
from models.processing import Processor, tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedded")
    return {
        "digits": ensure("digits", root, DigitsRecipe(train=20, held_out=4)),
        "pans": ensure("pans", root, PansRecipe(train=6, held_out=4)),
        "reverse": ensure("reverse", root, StringsRecipe(train=10, held_out=2)),
    }


@pytest.fixture(autouse=True, params=["central", "shadow"])
def proxies(request):
    """What `build` gives preparers: nothing, or a store that decodes for them. Everything else must be the same."""
    with contextlib.ExitStack() as stack:

        def proxy(processor, config):
            if request.param == "central" or not isinstance(processor, Processor):
                return None
            store = LocalStore(processor.settings, config.data, workers=0)
            stack.callback(store.close)
            return ProxyMedia(store, MediaIndex())

        PROXY[:] = proxy, stack
        yield


PROXY: list[Any] = []  # and the stack that closes what `build` makes


def build(path_by_name, *, processor=None, tokens=64, patches=256, vision=True, ahead=8):
    """A preparer with its processor, over manifests."""
    sources = {name: open_source(path, name) for name, path in path_by_name.items()}
    processor = processor or tiny.build(
        all_texts(sources.values()),
        common_words(sources.values()),
        layout=PatchLayout(patch_size=8, window_size=32) if vision else None,
    )
    config = Config()
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens = 16, tokens + 16
    config.packing.patches_per_device = patches
    loader = PromptLoader(sources, dict.fromkeys(sources, 1.0), 0)
    proxy, stack = PROXY
    preparer = Preparer(processor, loader, config, ahead=ahead, proxy=proxy(processor, config))
    return stack.enter_context(contextlib.closing(preparer))


def draw_all(preparer, counts):
    async def run():
        return [await preparer.draw(count) for count in counts]

    return asyncio.run(run())


class Counting:
    """A processor that counts what it has prepared."""

    def __init__(self, processor):
        self.processor, self.count, self.changed = processor, 0, threading.Condition()
        self.tokenise = self.tokenise_chat = processor.tokenise
        self.outline = processor.outline

    def prepare_ids(self, token_ids, media):
        result = self.processor.prepare_ids(token_ids, media)
        with self.changed:
            self.count += 1
            self.changed.notify_all()
        return result

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, timeout=300)


def draws(results):
    return [p.prompt.draw for prepared, _ in results for p in prepared]


@pytest.mark.medium
def test_images_videos_and_text_come_prepared_in_draw_order(folders):
    preparer = build({name: folder / "train.jsonl" for name, folder in folders.items()})
    results = draw_all(preparer, [6, 1, 9])
    assert [len(prepared) for prepared, _ in results] == [6, 1, 9] and draws(results) == list(range(16))
    for prepared in (p for result, _ in results for p in result):
        prompt, vision = prepared.prompt, prepared.inputs.laid_out().vision
        if prompt.source == "reverse":
            assert vision is None
        else:
            # a digit is 2 x 2 patches; of a clip, 4 frames make 2 pairs of 4 x 4 patches
            assert vision.num_patches == (32 if prompt.source == "pans" else 4 * len(prompt.answer))


def test_text_alone_needs_no_vision(folders):
    preparer = build({"reverse": folders["reverse"] / "train.jsonl"}, vision=False)
    ((prepared, skipped),) = draw_all(preparer, [4])
    assert len(prepared) == 4 and not skipped
    assert isinstance(preparer.processor, Processor)
    assert all(preparer.processor.decode(p.inputs.laid_out().token_ids_T.tolist()) == p.prompt.text for p in prepared)


@pytest.mark.medium
def test_the_state_is_of_what_was_handed_out_whatever_was_read_ahead(folders):
    paths = {name: folder / "train.jsonl" for name, folder in folders.items()}
    straight = build(paths)
    whole = [p.prompt for prepared, _ in draw_all(straight, [40]) for p in prepared]
    counted = Counting(straight.processor)
    preparer = build(paths, processor=counted)
    assert preparer.state_dict()["next_index"] == 0
    done = 0
    for count in (7, 2, 7, 8):
        draw_all(preparer, [count])
        done += count
        counted.wait_for(done + 1)  # more than what was drawn has been prepared by now
        state = json.loads(json.dumps(preparer.state_dict()))
        assert state["next_index"] == done
        resumed = build(paths)
        resumed.load_state_dict(state)
        assert [p.prompt for prepared, _ in draw_all(resumed, [5]) for p in prepared] == whole[done : done + 5]
    preparer.load_state_dict(straight.state_dict())  # also backwards or forwards, with a queue to drop
    assert draws(draw_all(preparer, [2])) == [40, 41]


def test_it_reads_ahead_while_the_caller_is_busy_and_no_further(folders):
    paths = {"digits": folders["digits"] / "train.jsonl"}
    counted = Counting(build(paths).processor)
    preparer = build(paths, processor=counted, ahead=5)
    draw_all(preparer, [5, 1])
    counted.wait_for(6 + 5)
    time.sleep(0.1)
    assert counted.count == 6 + 5


# --- what cannot be used --------------------------------------------------------------------------


def bad_manifest(folder, clip):
    """Six usable records and four unusable ones, all with real files."""
    Image.new("RGB", (1, 1)).save(folder / "pixel.png")
    rotated = Image.new("RGB", (32, 16))
    exif = rotated.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    rotated.save(folder / "rotated.jpg", exif=exif)
    Image.new("P", (32, 16)).save(folder / "palette.png")
    content = clip.read_bytes()
    (folder / "whole.mp4").write_bytes(content)
    (folder / "cut.mp4").write_bytes(content[: len(content) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no picture")
    files = ["pixel.png", "rotated.jpg", "palette.png", "missing.png", "empty.png", "text.png"]
    records = [{"id": file, "prompt": "<image>Look", "answer": "a", "images": [file]} for file in files]
    for file in ("whole.mp4", "cut.mp4"):
        records.append({"id": file, "prompt": "<video>Look", "answer": "a", "videos": [file]})
    records.append({"id": "plain", "prompt": "Look", "answer": "a"})
    return write_jsonl(folder / "bad.jsonl", records)


def test_files_that_cannot_be_used_are_skipped_counted_and_logged(folders, tmp_path, caplog):
    clip = next((folders["pans"] / "videos").iterdir())
    preparer = build({"bad": bad_manifest(tmp_path, clip)})
    ((prepared, skipped),) = draw_all(preparer, [9])
    visions = {p.prompt.id: p.inputs.laid_out().vision for p in prepared}
    shapes = {id: vision and vision.num_patches for id, vision in visions.items()}
    # A single pixel is enlarged to the least size, 16 x 16; the rotated picture is 16 wide and 32 high, so 2 x 4.
    assert shapes == {"pixel.png": 4, "rotated.jpg": 8, "palette.png": 8, "whole.mp4": 32, "plain": None}
    assert np.asarray(visions["rotated.jpg"].positions_P2).max(0).tolist() == [3, 1], "it is upright"
    reasons = {prompt.id: reason for prompt, reason in skipped}
    assert sorted(reasons) == ["cut.mp4", "empty.png", "missing.png", "text.png"]
    assert reasons["missing.png"] == "no such file" and reasons["empty.png"] == "the file is empty"
    assert preparer.skipped == dict.fromkeys(reasons.values(), 1) and len(set(reasons.values())) == 4
    for id, reason in reasons.items():
        assert f"skipped prompt {id} of bad: {reason} ({tmp_path / id}: " in caplog.text
    state = json.loads(json.dumps(preparer.state_dict()))
    preparer.load_state_dict(state)
    assert preparer.skipped == dict.fromkeys(reasons.values(), 1)


def test_prompts_beyond_the_limits_are_skipped(folders):
    preparer = build({"digits": folders["digits"] / "train.jsonl"}, tokens=8, patches=8)
    ((prepared, skipped),) = draw_all(preparer, [20])
    assert prepared and all(len(p.inputs) <= 8 and p.inputs.laid_out().vision.num_patches <= 8 for p in prepared)
    reasons = {reason for _, reason in skipped}
    assert reasons == {"prompt too long", "too many patches"}
    assert len(prepared) + len(skipped) == 20


def test_bad_rows_of_a_table_are_skipped(tmp_path):
    pq.write_table(pa.table({"problem": ["a?", None, "b?"], "answer": ["1", "2", "3"]}), tmp_path / "x.parquet")
    preparer = build({"x": tmp_path / "x.parquet"}, vision=False)
    ((prepared, skipped),) = draw_all(preparer, [3])
    assert sorted(p.prompt.id for p in prepared) == ["x:0", "x:2"]
    assert [(prompt.id, reason) for prompt, reason in skipped] == [("x:1", "no prompt")]


def test_a_parquet_source_with_embedded_pictures(folders, tmp_path):
    pictures = sorted((folders["digits"] / "images").glob("train-*"))[:6]
    table = pa.table(
        {
            "images": [[picture.read_bytes()] for picture in pictures],
            "problem": ["<image>Digits?"] * 6,
            "answer": [str(np.asarray(Image.open(io.BytesIO(p.read_bytes()))).shape[1] // 16) for p in pictures],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    preparer = build({"x": tmp_path / "x.parquet"})
    ((prepared, skipped),) = draw_all(preparer, [6])
    assert not skipped
    assert all(p.inputs.laid_out().vision.num_patches == 4 * int(p.prompt.answer) for p in prepared)


def test_cells_that_mean_harm_are_skipped_by_name(tmp_path):
    """A session description binds ports where it is opened; a picture of one colour is small and may be huge."""
    session = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 38006 RTP/AVP 26\n"
    large = io.BytesIO()
    Image.new("1", (9000, 9000)).save(large, "PNG")
    table = pa.table(
        {
            "problem": ["<video>Digits?", "<video>Digits?", "<image>Digits?"],
            "videos": [[session], [large.getvalue()], []],
            "images": [[], [], [large.getvalue()]],
            "answer": ["1", "2", "3"],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    preparer = build({"x": tmp_path / "x.parquet"})
    ((prepared, skipped),) = draw_all(preparer, [3])
    assert not prepared
    assert sorted((prompt.id, reason) for prompt, reason in skipped) == [
        ("x:0", "cannot be opened as a video"),
        ("x:1", "cannot be opened as a video"),
        ("x:2", "too many pixels"),
    ]


def test_data_of_which_nothing_can_be_used_ends_in_an_error_not_in_an_endless_search(tmp_path):
    path = tmp_path / "gone.jsonl"
    preparer = build(
        {"gone": write_jsonl(path, [{"prompt": "x", "answer": "y", "image": f"{i}.png"} for i in range(5)])}
    )

    async def search():
        while True:
            await preparer.draw(3)

    with pytest.raises(DataError, match=r"10 prompts in a row could not be used; .*no such file.*: 10"):
        asyncio.run(search())
    write_jsonl(path, [{"prompt": "x" * 70, "answer": "y"}] * 5)
    preparer = build({"long": path}, processor=tiny.build(["x"]))  # "xxx" is no word of the vocabulary
    with pytest.raises(
        DataError, match=r"of long: prompt too long \(70 tokens, but at most 64 leave room for a response\)"
    ):
        asyncio.run(search())


def test_letters_that_the_vocabulary_lacks_are_the_reason():
    """Not that marks and media disagree: the error of held-out prompts that can't be used has the reason only."""
    skipped = prepare_prompt(tiny.build(["x"]), Prompt("a", "s", "xyz", "x"), PromptLimits(10, 10))
    assert isinstance(skipped, SkippedPrompt) and skipped.reason == "characters that the vocabulary lacks"
    assert "['y', 'z']" in skipped.detail


def test_a_prompt_without_tokens_reaches_no_engine():
    skipped = prepare_prompt(tiny.build(["x"]), Prompt("a", "s", "", "y"), PromptLimits(10, 10))
    assert isinstance(skipped, SkippedPrompt) and skipped.reason == "empty prompt"


def test_a_picture_in_a_data_uri_is_decoded_or_named_shortly(tmp_path, caplog):
    uris = [f"data:image/png;base64,{base64.b64encode(png(64, 64, share)).decode()}" for share in (1.0, 0.5)]
    texts = [base64.b64encode(png(64, 64)).decode()]  # as some write it: a path would stand here
    records = [{"prompt": "q", "answer": "1", "image": item} for item in uris + texts]
    preparer = build({"x": write_jsonl(tmp_path / "train.jsonl", records)})
    ((prepared, skipped),) = draw_all(preparer, [3])
    assert [item.prompt.id for item in prepared] == ["1"] and len(skipped) == 2
    assert len(caplog.text) < 2000


def test_words_that_look_like_marks_end_no_run(tmp_path):
    records = [{"prompt": text, "answer": "1"} for text in ("the <video> tag?", "ok")]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    for vision, usable in ((False, 2), (True, 1)):
        preparer = build({"x": path}, vision=vision)
        ((prepared, skipped),) = draw_all(preparer, [2])
        assert len(prepared) == usable and all(reason == "marks and media disagree" for _, reason in skipped)


@pytest.mark.medium
@pytest.mark.parametrize(("bad", "stops"), [(2, False), (6, True)])
def test_too_large_a_share_of_skipped_prompts_ends_the_run(tmp_path, bad, stops):
    """Also where none of them stands behind another; the same after a resume."""
    files = [f"{i}.png" for i in range(10)]
    for file in files[bad:]:
        (tmp_path / file).write_bytes(png(16, 16))
    records = [{"prompt": "<image>?", "answer": "y", "image": file} for file in files]
    preparer, resumed = (build({"x": write_jsonl(tmp_path / "x.jsonl", records)}) for _ in range(2))
    draw_all(preparer, [20] * 4)
    resumed.load_state_dict(preparer.state_dict())
    for each in (preparer, resumed):
        if stops:
            with pytest.raises(DataError, match=r"60 of 100 prompts .* 50% of them.*no such file.*: 60"):
                draw_all(each, [20])
        else:
            assert len(draw_all(each, [20])[0][1]) == 4


def png(width, height, share=1.0):
    """A picture of which only the first part is there."""
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(file, "PNG")
    return file.getvalue()[: int(share * file.tell())]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (PromptLimits(tokens=60, patches=1000), "prompt too long"),
        (PromptLimits(tokens=1000, patches=200), "too many patches"),
        (PromptLimits(tokens=1000, patches=1000), "cannot be decoded as an image"),
    ],
)
def test_of_a_prompt_that_needs_too_much_nothing_is_decoded(limits, reason):
    """Decoding would notice that half of the file is missing."""
    processor = tiny.build(["<image>?"], layout=PatchLayout(patch_size=8, window_size=32))
    prompt = Prompt("a", "s", "<image>?", "", media=(Media(MediaKind.IMAGE, "a.png", png(128, 128, share=0.5)),))
    skipped = prepare_prompt(processor, prompt, limits)
    assert isinstance(skipped, SkippedPrompt) and skipped.reason == reason


class Failing:
    """A processor with a bug."""

    def __init__(self, error):
        self.error = error

    def tokenise(self, text, media) -> list[int]:
        raise self.error

    tokenise_chat = tokenise
    outline: Any = tokenise
    prepare_ids: Any = tokenise


def test_surprises_of_a_decoder_are_skips_but_memory_is_not():
    prompt, limits = Prompt("a", "s", "x", "y"), PromptLimits(10, 10)
    skipped = prepare_prompt(Failing(RuntimeError("odd")), prompt, limits)
    assert isinstance(skipped, SkippedPrompt) and skipped.reason == "failed with RuntimeError"
    with pytest.raises(MemoryError):
        prepare_prompt(Failing(MemoryError()), prompt, limits)


def test_an_error_of_a_worker_reaches_the_caller(folders):
    preparer = build({"digits": folders["digits"] / "train.jsonl"}, processor=Failing(MemoryError("no more")))
    with pytest.raises(MemoryError, match="no more"):
        draw_all(preparer, [2])


def test_the_chat_template_is_used_when_the_configuration_says_so():
    processor = dataclasses.replace(tiny.build(["x"]), chat_template="xx")
    for chat, length in ((False, 1), (True, 2)):
        prepared = prepare_prompt(processor, Prompt("a", "s", "x", "y"), PromptLimits(10, 10), chat)
        assert isinstance(prepared, PreparedPrompt) and len(prepared.inputs) == length


def test_preparation_runs_in_several_threads_and_off_the_callers(folders):
    paths = {"digits": folders["digits"] / "train.jsonl"}
    processor = build(paths).processor
    barrier, names = threading.Barrier(2, timeout=300), set()

    class Watched:
        tokenise = tokenise_chat = staticmethod(processor.tokenise)
        outline = staticmethod(processor.outline)

        def prepare_ids(self, token_ids, media):
            names.add(threading.current_thread().name)
            if barrier.n_waiting or len(names) == 1:
                barrier.wait()  # passes only if another thread prepares meanwhile
                barrier.reset()
            return processor.prepare_ids(token_ids, media)

    preparer = build(paths, processor=Watched())
    assert draws(draw_all(preparer, [2])) == [0, 1]
    assert all(name.startswith("prepare") for name in names)


def test_a_store_that_cannot_answer_ends_the_run_and_costs_no_prompt(folders):
    """That no preprocessor is there is not the fault of thousands of prompts."""

    class Gone:
        concurrency = 2

        def look(self, refs):
            raise DataError("no preprocessor answers")

        def fetch(self, rows):
            raise DataError("no preprocessor answers")

        def close(self): ...

    preparer = build({"digits": folders["digits"] / "train.jsonl"})
    gone = Preparer(preparer.processor, preparer.loader, Config(), proxy=ProxyMedia(Gone(), MediaIndex()))
    with pytest.raises(DataError, match="no preprocessor answers"):
        draw_all(gone, [1])
    assert not gone.skipped
    gone.close()
