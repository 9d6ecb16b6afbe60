"""A reward for boxes in pictures: how well those of the text cover those of the prompt's answer."""

import dataclasses
import re
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from ..base.scored import Completion, Prompt, Reward
from ..config.bounds import positive, within
from .extraction import TAIL, tagged
from .parameters import check_parameters

_N = r"\s{0,20}(-?[0-9]{1,9}(?:\.[0-9]{1,20})?)\s{0,20}"
# [1, 2, 3, 4], alone or behind Qwen2.5-VL's "bbox_2d", and Qwen2-VL's (1,2),(3,4).
_BOX = re.compile(rf"[\[(]{_N},{_N}(?:,|\)\s{{0,9}},\s{{0,9}}\(){_N},{_N}[\])]")


@dataclasses.dataclass(frozen=True)
class BoxOverlap:
    """Gives the sum of IoU over matched boxes, divided by the greater number of boxes: a box too many costs.

    A box is `[x1, y1, x2, y2]`, `(x1,y1),(x2,y2)` or JSON with such lists (`[{"bbox_2d": [..], "label": ".."}]`), with
    x1 < x2 and y1 < y2, in the unit of the prompt's answer. Labels are not compared. Boxes are matched one to one, for
    the greatest sum. With a `threshold` above 0, a pair counts 1 from that IoU on, else 0. Raises ValueError if the
    prompt's answer has no box.
    """

    kind: ClassVar[str] = "rule"

    threshold: float = within(0.0, "[0, 1]")
    correct_from: float = within(0.5, "(0, 1]")  # IoU of every pair from which the answer counts as right
    most_boxes: int = positive(100)  # more of them get 0

    def __post_init__(self) -> None:
        check_parameters("boxes", self)

    async def score(self, completion: Completion) -> Reward:
        wanted = boxes_in(completion.prompt.answer)
        if not len(wanted):
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} has no box")
        inside = tagged(completion.text)
        found = boxes_in(completion.text[-TAIL:] if inside is None else inside)
        if len(found) > self.most_boxes:
            return Reward(0.0, False, f"more than {self.most_boxes} boxes")
        if not len(found):
            return Reward(0.0, False, "no box found")
        overlaps = _matched(iou(wanted, found))
        values = overlaps >= self.threshold if self.threshold else overlaps
        correct = len(wanted) == len(found) and bool((overlaps >= self.correct_from).all())
        return Reward(float(values.sum()) / max(len(wanted), len(found)), correct)

    def unreadable(self, prompt: Prompt) -> str:
        """Says why the prompt's answer can't be graded; empty if it can."""
        wanted = boxes_in(prompt.answer)
        return "has no box" if not len(wanted) else "" if iou(wanted, wanted).diagonal().all() else "has an empty box"


def _matched(overlaps_NM: Float64[np.ndarray, "N M"]) -> Float64[np.ndarray, " K"]:
    """The overlaps of the pairs, min(N, M) of them, whose sum is the greatest."""
    if 1 in overlaps_NM.shape:
        return overlaps_NM.max(keepdims=True).reshape(1)
    # Not above: it takes most of a second, and every process that scores imports this file.
    from scipy.optimize import linear_sum_assignment

    return overlaps_NM[linear_sum_assignment(overlaps_NM, maximize=True)]


def boxes_in(text: str) -> Float64[np.ndarray, "N 4"]:
    """The boxes of a text, in order, as x1, y1, x2, y2."""
    return np.array([match.groups() for match in _BOX.finditer(text)], np.float64).reshape(-1, 4)


def iou(first_N4: Float64[np.ndarray, "N 4"], second_M4: Float64[np.ndarray, "M 4"]) -> Float64[np.ndarray, "N M"]:
    """Intersection over union of each pair of boxes; 0 for a box without an area."""
    low_NM2 = np.maximum(first_N4[:, None, :2], second_M4[None, :, :2])
    high_NM2 = np.minimum(first_N4[:, None, 2:], second_M4[None, :, 2:])
    common_NM = np.prod(np.maximum(high_NM2 - low_NM2, 0.0), axis=-1)
    areas_N, areas_M = (np.prod(np.maximum(b[:, 2:] - b[:, :2], 0.0), axis=-1) for b in (first_N4, second_M4))
    union_NM = areas_N[:, None] + areas_M[None, :] - common_NM
    return np.divide(common_NM, union_NM, out=np.zeros_like(common_NM), where=union_NM > 0)
