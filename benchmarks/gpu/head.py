"""Measures log-probabilities over the vocabulary of Qwen2.5-7B, the fused kernels beside the portable form."""

from __future__ import annotations

import sys

import part

import head as vocabulary_head  # isort: skip  # benchmarks/head.py, which `part` puts in front of this file


def measure(figures: part.Figures, dry: bool) -> None:
    tokens, vocabulary, width = (64, 512, 32) if dry else (16384, 152064, 3584)
    figures.add(tokens=tokens, vocabulary=vocabulary, width=width)
    figures.attempt("forms", lambda: vocabulary_head.measure(tokens, vocabulary, width, 1 if dry else 5))


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
