"""Text that appears while it is generated: whole characters, nothing of a stop string, nothing taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from rollout.text_stream import TextStream


def bytes_tokenizer() -> Tokenizer:
    """One token a byte, as the smallest of Qwen's tokens."""
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


BYTES = bytes_tokenizer()


def test_characters_of_several_bytes_come_whole():
    stream = TextStream(BYTES.decode)
    pieces = [stream.add([id]) for id in BYTES.encode("aé€😀b").ids]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]
    assert stream.finish() == "" and stream.text == "aé€😀b"


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    stream = TextStream(BYTES.decode)
    ids = BYTES.encode("a😀").ids[:-1]
    assert stream.add(ids) == "a"
    assert stream.finish() == BYTES.decode(ids)[1:] and "�" in stream.text


def test_bytes_that_never_become_a_character_do_not_stop_the_text():
    broken = BYTES.encode("😀").ids[:-1]
    ids = [*broken, *BYTES.encode("after").ids]
    stream = TextStream(BYTES.decode)
    assert "".join([*(stream.add([id]) for id in ids), stream.finish()]) == BYTES.decode(ids)


def letters(ids) -> str:
    return "".join("abc"[id] for id in ids)


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_text_ends_before_the_first_stop_string(ids, stops, chunk):
    """Whatever the chunks, the text is that of the shortest response that contains a stop string, cut before it."""
    stream = TextStream(letters, stops)
    pieces = []
    for start in range(0, len(ids), chunk):
        pieces.append(stream.add(ids[start : start + chunk]))
        if stream.stopped:
            break
    pieces.append(stream.finish())

    end = next((n for n in range(len(ids) + 1) if any(stop in letters(ids[:n]) for stop in stops)), None)
    assert stream.stopped == (end is not None)
    assert stream.token_ids == ids[:end]
    whole = letters(ids[:end])
    cut = min((whole.index(stop) for stop in stops if stop in whole), default=len(whole))
    assert stream.text == "".join(pieces) == whole[:cut]


def test_the_beginning_of_a_stop_string_waits():
    stream = TextStream(letters, ["bbc"])
    assert [stream.add([id]) for id in (0, 1, 1, 1, 0, 1)] == ["a", "", "", "b", "bba", ""]
    assert stream.finish() == "b"
