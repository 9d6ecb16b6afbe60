"""Compiler options for XLA:GPU by which all-to-alls run while attention is computed."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

# By default one collective is under way at a time, so that a round's all-to-all back, or a gather of weights, keeps the
# next round's from starting; and a start is placed as late as its estimated duration allows, where a loop over tiles
# counts for nothing: in the backward pass that is after the attention which should hide it. Seen in schedules compiled
# for 8 H100 by jax 0.10.2. All of them get one queue (`operation_queue_id`), that is, they still run in program order.
GPU_OVERLAP: Mapping[str, int | bool] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}


def compiler_options(mesh: Mesh) -> dict[str, int | bool]:
    """Options for `jax.jit(..., compiler_options=...)` of programs with `spread.ulysses` in them; empty but on GPUs."""
    on_gpus = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return dict(GPU_OVERLAP) if on_gpus else {}
