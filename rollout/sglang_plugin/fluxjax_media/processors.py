# pyright: reportMissingImports=false
"""Reads patches and positions from a request's JSON, which `rollout.wire` wrote, instead of decoding images.

An entry of `image_data` or `video_data` is a string: `FORMAT`, then `{"key": ..., "patches": ..., "grid_thw": ...,
"offsets": ..., "positions": ..., "position_delta": ...}`. Only the first of several samples of a prompt has patches.
With `pieces`, `[[name, count], ...]`, those with a count of 0 came with an earlier turn of the conversation.
A server without this extension answers that the entry is no image.
"""

import base64
import collections
import hashlib
import json
import os
from typing import Any, ClassVar

import torch
from sglang.srt.managers.schedule_batch import MultimodalInputFormat
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

FORMAT = "data:application/x-fluxjax+json,"
KEPT_BYTES = int(os.environ.get("FLUXJAX_MEDIA_BYTES", 1 << 30))  # bytes of patches kept for further samples, at most
DTYPES = {"float32": torch.float32, "int32": torch.int32}


class GivenPatches(QwenVLImageProcessor):
    """SGLang's processor for Qwen2.5-VL, Qwen3-VL and Qwen3.5, which also takes patches."""

    models: ClassVar = [
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLForConditionalGeneration,
        Qwen3_5ForConditionalGeneration,
    ]

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        if os.environ.get("SGLANG_VLM_CACHE_SIZE_MB") != "0":
            raise RuntimeError("set SGLANG_VLM_CACHE_SIZE_MB=0: SGLang keeps features of images through weight updates")
        if hf_config.model_type == "qwen3_5":
            _check_fields(hf_config.text_config, hf_config.vision_config)
        super().__init__(hf_config, *args, **kwargs)
        self._kept: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self._bytes = 0

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        image_data = [self._given(entry, "") for entry in image_data or []] or image_data
        if request_obj.video_data:
            request_obj.video_data = [self._given(entry, "_videos") for entry in request_obj.video_data]
        return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)

    def _given(self, entry: Any, kind: str) -> Any:
        """The output of Hugging Face's processor for these media if `entry` begins with `FORMAT`, else `entry`."""
        if not isinstance(entry, str) or not entry.startswith(FORMAT):
            return entry
        entry = json.loads(entry[len(FORMAT) :])
        key = entry["key"]
        if "patches" in entry:
            told = {name: _tensor(entry[name]) for name in ("patches", "grid_thw", "offsets")}
            self._keep(key, told | {"patches": self._completed(told["patches"], entry.get("pieces"))})
        media = self._found(key)
        grids = media["grid_thw"].long()
        given = {
            "format": "processor_output",
            f"pixel_values{kind}": media["patches"],
            "offsets": media["offsets"].long(),  # first and last token of each frame pair
            # Positions of the prompt and of its response so far; they are equal in image and video entries.
            "mrope_positions": _tensor(entry["positions"]).long(),
            "mrope_position_delta": torch.tensor([[entry["position_delta"]]]),
        }
        if not kind:
            return {**given, "image_grid_thw": grids}
        # Every frame pair is passed as a video of its own: SGLang's layers of full attention join the frame pairs of
        # one video, but the model's authors and transformers keep frame pairs apart.
        frames = grids.repeat_interleave(grids[:, 0], dim=0)
        frames[:, 0] = 1
        times = given["mrope_positions"][0, given["offsets"][:, 0]]
        return {**given, "video_grid_thw": frames, "second_per_grid_ts": times}

    def _postprocess_mm_items_before_transport(self, mm_items: list[Any], *, images: Any) -> list[Any]:
        """Gives different hashes to media with equal pixels but different shapes. SGLang hashes pixels alone, confuses
        the features of such media, and dies if an image equals a frame of a video."""
        mm_items = super()._postprocess_mm_items_before_transport(mm_items, images=images)
        for item in mm_items:
            if item.format is MultimodalInputFormat.PROCESSOR_OUTPUT:
                shape = [item.modality.name, *map(str, sorted(item.model_specific_data.items()))]
                digest = hashlib.sha256(" ".join(shape).encode())
                digest.update(item.feature.contiguous().numpy().data)
                item.hash = int.from_bytes(digest.digest()[:8], "big")
        return mm_items

    def _completed(self, patches: torch.Tensor, pieces: list[Any] | None) -> torch.Tensor:
        """The patches of all pieces, as `rollout.wire.completed` has them."""
        for name, count in pieces or ():
            if count:
                self._keep(name, {"patches": patches[:count].clone()})
                patches = patches[count:]
        return torch.cat([self._found(name)["patches"] for name, _ in pieces]) if pieces else patches

    def _found(self, key: str) -> dict[str, Any]:
        if key not in self._kept:
            raise ValueError(f"media {key} are not here any more: send them again, or raise FLUXJAX_MEDIA_BYTES")
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        if key in self._kept:
            return
        self._kept[key] = tensors
        self._bytes += tensors["patches"].nbytes
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest["patches"].nbytes


def _check_fields(text: Any, vision: Any) -> None:
    """Raises RuntimeError for a Qwen3.5 that SGLang would compute wrongly, since its config.json lacks a field."""
    rotated = {"partial_rotary_factor": text.partial_rotary_factor, **(text.rope_parameters or {})}
    share, missing = rotated["partial_rotary_factor"], []
    if share != text.partial_rotary_factor:
        missing.append(f'"partial_rotary_factor": {share} in text_config, beside rope_parameters')
    if vision.deepstack_visual_indexes:
        missing.append('"deepstack_visual_indexes": [] in vision_config')
    if missing:
        raise RuntimeError(f"config.json of the model lacks {' and '.join(missing)}: add what is missing")


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    data, dtype = bytearray(base64.b64decode(value["data"], validate=True)), DTYPES[value["dtype"]]
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(value["shape"])
