"""Hands weights of JAX's first device to a process that stands for a server, by the route `ipc`.

python ipc_program.py send OUT.npz      the bytes of each tensor as written, and as the other opened them
python ipc_program.py receive           that other process; it has no JAX
"""

import asyncio
import base64
import io
import pathlib
import pickle
import subprocess
import sys
import types
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent


class Receiver:
    """A client of the process that stands for a server of two ranks, as the route of weights knows a server."""

    def __init__(self):
        command = [sys.executable, __file__, "receive"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ranks, self.begin_weight_update, self.end_weight_update = self.two, self.nothing, self.nothing
        self.received = {}

    async def two(self):
        return 2

    async def nothing(self):
        pass

    async def update_from_tensors(self, handles, version, form):
        self.process.stdin.write(" ".join(handles) + "\n")
        self.process.stdin.flush()
        self.received |= pickle.loads(base64.b64decode(self.process.stdout.readline()))


def send(file):
    """Two versions of a tiny model's weights. The file of the first is wiped before it is delivered: it comes from the
    arrays. The arrays of the second are gone then: it comes from the file."""
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER / "rollout"), str(FOLDER / "models")]
    import jax
    import rollout_cases as cases
    from safetensors.numpy import save_file

    import models
    from models.hf import SINGLE
    from rollout.engine_weights import served
    from rollout.weights.published import SharedFolders, as_bytes
    from rollout.weights.routes import CudaIpc
    from rollout.weights.version_folders import tensors_of

    model = cases.build(cases.VL)
    server: Any = Receiver()
    route = CudaIpc(SharedFolders(model.config, "bfloat16"), served(model.config), 1 << 14)
    params, found = models.split(model)[1], {}
    for version in (1, 2):
        params = jax.tree.map(lambda x: x + 1, params)
        published = route.publish(version, params)
        for name, tensor in tensors_of(published.folder):
            found |= {f"written {version} rank {rank} {name}": as_bytes(tensor) for rank in (0, 1)}
        if version == 1:
            zeros = ((name, np.zeros_like(tensor)) for name, tensor in tensors_of(published.folder))
            save_file(dict(zeros), published.folder / SINGLE)
        else:
            jax.tree.map(lambda x: x.delete(), params)
        asyncio.run(route.deliver(server, published, lambda: asyncio.sleep(0)))
        found |= {f"received {version} {name}": tensor for name, tensor in server.received.items()}
    server.process.communicate()
    route.close()
    np.savez(file, device=jax.devices()[0].device_kind, **found)


def receive():
    """A line of handles a bucket in, a line of its tensors out; it opens them as SGLang does."""
    import torch
    from torch.multiprocessing import reductions

    rebuild: Any = reductions.rebuild_cuda_tensor

    def on_our_device(*arguments: Any):  # as SGLang does: by the UUID
        uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
        return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if name == "FlattenedTensorMetadata":
                return types.SimpleNamespace
            return on_our_device if name == "rebuild_cuda_tensor" else super().find_class(module, name)

    for line in sys.stdin:
        found = {}
        for rank, handle in enumerate(line.split()):
            bucket = Unpickler(io.BytesIO(base64.b64decode(handle))).load()
            for part in bucket["metadata"]:
                tensor = bucket["flattened_tensor"][part.start_idx : part.end_idx]
                assert tensor.view(part.dtype).numel() == part.shape.numel()
                found[f"rank {rank} {part.name}"] = tensor.cpu().numpy()
        print(base64.b64encode(pickle.dumps(found)).decode(), flush=True)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](*sys.argv[2:])
