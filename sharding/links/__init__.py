"""Point-to-point ties between the processes of one run: arrays on demand, counters, failures reported within seconds.

`initialize` comes first, instead of `jax.distributed.initialize`. A process ends by `leave` after an error, else by
`Links.barrier` and `Links.close`.
"""

from .links import Links, leave
from .meeting import initialize
from .wires import LinkError

__all__ = ["LinkError", "Links", "initialize", "leave"]
