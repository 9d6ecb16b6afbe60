"""Trains a vision-language model by reinforcement learning.

    python -m fluxjax.train                                     the embedded default, configs/vlm.py
    python -m fluxjax.train --config=configs/vlm.py:debug       the whole loop in less than a minute
    python -m fluxjax.train --config=configs/text.py            a text-only task
    python -m fluxjax.train --config.optim.lr=2e-3 --config.run_dir=runs/mine

Everything the run writes lies in its run folder: config.json, metrics.jsonl, tensorboard/, samples/ (fluxjax.view
shows them), media/, checkpoints/, model/ (a Hugging Face folder), learning.png, timeline.png, summary.json. Running the
same command on an existing run folder resumes it.
"""

import signal
import sys

from .config.cli import parse


def main(argv: list[str]) -> int:
    config = parse(argv, __doc__ or "")
    from .base.process import keep_freed_memory

    keep_freed_memory()
    from .run.main import main as train  # JAX loads here, after the command line is known to be good

    return train(config)


if __name__ == "__main__":
    # Until the run handles signals, Ctrl-C ends the process: JAX's imports may lose a KeyboardInterrupt in a callback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
