"""Small chat templates that behave like those of published checkpoints, and a tokenizer that merges as theirs do."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from models.processing.tiny import SPECIAL_TOKENS

_SHOW = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
_LAST = (  # the number of the user's last message
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_TOOL = "<|im_start|>user\n<tool_response>\n{{ text }}\n</tool_response><|im_end|>\n"
_OTHER = (
    "{% elif message.role == 'tool' %}" + _TOOL + "{% else %}<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN2_5 = (
    _SHOW + "{% for message in messages %}{% set text = show(message.content) %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% if false %}" + _OTHER + "{% endif %}"
)
QWEN3 = (  # drops the reasoning of turns before the user's last message
    _SHOW + _LAST + "{% for message in messages %}{% set text = show(message.content) %}"
    "{% if message.role == 'assistant' %}{% if loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{{ text }}<|im_end|>\n" + _OTHER + "{% endif %}"
)
QWEN3_5 = (  # opens the reasoning of each turn, and strips texts
    _SHOW + _LAST + "{% for message in messages %}{% set text = show(message.content) | trim %}"
    "{% if message.role == 'assistant' %}{% set answer = text.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] | trim if '</think>' in text else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}<|im_end|>\n" + _OTHER + "<think>\n{% endif %}"
)
LLAMA = (  # writes results of tools as JSON
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content | tojson if message.role == 'tool' else message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
COUNTED = QWEN2_5.replace("You help.", "You help. {{ messages | length }} messages.")
DEAF = QWEN2_5.replace(_TOOL, "")  # ignores results of tools
STRICT = QWEN2_5.replace(_TOOL, "{{ raise_exception('no tools') }}")
CONTROL = (*SPECIAL_TOKENS, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE whose merges reach over line breaks and the spaces before words, as Qwen's do."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL_TOKENS[:1]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["user\n\n", "assistant\n\n\n", ">\n\n", " \n", "\n \n", " the answer\n", "tool_response>\n", " seconds>"]
    tokenizer.train_from_iterator([*lines, *(json.dumps(line) for line in lines)] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return tokenizer
