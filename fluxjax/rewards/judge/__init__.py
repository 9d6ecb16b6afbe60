"""Rewards by a judge: a language model that reads a prompt and its response, and gives a verdict on a scale."""

from .questions import Answer, JudgeModel, Question
from .reward import Judge

__all__ = ["Answer", "Judge", "JudgeModel", "Question"]
