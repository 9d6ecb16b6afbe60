"""One of two processes that compile the same programs, one after the other, for `test_compile_cache`: `cache_process.py
SETTINGS`, one JSON object."""

import json
import os
import pathlib
import sys

SETTINGS = json.loads(sys.argv[1])
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fluxjax.base.process import share_between_devices  # noqa: E402
from sharding.links import Links, initialize  # noqa: E402


def main() -> None:
    share_between_devices()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    initialize(SETTINGS["coordinator"], SETTINGS["processes"], SETTINGS["process"])
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
    links = Links(timeout=120.0)
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
    links.barrier("end")
    links.close()


if __name__ == "__main__":
    main()
