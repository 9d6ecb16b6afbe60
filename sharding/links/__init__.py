"""Point-to-point ties between the processes of one run: arrays on demand, counters, failures reported within seconds.

initialize("host0:1234", processes, process)    # instead of jax.distributed.initialize
links = Links()
try:
    ...                                         # offer, fetch, ready, notify, wait, barrier
except Exception as error:
    leave(error, links)                         # reports one line to standard error and to the peers, and exits
links.barrier("end")
links.close()
"""

from .links import Links, leave
from .meeting import initialize
from .wires import LinkError

__all__ = ["LinkError", "Links", "initialize", "leave"]
