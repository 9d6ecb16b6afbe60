"""Computes a dumped response again, and says whether it is the same, token for token.

    python -m fluxjax.recompute runs/mine --step 40 --sample 0      the first line of runs/mine/samples/000040.jsonl

Observations of an environment, and rewards, are not computed again: turns go on behind the recorded observations.
The weights are those of the checkpoint with the version of the tokens: in a synchronous run, of the step before.
`python -m fluxjax.view` shows the numbers of samples. Nothing in the run's folder is changed.

Exit status: 0 if all tokens are the same, 1 if a token differs, 2 if the response can't be computed.
"""

import argparse
import pathlib
import sys

from rollout.listening import Parser, number


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m fluxjax.recompute", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the run folder")
    parser.add_argument("--step", type=number(int, 0), required=True, help="a step whose samples were dumped")
    parser.add_argument("--sample", type=number(int, 0), required=True, help="the line of the sample, from 0")
    args = parser.parse_args(argv)

    import absl.logging

    from .base.process import use_compile_cache
    from .run.main import USER_ERRORS
    from .run.recomputation import recompute

    absl.logging.set_verbosity(absl.logging.ERROR)  # Orbax would warn of a read-only folder
    use_compile_cache()
    try:
        equal, differs, gap, observed = recompute(args.run, args.step, args.sample)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    says = f"different: token {differs}" if differs else "the same"
    given = f"; {observed} tokens of observations, and rewards, were not computed again" if observed else ""
    print(f"{says}; {equal} equal tokens, whose log-probs differ by at most {gap:.1e}{given}")
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
