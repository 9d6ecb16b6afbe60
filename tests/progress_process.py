"""One of two processes, of which one may come no further, for `test_progress`.

Process 0 orders a step and waits for both to agree. `fault`: process 1 is `stuck` while it reads media, or `compiles`
for longer than the limit, as JAX would say it; or nothing.
"""

import threading
import time

import jax
from one_process import SETTINGS, run
from packing_cases import MODEL, make_config, make_groups

from fluxjax.batch.composer import Composer
from fluxjax.hosts.gang import Gang
from fluxjax.hosts.orders import End, Learn
from sharding.links import Links


def work(links: Links) -> None:
    gang = Gang(links, SETTINGS["limit"])
    config = make_config(tokens_per_row=64, rows=2)
    composer = Composer(config, 2, MODEL.vision)
    gang.equip(config, lambda ticket: "", None)
    groups, prepared = make_groups([[5], [4]], [[3], [2]])
    if gang.process == 0:
        gang.composed(composer, [(groups, prepared)])
        gang.tell(End())
    else:
        for order in gang.orders():
            if isinstance(order, Learn):
                with gang.watch.stage("media"):
                    fail()
                gang.laid_out(composer, [composer.outline(groups, prepared).cut(2)[1]])
    gang.close()


def fail() -> None:
    if SETTINGS["fault"] == "stuck":
        threading.Event().wait()
    if SETTINGS["fault"] == "compiles":
        jax.monitoring.record_scalar("/jax/core/compile/backend_compile_duration", time.time())
        time.sleep(4 * SETTINGS["limit"])
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)


if __name__ == "__main__":
    run(work)
