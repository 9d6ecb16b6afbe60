"""The files that a run leaves in its folder: the trained model, pictures, a checkpoint that rollout servers start from,
and a log of each process."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import models
from models.decoder import Decoder
from models.processing import Processor

from ..base.timeline import Timeline
from ..batch.composer import Team
from ..config import Config
from ..learner.learner import Learner, lora_of
from ..report import pictures
from ..report.metrics import Summary, read
from ..runtime.engine_pool import EnginePool
from .build import AnyPixels

if TYPE_CHECKING:
    from ..runtime.fleet_pool import FleetPool


log = logging.getLogger(__name__)
_LOGS = "processes"


def export(model: Decoder, processor: Processor, folder: pathlib.Path) -> None:
    """Writes model and processor as a Hugging Face folder."""
    models.save(model, folder)
    processor.save(folder)


def export_adapters(config: Config, model: Decoder, learner: Learner, folder: pathlib.Path, gang: Team) -> None:
    """Writes the LoRA adapters, if the model has any, in the format of PEFT."""
    lora = lora_of(config)
    if lora is not None:
        adapters = gang.whole(lambda: learner.trained(learner.params), learner.mesh, adapters=True)
        models.save_adapters(model.config, adapters, folder, lora, config.model.path)


def server_checkpoint(config: Config, run_dir: pathlib.Path, model: Decoder, processor: Processor) -> pathlib.Path:
    """Returns a folder that rollout servers can start from. Its weights do not matter: servers get those of the run
    before they generate."""
    if config.model.path:
        return pathlib.Path(config.model.path)
    folder = run_dir / "servers" / "model"
    export(model, processor, folder)
    return folder


def write_pictures(
    run_dir: pathlib.Path,
    metrics: pathlib.Path,
    summary: Summary,
    timeline: Timeline,
    pool: EnginePool | FleetPool,
    pixels: AnyPixels,
) -> None:
    """Writes three pictures: the learning curve, the timeline of the last steps, and which preprocessor held which
    medium when. `metrics` is the run's `metrics.jsonl`."""
    controls = {"blind": summary.blind, "chance": summary.chance}
    pictures.learning_curve(read(metrics), controls, run_dir / "learning.png")
    if stages := pictures.of_steps(timeline.spans()):  # a run that was complete before keeps its picture
        pictures.timeline([*pool.lanes(stages), *pixels.lanes(stages)], run_dir / "timeline.png")
        pixels.draw(run_dir / "media.png")


@contextlib.contextmanager
def process_log(run_dir: pathlib.Path, gang: Team) -> Iterator[None]:
    """Writes what this process logs to `run_dir/processes/process-N.log`, appended to what the file holds: its own
    notes, warnings of libraries, a line a step, and the error that ends the body of the `with`. The terminal gets the
    warnings as before. Does nothing where the process is alone. Raises OSError if the file cannot be written."""
    if gang.alone:
        yield
        return
    (run_dir / _LOGS).mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / _LOGS / f"process-{gang.process}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    notes = logging.getLogger(__name__.partition(".")[0])
    root = logging.getLogger()
    terminal = root.handlers or [logging.lastResort or logging.StreamHandler()]  # lastResort: while there is no other
    levels = {logger_or_handler: logger_or_handler.level for logger_or_handler in [notes, *terminal]}
    for terminal_handler in terminal:
        terminal_handler.setLevel(max(terminal_handler.level, logging.WARNING))
    notes.setLevel(logging.INFO)
    before, root.handlers = root.handlers, [*terminal, handler]
    try:
        log.info("process %d of %d, %s, pid %d", gang.process, gang.processes, socket.gethostname(), os.getpid())
        yield
        log.info("the run is over")
    except BaseException as error:
        log.info("ended by %s: %s", type(error).__name__, error)  # whoever catches it tells the terminal
        raise
    finally:
        root.handlers = before
        for logger_or_handler, level in levels.items():
            logger_or_handler.setLevel(level)
        handler.close()
