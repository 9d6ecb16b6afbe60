"""The program that `torch_sender` runs in a process with PyTorch: orders and answers are lines of JSON.

Nothing of this project is imported here, for the interpreter that has PyTorch may have none of it.

    {"do": "listen", "address": A}                                -> {"port": P}, of a store for joining groups
    {"do": "join", "name": G, "backend": "gloo" | "nccl", "size": N}    as rank 0 of N; answers when all have joined
    {"do": "broadcast", "file": F, "names": [...]}                one flattened bucket, to all of the group
    {"do": "share", "file": F, "names": [...], "ranks": N}        -> {"handles": [...]}, a CUDA IPC handle a rank
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportMissingImports=false
# (of the process groups, PyTorch's stubs say less than its documentation)
import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from safetensors import safe_open

WAIT = datetime.timedelta(seconds=600)
store = group = staged = None


def flattened(file, names):
    """The tensors by name, and their bytes, one tensor behind the other."""
    with safe_open(file, framework="pt") as tensors:
        parts = [(name, tensors.get_tensor(name)) for name in names]
    return parts, torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in parts])


def listen(address):
    global store
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=WAIT)
    return {"port": store.port}


def join(name, backend, size):
    """Joins a group as rank 0. The names of the keys are those of SGLang's `init_custom_process_group`."""
    global group
    device = "cpu" if backend == "gloo" else "cuda"
    keys = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    kind = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    group = device, kind(keys, 0, size, WAIT)
    return {}


def broadcast(file, names):
    assert group is not None
    device, members = group
    members.broadcast(flattened(file, names)[1].to(device), 0).wait()
    return {}


def share(file, names, ranks):
    """Puts a bucket on the GPU, where it stays until the next one takes its place. Never run: it takes a GPU."""
    global staged
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=flattened(file, names)[0])
    flat = bucket.get_flattened_tensor()
    if staged is None or staged.numel() < flat.numel():
        staged = torch.empty(flat.numel(), dtype=torch.uint8, device="cuda")
    staged[: flat.numel()].copy_(flat)
    torch.cuda.synchronize()
    content = {"flattened_tensor": staged[: flat.numel()], "metadata": bucket.get_metadata()}
    return {"handles": [MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(ranks)]}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to stderr
    os.dup2(2, 1)
    known = {"listen": listen, "join": join, "broadcast": broadcast, "share": share}
    print(json.dumps({"torch": torch.__version__}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = known[order.pop("do")](**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
