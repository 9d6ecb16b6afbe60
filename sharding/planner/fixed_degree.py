"""The planner that gives all sequences one degree."""

from .limits import Placement, Problem, planner
from .partition import longest_first
from .plan import PlanError


@planner
def ulysses(problem: Problem, degree: int = 8) -> Placement:
    """Puts every sequence on `degree` devices: longest (by work) first, each to the group with the least work so far.

    Raises PlanError for a degree that the number of devices or heads does not allow.
    """
    if degree < 1 or degree & (degree - 1) or degree > problem.max_degree:
        raise PlanError(f"ulysses: degree {degree} must be a power of two, at most {problem.max_degree} here")
    groups = longest_first(problem.work_I, problem.num_devices // degree)
    return [degree] * len(groups), [degree * group for group in groups]
