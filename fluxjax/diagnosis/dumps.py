"""Hidden states of an SGLang server, read from the tensor dumps of its forward passes."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Container

import numpy as np


class TensorDumps:
    """The folder into which a server dumps tensors. Each rank writes a file for each forward pass. Raises
    ValueError if there is no such folder, or no PyTorch to read dumps with."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)
        if not self._folder.is_dir():
            raise ValueError(f"--dumps {folder}: no such folder; SGLang's flag is --debug-tensor-dump-output-folder")
        try:
            self._torch = importlib.import_module("torch")
        except ImportError as error:
            raise ValueError(f"--dumps is read with PyTorch: {error}: pip install 'fluxjax[parity]'") from None

    def passes(self) -> list[pathlib.Path]:
        """Returns the files of rank 0, in the order of the passes; all ranks of a divided model have equal states."""
        return sorted(self._folder.glob("TP0_*/Pass*.pt"))

    def states(self, earlier: Container[pathlib.Path], layers: int, tokens: int) -> list[np.ndarray]:
        """Returns the hidden states behind each decoder layer, float32 `[T, D]`, of the first `tokens` tokens in passes
        that are not in `earlier`. Raises OSError if these passes do not have the states."""
        # SGLang dumps the innermost modules. The norm in front of layer N + 1 adds the output of layer N to the
        # residual stream, and returns (normalised stream, residual stream).
        norms = [*(f"model.layers.{number}.input_layernorm" for number in range(1, layers)), "model.norm"]
        streams = []
        for file in (file for file in self.passes() if file not in earlier):
            outputs = self._torch.load(file, map_location="cpu", weights_only=True)
            if missing := [name for name in norms if not isinstance(outputs.get(name), list)]:
                raise OSError(f"{file} has no residual stream of {missing[0]}")
            streams.append([outputs[name][1] for name in norms])
            if len({stream.data_ptr() for stream in streams[-1]}) < layers:
                raise OSError(
                    f"{file}: the server's norms overwrite their input, as on a CPU with AMX, so that its layers can't "
                    "be compared"
                )
        computed = sum(len(of_layers[0]) for of_layers in streams)
        if computed < tokens:
            raise OSError(f"{self._folder} has new dumps of {computed} tokens, but the prompt has {tokens}")
        return [self._torch.cat(passes)[:tokens].float().numpy() for passes in zip(*streams, strict=True)]
