"""Generates greedily with transformers. `benchmarks/generate.py` runs it in an interpreter that has transformers.

The model comes from the Hugging Face folder that our side has written. `generate` runs unchanged, with its KV cache and
all prompts of a batch at once; no end id is set, so that every answer has the same length.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from common import Channel, peak_rss_mib


def main(settings: Mapping[str, Any]) -> None:
    channel = Channel()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    channel.say(versions={"torch": torch.__version__, "transformers": transformers.__version__})
    length, new = settings["prompt_tokens"], settings["new_tokens"]
    for request in channel.requests():
        batch = request["batch"]
        rng = np.random.default_rng([batch, request["number"]])
        prompts = torch.as_tensor(rng.integers(0, model.config.vocab_size, (batch, length), dtype=np.int32)).long()
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        channel.say(seconds=seconds, tokens=out[:, length:].tolist())
    channel.say(peak_rss_mib=peak_rss_mib())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
