"""x"""

from .scheduling import *  # noqa: F403
from .sections import *  # noqa: F403
