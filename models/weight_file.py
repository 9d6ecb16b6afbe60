"""Writes safetensors files tensor by tensor: the library's own writer needs all of a file's tensors at once."""

import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors names them


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(file: pathlib.Path, contents: Sequence[StoredTensor], values: Iterable[np.ndarray]) -> None:
    """Writes one value for each of `contents`. Takes values from the iterable one by one, and keeps none.

    The format: the length of the header in eight bytes, the header in JSON, filled up to eight bytes, then the tensors
    in its order. Raises ValueError for a value of another shape or dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers reads the framework from it
    end = 0
    for tensor in contents:
        place = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor, value in zip(contents, values, strict=False):  # the remaining values are for other files
            if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{tensor.name} is {value.dtype} of shape {value.shape}, not as announced")
            out.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
