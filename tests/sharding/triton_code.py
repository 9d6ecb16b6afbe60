"""The machine code of Triton kernels, made without a GPU: for the programs `*_program.py`, and what must hold of it."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a program may have
# Bytes that a kernel of wide heads may spill, where a GPU has timed that it is quicker so than with smaller tiles.
TIMED_SPILLS = {("key_gradients bfloat16 80", 90): 160, ("key_gradients bfloat16 128", 90): 160}
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # the instructions that multiply


def machine_code(programs, capability, sass=False):
    """Of each kernel that the programs `{name: (function, arrays)}` launch: registers, bytes of spills and of shared
    memory, and the tensor core instructions of its PTX; with `sass` also its threads and its machine code as text. Call
    it before anything imports jax_triton."""
    import triton  # pyright: ignore[reportMissingImports]

    from sharding.mesh import Target, compiling_for

    dump = pathlib.Path(tempfile.mkdtemp())
    os.environ["JAX_TRITON_DUMP_DIR"] = str(dump)  # read when jax_triton is imported, which is with the first kernel
    found = {}
    for name, (function, arrays) in programs.items():
        before = set(dump.glob("*/*.ptx"))
        with compiling_for(Target("gpu", capability)):
            jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
        for ptx in set(dump.glob("*/*.ptx")) - before:
            tools = pathlib.Path(str(triton.__file__)).parent / "backends/nvidia/bin"
            found[f"{ptx.stem} {name}"] = _assembled(ptx, capability, tools)
            if sass:
                found[f"{ptx.stem} {name}"] |= _disassembled(ptx, tools)
    shutil.rmtree(dump)
    return found


def _disassembled(ptx, tools):
    command = [tools / "nvdisasm", "-c", ptx.with_suffix(".cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"threads": int(re.findall(r"\.(?:reqntid|maxntid) (\d+)", ptx.read_text())[0]), "sass": text}


def _assembled(ptx, capability, tools):
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    assembler = tools / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    command = [assembler, "-v", f"--gpu-name={name}", ptx, "-o", ptx.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ptx.with_suffix(".cubin").stat().st_size > 0
    code = ptx.read_text()
    return {
        "registers": int(re.findall(r"Used (\d+) registers", done.stderr)[0]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        "shared": int(re.findall(r"shared_mem_bytes: (\d+)", ptx.with_suffix(".compile_info").read_text())[0]),
        "serialized": "serialized" in done.stderr,
        **{way: len(re.findall(rf"\b{way}\.", code)) for way in TENSOR_CORES.values()},
    }


def run_one(**programs):
    """Prints, as JSON, what the program that the command line names returns."""
    with contextlib.redirect_stdout(sys.stderr):
        name, *rest = sys.argv[1:]
        result = programs[name](*map(int, rest))
    print(json.dumps(result))


def meshes():
    """Meshes of two H100s and of two CPUs."""
    devices = AbstractDevice("NVIDIA H100", 132, "gpu"), AbstractDevice("cpu", None, "cpu")
    return [AbstractMesh((2,), ("d",), (AxisType.Auto,), abstract_device=device) for device in devices]


def kernel_calls(step, *arguments):
    """The number of kernels, of Triton or Mosaic, that a step calls on a GPU."""
    text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"@(?:triton_kernel_call|mosaic_gpu)", text))


def assert_no_spills_and_tensor_cores(kernels, capability):
    """The kernels of `machine_code` keep to the card's registers and shared memory; those of bfloat16 multiply as well
    as it can."""
    for name, code in kernels.items():
        assert code["spilled"] <= TIMED_SPILLS.get((name, capability), 0) and not code["serialized"], (name, code)
        assert code["shared"] <= SHARED_MEMORY[capability], (name, code)
        if "bfloat16" in name:  # decoding has 16 queries a key, too few for the newer instructions
            assert code["mma" if name.startswith("attend ") else TENSOR_CORES[capability]] > 0, (name, code)
