"""One process of `test_links.py`: `links_worker.py SCENARIO PROCESS PORT PROCESSES WORDS`. Says in the file `WORDS` how
far it has come, a word a line; the test kills it, or waits for its end."""

import os
import pathlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

SCENARIO, PROCESS, PORT, PROCESSES, WORDS = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
DEVICES = 1 if SCENARIO == "one_core" else 2
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["sharding"], "beartype.beartype")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from sharding.links import LinkError, Links, initialize, leave  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

NEVER = 999_999  # a key that nobody offers


def say(word: str) -> None:
    with open(WORDS, "a") as file:  # gloo writes to standard output
        file.write(word + "\n")


def like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def samples(process: int) -> list[jax.Array]:
    """Of every kind that travels; -0.0 and NaN are told from what equals them by their bits."""
    draw = np.random.default_rng(process)
    return [
        jnp.asarray(draw.standard_normal((1000, 300)), jnp.float32),
        jnp.asarray(draw.standard_normal((7, 3, 5)), jnp.bfloat16),
        jnp.asarray([-0.0, np.nan, np.inf, 1e-40], jnp.float32),
        jnp.asarray(draw.integers(0, 255, 77), jnp.uint8),
        jnp.asarray(draw.integers(0, 2, 9), jnp.bool_),
        jnp.asarray(process, jnp.int32),
    ]


def same(*two: jax.Array) -> bool:
    return len({(array.shape, array.dtype, np.asarray(array).tobytes()) for array in two}) == 1


def exchange(links: Links) -> None:
    device = jax.local_devices()[1]
    peers = [peer for peer in range(PROCESSES) if peer != PROCESS]
    for peer in peers:
        links.offer(peer, samples(PROCESS))  # the only reference to them
    for peer in peers:
        expected = samples(peer)
        got = links.fetch(peer, PROCESS, like(*expected), device)
        links.ready(got)
        assert all(array.devices() == {device} for array in got)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    say("values")

    # The fetch comes first, and so does a program on what it will bring.
    early = {peer: links.fetch(peer, 100 + PROCESS, like(*samples(peer)), device) for peer in peers}
    twice = {peer: jax.jit(lambda x: 2 * x)(early[peer][0]) for peer in peers}
    for peer in peers:
        links.notify(peer, "fetched")
    links.wait("fetched", len(peers))
    for peer in peers:
        links.offer(100 + peer, samples(PROCESS))
    for peer in peers:
        links.ready([twice[peer], *early[peer]])
        assert same(twice[peer], 2 * jax.device_put(samples(peer)[0], device))
    say("early")

    def many(thread: int) -> None:
        place = jax.local_devices()[thread % 2]
        for turn in range(10):
            for peer in peers:
                key = 1000 + 100 * thread + turn
                value = jax.device_put(np.full((50, 50), 1000 * PROCESS + key, np.int32), place)
                links.offer(key * PROCESSES + peer, [value])
                got = links.fetch(peer, key * PROCESSES + PROCESS, like(value), place)
                links.notify(peer, "turn")
                links.ready(got)
                assert int(got[0][49, 49]) == 1000 * peer + key

    threaded([lambda thread=thread: many(thread) for thread in range(6)])
    links.wait("turn", 60 * len(peers))
    links.notify(PROCESS, "self")
    links.wait("self", 1)
    say("threads")

    late = PROCESSES - 1
    for turn in range(3):
        if late == PROCESS:
            time.sleep(0.2)
            for peer in peers:
                links.notify(peer, "late")
        links.barrier("turn")
        if late != PROCESS:
            # its message is ahead of its arrival, so nobody came through before
            assert links._counts["late"] == turn + 1
    say("barrier")
    links.barrier("end")
    links.forget("t")
    late_ones = {} if late == PROCESS else {"late": 3}
    assert links._counts == {"fetched": len(peers), "self": 1, **late_ones}
    links.close()
    links.close()
    for call in (links.check, lambda: links.barrier("x"), lambda: links.ready([]), lambda: links.notify(0, "x")):
        expect(call, "are closed")
    links.fail("not heard any more")
    say("closed")


def threaded(work: list[Callable[[], None]]) -> None:
    """Runs all of it at once, and raises what one of them raises."""
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(lambda call: call(), work))


def expect(call: Callable[[], object], *words: str) -> str:
    try:
        call()
    except LinkError as error:
        text = str(error)
        assert all(word in text for word in words) and "\n" not in text, text
        return text
    raise AssertionError(f"no LinkError of {words}")


def all_waits(links: Links, peer: int, *words: str) -> str:
    """What every way of waiting says when the wait for `peer` has no hope any more."""
    device = jax.local_devices()[0]
    number = jax.ShapeDtypeStruct((3,), jnp.float32)
    got = links.fetch(peer, NEVER, [number], device)
    derived = jax.jit(lambda x: x + 1)(links.fetch(peer, NEVER + 1, [number], device)[0])
    calls = [
        lambda: links.ready(got),
        lambda: links.ready([derived]),
        lambda: links.wait("never", 1),
        lambda: links.barrier("never"),
    ]
    texts: list[str] = []
    work = [lambda call=call: texts.append(expect(call, *words)) for call in calls]
    say("waiting")
    threaded(work)
    for call in (links.check, lambda: links.offer(0, []), lambda: links.fetch(peer, 5, [number], device)):
        expect(call, *words)
    assert len(set(texts)) == 1, texts
    say("told")
    return texts[0]


def victim(links: Links) -> None:
    """Process `SCENARIO[-1]` waits for its death, the others for what it will never do."""
    dies = int(SCENARIO[-1])
    if dies == PROCESS:
        say("waiting")
        time.sleep(600)
    raise LinkError(all_waits(links, dies, f"process {dies} (", "is lost", "last checkpoint"))


def stopped(links: Links) -> None:
    if PROCESS == 1:
        say("waiting")
        time.sleep(600)
    raise LinkError(all_waits(links, 1, "process 1 (", "is lost", "not answered for 10 s"))


def failing(links: Links) -> None:
    if PROCESS == 1:
        links.wait("go on", 1)
        time.sleep(0.5)  # the other waits by now, most likely
        raise ValueError("a device thread\n  has no memory")
    links.notify(1, "go on")
    raise LinkError(all_waits(links, 1, "process 1 (", "failed: ValueError: a device thread has no memory."))


def collective(links: Links) -> None:
    """Process 0 waits for the other where links can't wake it."""
    if PROCESS == 1:
        say("waiting")
        time.sleep(600)
    say("waiting")
    multihost_utils.sync_global_devices("never")


def closing(links: Links) -> None:
    if PROCESS == 1:
        links.notify(0, "bye")
        links.close()
        return
    links.wait("bye", 1)
    links.wait("bye", 1)  # closed or not: this one has come
    links.check()
    device = jax.local_devices()[0]
    got = links.fetch(1, NEVER, [jax.ShapeDtypeStruct((3,), jnp.float32)], device)
    for call in (lambda: links.wait("bye", 2), lambda: links.barrier("x"), lambda: links.ready(got)):
        expect(call, "process 1 (", "closed the links, but process 0 (")
    links.check()
    say("told")
    raise LinkError("what never comes is still on its way")


def listening(links: Links) -> None:
    """Says the addresses, as Linux writes them, at which this process can be called."""
    links.barrier("all have met")
    own = {os.readlink(file) for file in pathlib.Path("/proc/self/fd").iterdir() if file.is_symlink()}
    for family in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                say(local.partition(":")[0])
    links.barrier("all were asked")


def one_core(links: Links) -> None:
    """Both processes compute for seconds, and exchange arrays meanwhile."""
    mine = jnp.full(1_000_000, PROCESS, jnp.float32)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x))
    x = jnp.ones((1000, 1000), jnp.float32)
    compiled = program.lower(x).compile()
    links.barrier("compiled")
    computing = compiled(x)
    links.offer(1 - PROCESS, [mine])
    got = links.fetch(1 - PROCESS, PROCESS, like(mine), jax.local_devices()[0])
    links.ready(got)
    say("computed before" if computing.is_ready() else "arrived meanwhile")
    computing.block_until_ready()
    links.barrier("end")


SCENARIOS: dict[str, Callable[[Links], None]] = {
    "listening": listening,
    "exchange": exchange,
    "victim0": victim,
    "victim1": victim,
    "stopped": stopped,
    "failing": failing,
    "collective": collective,
    "closing": closing,
    "one_core": one_core,
}


def main() -> None:
    if SCENARIO == "one_core":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[PROCESS % 2 :][:1])
    initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)
    short = SCENARIO in ("stopped", "collective", "closing")
    links = Links(timeout=10.0 if short else 60.0, grace=3.0 if SCENARIO == "collective" else 20.0)
    try:
        SCENARIOS[SCENARIO](links)
    except Exception as error:
        if isinstance(error, AssertionError):
            say(f"wrong: {error}")
        leave(error, links, code=7)


main()
