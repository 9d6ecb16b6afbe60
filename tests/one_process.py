"""The first and the last steps of every process that `Processes` starts: it joins the others, and leaves them."""

import json
import sys
from collections.abc import Callable

from fluxjax.base.process import share_between_devices
from sharding.links import Links, initialize, leave

SETTINGS = json.loads(sys.argv[1])


def run(work: Callable[[Links], None]) -> None:
    """Joins the others, works, and leaves with them; an error ends all."""
    share_between_devices()
    initialize(SETTINGS["coordinator"], SETTINGS["processes"], SETTINGS["process"])
    links = Links(timeout=SETTINGS.get("timeout", 120.0))
    try:
        work(links)
        links.barrier("end")
    except Exception as error:
        leave(error, links)
    links.close()
