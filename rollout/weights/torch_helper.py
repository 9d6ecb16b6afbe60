"""The program that `torch_sender` runs in a process with PyTorch: orders and answers are lines of JSON.

Nothing of this project is imported here, for the interpreter that has PyTorch may have none of it.

    {"do": "listen", "address": A}                                -> {"port": P}, of a store for joining groups
    {"do": "join", "name": G, "backend": "gloo" | "nccl", "size": N}    as rank 0 of N; answers when all have joined
    {"do": "broadcast", "file": F, "names": [...]}                one flattened bucket, to all of the group
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
store = group = None


def flattened(file, names):
    """The bytes of these tensors, one behind the other."""
    with safe_open(file, framework="pt") as tensors:
        return torch.cat([tensors.get_tensor(name).flatten().view(torch.uint8) for name in names])


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
    members.broadcast(flattened(file, names).to(device), 0).wait()
    return {}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to stderr
    os.dup2(2, 1)
    known = {"listen": listen, "join": join, "broadcast": broadcast}
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
