"""The routes of new weights, from a version in shared memory (`published`) to servers.

After each route, `published.Checksums` prove which weights the server has.
"""

import asyncio
import base64
import contextlib
import pathlib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from safetensors import safe_open
from safetensors.numpy import save

from models.config import DecoderConfig
from models.hf import SINGLE, StoredTensor

from ..engine_weights import portions
from ..sglang import UPDATE, Refused, ServerClient, ServerError
from .published import Published, SharedFolders, as_bytes
from .torch_buckets import Bytes, SharedBucket, bucket_of, device_tensors, write_bucket
from .version_folders import VersionFolders, contents, pull, pulled

Pause: TypeAlias = Callable[[], Awaitable[None]]


class SyncRoute:
    """The route of new weights to all servers of a fleet. It begins in `memory`, which `close` removes. Methods raise
    the errors of `ServerClient`, and OSError if a folder of the trainer is full."""

    def __init__(self, memory: SharedFolders) -> None:
        self._memory = memory

    def publish(self, version: int, params: Mapping[str, Any]) -> Published:
        """Writes a version once (`SharedFolders.write`), before any server gets it. Blocks. Any thread may call it."""
        return self._memory.write(version, params)

    async def deliver(self, client: ServerClient, published: Published, pause: Pause) -> None:
        """Brings the version near the server, which generates meanwhile, then pauses the server and has it serve it."""
        raise NotImplementedError

    def keep(self, wanted: Sequence[Published]) -> None:
        """Removes files that neither `wanted` nor a starting server needs. Blocks. Any thread may call it."""
        self._memory.keep(wanted)

    def close(self) -> None:
        """Removes all that `publish` wrote."""
        self._memory.close()


class SharedMemory(SyncRoute):
    """`shm`: a server of this host reads the folder of the version."""

    async def deliver(self, client: ServerClient, published: Published, pause: Pause) -> None:
        await pause()
        await client.update_from_disk(str(published.folder), published.version)


class Buckets(SyncRoute):
    """`bucket`: weights travel over HTTP in buckets of about `size` bytes, `pickled` for SGLang, or as safetensors. The
    route needs no common file system, but sends 4/3 of all bytes to every rank, so that it is for small models only."""

    def __init__(self, memory: SharedFolders, size: int, *, pickled: bool = True) -> None:
        super().__init__(memory)
        self._size, self._form = size, "flattened_bucket" if pickled else "safetensors"

    async def deliver(self, client: ServerClient, published: Published, pause: Pause) -> None:
        parts = list(portions(contents(published.folder), lambda tensor: tensor.nbytes, self._size))
        pack = self._packer(published, await client.ranks())
        await pause()
        try:
            await client.begin_weight_update()
        except Refused:  # an update that broke off is still open; the new update overwrites it
            with contextlib.suppress(Refused):  # the server may refuse to end an incomplete update
                await client.end_weight_update()
            await client.begin_weight_update()
        for number, part in enumerate(parts, start=1):
            # The last bucket has the version's number: until then, the server holds a part of the version.
            version = published.version if number == len(parts) else None
            await client.update_from_tensors(await asyncio.to_thread(pack, part), version, self._form)
        await client.end_weight_update()

    def _packer(self, published: Published, ranks: int) -> Callable[[Sequence[StoredTensor]], list[str]]:
        """The function that makes a bucket for each rank of a server."""

        def pack(part: Sequence[StoredTensor]) -> list[str]:
            with safe_open(published.folder / SINGLE, framework="numpy") as tensors:
                values = {tensor.name: tensors.get_tensor(tensor.name) for tensor in part}
            data = save(values) if self._form == "safetensors" else write_bucket([*values.items()])
            return [base64.b64encode(data).decode()] * ranks

        return pack


class CudaIpc(Buckets):
    """`ipc`: each bucket is copied from the trainer's arrays into memory on their GPU (on a CPU, PyTorch's shared
    memory). Servers of this host, which must see that GPU, open it by CUDA IPC (`torch_buckets`). Tensors that the
    trainer no longer holds are read from the version's folder. The route has never run on a GPU."""

    def __init__(self, memory: SharedFolders, config: DecoderConfig, size: int) -> None:
        super().__init__(memory, size)
        self._config = config
        self._newest: tuple[Published | None, Mapping[str, Bytes]] = None, {}

    def publish(self, version: int, params: Mapping[str, Any]) -> Published:
        published = super().publish(version, params)
        self._newest = published, device_tensors(self._config, params)
        return published

    def _packer(self, published: Published, ranks: int) -> Callable[[Sequence[StoredTensor]], list[str]]:
        bucket, (newest, here) = SharedBucket(), self._newest  # each server has a bucket: servers read at the same time

        def pack(part: Sequence[StoredTensor]) -> list[str]:
            with safe_open(published.folder / SINGLE, framework="numpy") as tensors:

                def values(tensor: StoredTensor) -> Any:
                    found = here[tensor.name](tensor.dtype) if newest is published and tensor.name in here else None
                    return as_bytes(tensors.get_tensor(tensor.name)) if found is None else found

                bucket.fill(list(map(values, part)))
            return [base64.b64encode(bucket_of(bucket.handle(), part)).decode() for _ in range(ranks)]

        return pack


class OrbaxFolders(SyncRoute):
    """`orbax`: whole versions or deltas travel, by a folder that all hosts share, into the memory of each host, while
    servers generate. `rollout.serve` pulls weights itself, SGLang does not. This process pulls for SGLang on this host
    (`here`), an agent (`python -m rollout.weights.agent`) pulls on other hosts. `agents` maps addresses of servers to
    addresses of agents; a server without an agent is asked itself. `token` gives access to agents and servers."""

    def __init__(
        self,
        memory: SharedFolders,
        folders: VersionFolders,
        local: pathlib.Path,
        agents: Mapping[str, str],
        *,
        token: str = "",
        here: bool,
    ) -> None:
        super().__init__(memory)
        self._folders, self._local, self._agents, self._token, self._here = folders, local, agents, token, here

    def publish(self, version: int, params: Mapping[str, Any]) -> Published:
        published = super().publish(version, params)
        self._folders.publish(published)
        return published

    async def deliver(self, client: ServerClient, published: Published, pause: Pause) -> None:
        folder = await self._pull(client, published.version)
        await pause()
        await client.update_from_disk(folder, published.version)

    async def _pull(self, client: ServerClient, version: int) -> str:
        source = self._folders.source
        if self._here:
            try:
                return str(await asyncio.wait_for(asyncio.to_thread(pull, self._local, source, version), UPDATE))
            except Exception as error:  # reports the error as an agent would
                raise ServerError(f"{client.address}: {type(error).__name__}: {error}") from error
        agent = ServerClient(self._agents.get(client.address) or client.address, token=self._token)
        try:
            return await agent.pull_weights(str(self._local), str(source), version)
        finally:
            await agent.close()

    def keep(self, wanted: Sequence[Published]) -> None:
        self._folders.keep(wanted)
        super().keep([*wanted, *filter(None, [self._folders.last])])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # another host removes its own copies at its next pull
            shutil.rmtree(pulled(self._local, self._folders.source))
        self._folders.close()
        super().close()
