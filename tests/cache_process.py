"""One of two processes that compile the same programs, one after the other, for `test_compile_cache`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from one_process import SETTINGS, run

from sharding.links import Links


def work(links: Links) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    everywhere = jax.sharding.NamedSharding(jax.make_mesh((2,), ("i",)), jax.P("i"))
    [here] = jax.local_devices()
    of_all = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=everywhere)
    of_one = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(here))
    for process in range(2):
        if process == SETTINGS["process"]:
            together = jax.jit(lambda x: jnp.cos(x).sum()).lower(of_all).compile()
            alone = jax.jit(lambda x: jnp.sin(x).sum()).lower(of_one).compile()
            found = {name: events.count(name) for name in ("cache_hits", "cache_misses")}
        links.barrier(f"process {process}")
    part = np.full((1, 3), SETTINGS["process"], np.float32)
    x = jax.make_array_from_process_local_data(everywhere, part)
    sums = {"together": float(together(x)), "alone": float(alone(jax.device_put(np.ones((2, 3), np.float32), here)))}
    print(json.dumps(found | sums), flush=True)


if __name__ == "__main__":
    run(work)
