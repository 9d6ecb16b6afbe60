"""Rewards: the built-in rewards by name, and the scorer that applies a source's rewards to responses.

Importing this package imports no JAX.
"""

from ..base.scored import Completion as Completion
from ..base.scored import Prompt as Prompt
from ..base.scored import Reward as Reward
from .named import REWARDS as REWARDS
from .named import find_reward as find_reward
from .rules import digits as digits
from .rules import exact as exact
from .rules import number as number
from .rules import positions as positions
from .scorer import Scorer as Scorer
