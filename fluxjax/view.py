"""Writes one page of HTML that shows a run's samples: python -m fluxjax.view RUN, then open RUN/view.html.

    python -m fluxjax.view runs/mine                   the newest samples, up to 32 MB
    python -m fluxjax.view runs/mine --step 40         the samples of step 40
    python -m fluxjax.view runs/mine --out page.html

The page shows prompts with pictures, responses token by token with log-probs and versions of the weights, rewards,
advantages and times. It needs no server, no network and no other file. The run may still be going on. A run writes 8
samples every report.dump_samples_every steps.
"""

import argparse
import pathlib
import sys

from rollout.listening import Parser, exit_status, number


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m fluxjax.view", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the run folder")
    parser.add_argument("--step", type=number(int, 0), help="show this step's samples only")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="the page (default: RUN/view.html)")
    parser.add_argument("--megabytes", type=number(float, 0.1), default=32, help="the largest size (default: 32)")
    return exit_status(_write, parser.parse_args(argv))


def _write(options: argparse.Namespace) -> None:
    from .config.run_folder import replace_text
    from .report.page import Page
    from .report.samples import dumped_steps

    page = Page(options.run, int(options.megabytes * 1e6))
    for step in dumped_steps(options.run, options.step):
        page.add_step(step)
    out, text = options.out or options.run / "view.html", page.html()
    replace_text(out, text)
    shown = f"{len(page.samples)} samples (steps: {len(page.steps)}), {page.pictures} pictures"
    print("; ".join([f"{out}: {shown}, {len(text) / 1e6:.1f} MB", *page.notes]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
