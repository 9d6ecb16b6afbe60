"""Records that other people's programs write, as the READMEs beside them say; they are not part of a user's clone."""

import asyncio
import collections
import contextlib

import pytest

from fluxjax.base.errors import DataError
from fluxjax.config import Config
from fluxjax.data.loader import PromptLoader, at, open_source
from fluxjax.data.prepare import Preparer
from fluxjax.data.sources import all_texts
from models.config import PatchLayout
from models.processing import tiny


def preparer_of(path, *, vision=False, tokens=24):
    source = open_source(path, "s")
    layout = PatchLayout(patch_size=8, window_size=32) if vision else None
    processor = tiny.build(all_texts([source]), layout=layout)
    config = Config()
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens = 8, tokens + 8
    loader = PromptLoader({"s": source}, {"s": 1.0}, 0)
    return contextlib.closing(Preparer(processor, loader, config, ahead=4))


def drawn(path, **options):
    """The prompts of a file that can be used, and how many cannot be, by reason, each drawn once."""
    with preparer_of(path, **options) as preparer:
        order, count = preparer.loader.order, len(preparer.loader.sources["s"])
        prepared, skipped = preparer.prepare_all(at(order, draw) for draw in range(count))
    return prepared, collections.Counter(reason for _, reason in skipped)


ODD = {"an empty prompt": 1, "prompt too long": 3}


@pytest.mark.parametrize(
    ("name", "records", "bad"),
    [
        ("odd", 12, ODD | {"no answer": 1, "an id that was used before": 2}),
        ("odd2", 10, ODD | {"no answer": 1}),
        ("odd3", 9, ODD),
    ],
)
def test_odd_records_are_named_skipped_and_counted(shared_cases, caplog, name, records, bad):
    prepared, skipped = drawn(shared_cases / "rl" / f"{name}.jsonl")
    assert skipped == bad and len(prepared) == records - sum(bad.values())
    assert sum(record.message.startswith("skipped prompt") for record in caplog.records) == sum(bad.values())
    assert all(len(item.inputs) for item in prepared)


@pytest.mark.parametrize(
    ("name", "vision", "prompts"),
    [
        ("html_video_tag.jsonl", False, 2),
        ("images_null_but_image_set.jsonl", True, 1),
        ("data_uri.jsonl", True, 1),
        ("category_answer.parquet", False, 3),
        ("hf_list_fixed_size.parquet", True, 1),
        ("list_of_null_type.parquet", True, 2),
        ("null_column_type.parquet", True, 2),
        ("string_view.parquet", False, 2),
    ],
)
def test_foreign_files_are_read(shared_cases, name, vision, prompts):
    prepared, skipped = drawn(shared_cases / "models" / name, vision=vision, tokens=400)
    assert len(prepared) == prompts and not skipped
    pictures = {"hf_list_fixed_size.parquet": 2, "images_null_but_image_set.jsonl": 1, "data_uri.jsonl": 1}
    assert [len(item.prompt.media) for item in prepared] == [pictures.get(name, 0)] * prompts


def test_the_error_says_why_no_prompt_can_be_used(shared_cases):
    said = r"prompt too long \(\d+ tokens, but at most 24 leave room for a response\)"
    with preparer_of(shared_cases / "rl" / "alllong.jsonl") as preparer, pytest.raises(DataError, match=said):
        asyncio.run(preparer.draw(10))
