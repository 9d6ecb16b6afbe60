"""Serves a local checkpoint to rollouts in other processes: `python -m rollout.serve --model DIR`.

The embedded JAX engine answers the HTTP routes of an SGLang 0.5.23 server, for hosts without SGLang; one client speaks
to both kinds of server. A server that is ready prints one line, `listening on http://HOST:PORT`. SIGTERM and SIGINT end
the server, after it has answered running samples as aborted. Wrong input ends the command with one line on stderr and
exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pathlib
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .listening import (
    Parser,
    add_network_flags,
    bound_socket,
    check_network_flags,
    exit_status,
    number,
    serve_until_told,
)

if TYPE_CHECKING:
    from .jax_engine import JaxEngine
    from .serve_app import RolloutServer

GRACE = 10.0  # seconds for the replies of aborted samples, which may wait for a compilation
TURN = 5.0  # seconds for the program that the engine still runs


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m rollout.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--weight-version", type=number(int, 0, 10**18 - 1), default=0, metavar="N",
                        help="version of the weights in DIR (default 0)")  # fmt: skip
    add_network_flags(parser)
    engine, count, whole = parser.add_argument_group("engine"), number(int, 1), number(int, 0)
    for flag, kind, default, what in (
        ("--slots", count, 256, "samples that run at once (default 256)"),
        ("--max-sequence-tokens", count, 4096, "most tokens of a prompt and its response (default 4096)"),
        ("--kv-tokens", count, None, "tokens that the cache holds (default: as the memory allows)"),
        ("--steps-per-sync", whole, 0, "tokens of a sample in a round (default 0: 4 to 64, on CPUs to 16)"),
        ("--kept-states", whole, 0, "states that Gated DeltaNet keeps between turns of sessions (default 0)"),
        ("--tp", count, 1, "devices that compute together: 1, 2, 4, ... (default 1)"),
    ):
        engine.add_argument(flag, type=kind, default=default, metavar="N", help=what)
    engine.add_argument("--dtype", choices=["float32", "bfloat16"],
                        help="dtype of weights and compute (default: as the checkpoint's embedding)")  # fmt: skip
    options = parser.parse_args(arguments)
    check_network_flags(parser, options)
    return options


def run(options: argparse.Namespace) -> None:
    from models.folder import read_json, why_missing

    if why := why_missing(options.model):
        raise ValueError(f"--model {why}")
    with bound_socket(options.host, options.port) as listening:
        import jax

        import models
        from models.processing import Processor

        from .jax_engine import JaxEngine
        from .serve_app import RolloutServer

        folder = pathlib.Path(options.model)
        processor = Processor.load(folder)
        devices = jax.local_devices()
        if options.tp > len(devices):
            raise ValueError(f"--tp {options.tp}: there are only {len(devices)} devices")
        model = models.load(folder, options.dtype)
        dtype = models.split(model)[1]["embedding"]["table"].dtype
        engine = JaxEngine(
            model,
            slots=options.slots,
            max_sequence_tokens=options.max_sequence_tokens,
            steps_per_sync=options.steps_per_sync,
            kv_tokens=options.kv_tokens or 0,
            kept_states=options.kept_states,
            compute_dtype=dtype,
            devices=devices[: options.tp],
            version=options.weight_version,
        )
        config = model.config
        del model  # the engine has its own copy of the layers
        file = read_json(folder / "config.json", needed=True)
        info = {
            "model_path": options.model,
            "model_type": file.get("model_type"),
            "architectures": file.get("architectures"),
            "max_sequence_tokens": options.max_sequence_tokens,
            "dtype": str(dtype),
        }
        server = RolloutServer(engine, config, processor, dtype=dtype, info=info, token=options.token)
        asyncio.Runner().run(_serve(server, engine, listening))  # closing the runner would wait for threads


async def _serve(server: RolloutServer, engine: JaxEngine, listening: socket.socket) -> None:
    await serve_until_told(server.app, listening, lambda: server.stop(GRACE))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.close(), TURN)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(run, parse(arguments))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would wait for threads that run programs or read weights
