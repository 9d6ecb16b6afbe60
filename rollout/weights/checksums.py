"""Checksums of weights as servers compute them, one a tensor: what they must answer after an update.

`rollout.serve` has the tensors of the checkpoint. SGLang joins some (queries, keys and values; gate and up) and fills
the vocabulary up, and hashes what it holds: the first 8 bytes of SHA-256 on a CPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import numpy as np

VOCABULARY_MULTIPLE = 64  # rows of embedding and head in SGLang; what is missing is zeros
_JOINED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj."),
)
_MOVED = (("model.language_model.", "model."), ("model.visual.", "visual."), (".attn.qkv.", ".attn.qkv_proj."))
_WEIGHTS = (".weight", ".bias")  # ends of the names that are weights; servers hash buffers, too


class WeightsMismatch(RuntimeError):
    """A server does not hold what was sent to it. It must not generate."""


class Checksums:
    """Collects the tensors of one version, in the order of `models.hf.disk_tensors`: parts of a joined one in order."""

    def __init__(self) -> None:
        self._stored: dict[str, str] = {}
        self._joined: dict[str, hashlib._Hash] = {}

    def add(self, name: str, tensor: np.ndarray) -> None:
        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        self._stored[name] = hashlib.sha256(data).hexdigest()[:16]
        served = sglang_name(name)
        hashed = self._joined.setdefault(served, hashlib.sha256())
        hashed.update(data)
        if served in ("model.embed_tokens.weight", "lm_head.weight"):
            missing = -len(tensor) % VOCABULARY_MULTIPLE
            hashed.update(bytes(missing * tensor[:1].nbytes))

    def check(self, held: Mapping[str, str], server: str) -> None:
        """Compares with what a server `held`, under either kind of names. Raises WeightsMismatch, naming server and
        tensor."""
        wanted = self._stored
        if not wanted.keys() <= held.keys():
            wanted = {name: hashed.hexdigest()[:16] for name, hashed in self._joined.items()}
        for name, checksum in wanted.items():
            if held.get(name) != checksum:
                state = "is missing" if name not in held else f"has the checksum {held[name]}, not {checksum}"
                raise WeightsMismatch(f"{server}: after the update of its weights, {name} {state}")
        for name in held:
            if name not in wanted and name.endswith(_WEIGHTS):
                raise WeightsMismatch(f"{server}: holds a tensor {name}, which was not sent")


def sglang_name(name: str) -> str:
    """The parameter of SGLang's Qwen models that a tensor of a checkpoint becomes, or becomes a part of."""
    for old, new in _MOVED:
        name = name.replace(old, new)
    for pattern, new in _JOINED:
        name = pattern.sub(new, name)
    return name
