"""Prompts prepared by worker processes: the same draws, and what happens when a process or the run is killed."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_cases import TESTS, alive, running, until

from fluxjax.base.errors import DataError
from fluxjax.config import Config
from fluxjax.data.loader import PromptLoader
from fluxjax.data.prepare import Preparer
from fluxjax.data.sources import all_texts, open_source
from fluxjax.tasks.digits import DigitsRecipe
from fluxjax.tasks.embedded import ensure
from fluxjax.tasks.pans import PansRecipe
from fluxjax.tasks.strings import StringsRecipe
from models.config import PatchLayout
from models.processing import tiny

pytestmark = pytest.mark.slow  # a process takes seconds to start


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The embedded data sets, and a table with embedded pictures of which one is broken."""
    root = tmp_path_factory.mktemp("embedded")
    recipes = {
        "digits": DigitsRecipe(train=6, held_out=4),
        "pans": PansRecipe(train=3, held_out=4),
        "reverse": StringsRecipe(train=5, held_out=2),
    }
    folders = {name: ensure(name, root, recipe) for name, recipe in recipes.items()}
    pictures = [file.read_bytes() for file in sorted((folders["digits"] / "images").glob("train-*"))[:6]]
    pictures[2] = b"no picture"
    table = pa.table({"images": [[p] for p in pictures], "problem": ["<image>Digits?"] * 6, "answer": ["1"] * 6})
    pq.write_table(table, root / "table.parquet", row_group_size=2)
    return {name: folder / "train.jsonl" for name, folder in folders.items()} | {"table": root / "table.parquet"}


def build(paths, workers):
    sources = {name: open_source(path, name) for name, path in paths.items()}
    processor = tiny.build(all_texts(sources.values()), [], layout=PatchLayout(patch_size=8, window_size=32))
    config = Config()
    config.rollout.prompts_per_step, config.data.workers = 8, workers
    return Preparer(processor, PromptLoader(sources, dict.fromkeys(sources, 1.0), 0), config)


def draw(preparer, count):
    return asyncio.run(preparer.draw(count))


@pytest.mark.long
def test_processes_prepare_the_same_prompts_and_a_state_does_not_know_their_number(paths):
    threads = build(paths, workers=0)
    expected, bad = draw(threads, 30)
    assert [(prompt.id, reason) for prompt, reason in bad] == [("table:2", bad[0][1])]
    state, found, skipped = threads.state_dict() | {"next_index": 0, "skipped": {}}, [], []
    for workers, count in ((2, 11), (0, 6), (1, 13)):
        with contextlib.closing(build(paths, workers)) as preparer:
            preparer.load_state_dict(state)
            prepared, unusable = draw(preparer, count)
            assert len(multiprocessing.active_children()) == workers
            found, skipped = found + prepared, skipped + unusable
            state = json.loads(json.dumps(preparer.state_dict()))
        assert not multiprocessing.active_children(), "closing ends them"
        assert state["next_index"] == len(found) + len(skipped)
    assert [item.prompt for item in found] == [item.prompt for item in expected] and skipped == bad
    assert state == threads.state_dict()
    for item, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(item.inputs.laid_out().token_ids_T, other.inputs.laid_out().token_ids_T)
        assert (item.inputs.patches_PX is None) == (other.inputs.patches_PX is None)
        if item.inputs.patches_PX is not None:
            np.testing.assert_array_equal(item.inputs.patches_PX, other.inputs.patches_PX)
    threads.close()


@pytest.mark.slow
def test_signals_that_ask_the_run_to_stop_are_left_to_the_run(paths):
    """Slurm sends SIGTERM to every process of a job, a terminal Ctrl-C; the run may draw on up to its next boundary."""
    with contextlib.closing(build(paths, workers=1)) as preparer:
        draw(preparer, 1)
        (process,) = multiprocessing.active_children()
        assert process.pid
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        process.join(0.5)
        assert process.is_alive()
        assert sum(map(len, draw(preparer, 40))) == 40
    assert not multiprocessing.active_children()


def test_an_error_of_a_source_is_no_lack_of_memory(paths):
    def broken():
        raise RuntimeError("a bug of a source")
        yield

    with contextlib.closing(build(paths, workers=1)) as preparer:
        preparer._iterator = broken()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(RuntimeError, match="a bug of a source"):
            draw(preparer, 1)
        preparer._iterator = None


def test_a_process_that_is_killed_is_an_error_that_says_so(paths):
    with contextlib.closing(build(paths, workers=1)) as preparer:
        draw(preparer, 1)
        (process,) = multiprocessing.active_children()
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"data\.workers=1: .*terminated unexpectedly with exit code -9"):
            draw(preparer, 100)  # more than it had prepared


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_named(paths, tmp_path):
    file = tmp_path / "broken.parquet"
    content = bytearray(paths["table"].read_bytes())
    content[4:300] = b"\xff" * 296  # within the first row group
    file.write_bytes(content)
    with (
        contextlib.closing(build(paths | {"table": file}, workers=1)) as preparer,
        pytest.raises(DataError, match=rf"{file}: row group 0 cannot be read"),
    ):
        draw(preparer, 40)


RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
sys.path.insert(0, {tests!r})
if __name__ == "__main__":
    import pathlib, multiprocessing
    from test_workers import build, draw
    preparer = build({{"reverse": pathlib.Path({path!r})}}, workers=2)
    draw(preparer, 4)
    try:
        print(*[process.pid for process in multiprocessing.active_children()], flush=True)
        for _ in range(6000):  # an interrupt between a look for one and a long sleep would be slept over
            time.sleep(0.1)
    except KeyboardInterrupt:
        draw(preparer, 40)
        print("still drawing", flush=True)
        time.sleep(600)
"""


def test_ctrl_c_leaves_processes_alone_and_a_killed_run_leaves_none(paths, tmp_path):
    with running(RUN.format(tests=TESTS, path=str(paths["reverse"])), tmp_path) as run:
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert run.stdout.readline() == "still drawing\n"
    until(lambda: not alive(pids))
