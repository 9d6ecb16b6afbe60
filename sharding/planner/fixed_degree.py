"""The planners that give all sequences one degree."""

from .limits import Placement, Problem, planner
from .partition import karmarkar_karp, longest_first
from .plan import PlanError


@planner
def ulysses(problem: Problem, degree: int = 8) -> Placement:
    """Puts every sequence on `degree` devices, longest (by work) first to the group with the least.

    Raises PlanError for a degree that devices or heads forbid.
    """
    if degree < 1 or degree & (degree - 1) or degree > problem.max_degree:
        raise PlanError(f"ulysses: degree {degree} must be a power of two, at most {problem.max_degree} here")
    groups = longest_first(problem.work_I, problem.num_devices // degree)
    return [degree] * len(groups), [degree * group for group in groups]


@planner
def bucketing(problem: Problem) -> Placement:
    """Shards nothing: Karmarkar-Karp differencing over devices of verl's workload `24576 * length + length**2`, which
    stands for the whole of a 7B model rather than for attention. `work` and `cost` only describe the plan."""
    tokens = problem.lengths_I.astype(float)
    return [1] * len(tokens), karmarkar_karp(24576 * tokens + tokens**2, problem.num_devices)
