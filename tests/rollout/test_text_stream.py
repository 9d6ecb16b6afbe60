"""Text that appears while it is generated: whole characters, nothing of a stop string, nothing taken back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from turns import third_of

from rollout.generate_command import TextStream


def bytes_tokenizer() -> Tokenizer:
    """One token a byte, as the smallest of Qwen's tokens."""
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


BYTES = bytes_tokenizer()
BYTE_IDS = {
    byte: BYTES.encode(text).ids[i]
    for text in ("\x00", *map(chr, range(1, 256)), "€", "😀", "�")
    for i, byte in enumerate(text.encode())
}


def test_characters_of_several_bytes_come_whole():
    stream = TextStream(BYTES)
    pieces = [stream.add([id]) for id in BYTES.encode("aé€😀b").ids]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]
    assert stream.finish() == "" and stream.text == "aé€😀b"


@settings(max_examples=third_of(200))
@given(
    st.lists(
        st.sampled_from(["a", "b", "né", "€", "😀", "stop", "👩‍🚀", "\ufffd", b"\xf0\x9f", b"\x98", b"\xe2\x82"]),
        max_size=60,
    ),
    st.lists(st.sampled_from(["é€", "stop", "😀😀", "s", "top€n"]) | st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(1, 7),
)
def test_long_text_is_that_of_all_tokens_at_once(words, stops, chunk):
    """Characters and stop strings are split across tokens, and bytes that are no characters stand between them."""
    ids = [BYTE_IDS[byte] for word in words for byte in (word.encode() if isinstance(word, str) else word)]
    stream = TextStream(BYTES, stops)
    pieces = [stream.add(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    pieces.append(stream.finish())

    def shown(n: int) -> str:
        return BYTES.decode(ids[:n]).rstrip("\ufffd")

    end = next((n for n in range(len(ids) + 1) if any(stop in shown(n) for stop in stops)), None)
    assert stream.stopped == (end is not None) and stream.token_ids == ids[:end]
    whole = BYTES.decode(ids) if end is None else shown(end)
    cut = min((whole.index(stop) for stop in stops if stop in whole), default=len(whole)) if stream.stopped else None
    assert stream.text == "".join(pieces) == whole[:cut]


def test_the_beginning_of_a_stop_string_waits():
    stream = TextStream(BYTES, ["bbc"])
    assert [stream.add([id]) for id in BYTES.encode("abbbab").ids] == ["a", "", "", "b", "bba", ""]
    assert stream.finish() == "b"
