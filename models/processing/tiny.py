"""A processor for tiny models: single characters and a few whole words as tokens, small patches, few frames."""

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from ..config import PatchLayout
from .processor import MARK, MEDIA_TOKENS, PADS, Processor
from .settings import FrameSettings, PixelSettings

END = "<|endoftext|>"
TIMES = "<0123456789. seconds>"  # characters of the times of frame pairs
# The tokens stand in the order of Qwen's vocabularies. `END`, with id 0, pads rows and ends an answer.
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>", *MEDIA_TOKENS)


def build_tokenizer(texts: Iterable[str], words: Sequence[str] = (), *, marks: bool = True) -> Tokenizer:
    """A tokenizer with a token for every character of `texts` and `words`, and for each of `words` as a complete word.
    The order of texts and words does not change ids. Media marks in the texts are skipped, or treated as text with
    `marks=False`. The tokenizer raises an error for an unknown character."""
    characters = sorted(set("".join(MARK.sub("", text) if marks else text for text in texts)) | set("".join(words)))
    whole = sorted(set(words) - set(characters))
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters, *whole))}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    any_of = "|".join(re.escape(word) for word in sorted(whole, key=len, reverse=True))
    pattern = rf"\b(?:{any_of})\b|[\s\S]" if whole else r"[\s\S]"
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def build(
    texts: Iterable[str],
    words: Sequence[str] = (),
    *,
    layout: PatchLayout | None = None,
    min_pixels: int = 16 * 16,
    max_pixels: int = 128 * 128,
    num_frames: int = 4,
) -> Processor:
    """A processor whose tokenizer covers `texts` and `words`. If `layout` is None, the processor takes text only; else
    `layout` must equal `PatchLayout.of(config.vision)` of the model. Only the token `<|endoftext|>` ends an answer."""
    if layout is not None and layout.timed:
        texts = [*texts, TIMES]
    tokenizer = build_tokenizer(texts, words, marks=layout is not None)
    pixels = PixelSettings(min_pixels=min_pixels, max_pixels=max_pixels)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        **({} if layout is None else {f"{kind}_token": token for kind, token in PADS.items()}),
    }
    return Processor(
        tokenizer=tokenizer,
        architecture="qwen2" if layout is None else "qwen3_vl" if layout.timed else "qwen2_5_vl",
        layout=layout or PatchLayout(),
        image=pixels,
        video=pixels,
        frames=FrameSettings(num_frames=num_frames, fps=0),
        eos_ids=(SPECIAL_TOKENS.index(END),),
        tokenizer_config=json.dumps(config),
    )
