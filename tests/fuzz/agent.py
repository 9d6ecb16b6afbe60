"""Versions of weights on a shared folder that are damaged, and requests to the agent that pulls them.

What is pulled is the version, bit for bit, or an error in one line; what the host had stays; and when the damage is
mended, the version is pulled.
"""

import asyncio
import contextlib
import json
import pathlib
import random
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import jax
import numpy as np
from junk import spoiled, spoiled_bytes
from protocol_cases import model
from starlette.applications import Starlette

import models
from fuzz.draws import each_of
from models.hf import SINGLE
from rollout.listening import bound_socket, http_server
from rollout.serve_guard import Guarded, error_handlers
from rollout.weights.agent import pull_route
from rollout.weights.published import SharedFolders
from rollout.weights.version_folders import VersionFolders

DRAWS = 6
SECONDS = 60.0  # of one request
VERSIONS = 4  # the first one is whole, the others are deltas


def run(count: int, seed: int) -> list[str]:
    return each_of(_Fuzzer, count, seed)


class _Fuzzer:
    def __init__(self, root: pathlib.Path) -> None:
        self._root, whole = root, model("text")
        self._memory, self._folders = SharedFolders(whole.config, "bfloat16"), VersionFolders(root / "shared")
        params, random_ = models.split(whole)[1], np.random.default_rng(0)
        self._right: list[bytes] = []
        for version in range(VERSIONS):
            changes = [random_.random(leaf.shape) < 0.02 for leaf in jax.tree.leaves(params)]
            new = jax.tree.unflatten(jax.tree.structure(params), changes)
            params = jax.tree.map(lambda leaf, new: jax.numpy.asarray(np.where(new, leaf + 1, leaf)), params, new)
            written = self._memory.write(version, params)
            self._folders.publish(written)
            self._right.append((written.folder / SINGLE).read_bytes())
            self._config = (written.folder / "config.json").read_bytes()
        self._source = self._folders.source
        shutil.copytree(self._source, root / "good")
        app = Starlette(routes=[pull_route(set())], exception_handlers=error_handlers())
        listening, begun = bound_socket("127.0.0.1", 0), threading.Event()
        self._http = http_server(Guarded(app, "", lambda: False), begun.set)
        self._port = listening.getsockname()[1]
        self._thread = threading.Thread(target=asyncio.run, args=(self._http.serve([listening]),), daemon=True)
        self._thread.start()
        begun.wait(SECONDS)

    def close(self) -> None:
        self._http.should_exit = True
        self._thread.join(SECONDS)
        self._folders.close()
        self._memory.close()

    def _pull(self, words: bytes) -> pathlib.Path | None:
        """The folder that the agent says; None where it refuses."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/pull_weights", words, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                return pathlib.Path(json.loads(reply.read())["model_path"])
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            assert error.code == 400 and said, f"{error.code}: {said[:300]}"
            return None

    def _body(self, version: int) -> dict[str, object]:
        local = str(self._root / "local")
        return {"local_checkpoint_dir": local, "source_dir": str(self._source), "target_version": version}

    def _exact(self, version: int, folder: pathlib.Path | None) -> None:
        assert folder is not None, f"version {version} is refused"
        right = {SINGLE: self._right[version], "config.json": self._config}
        wrong = [name for name, content in right.items() if (folder / name).read_bytes() != content]
        assert not wrong, f"version {version}: {wrong} in {folder}"

    def draw(self, draw: random.Random) -> None:
        local = self._root / "local"
        shutil.rmtree(local, ignore_errors=True)
        had = draw.choice((None, 0, 1))
        if had is not None:
            self._exact(had, self._pull(json.dumps(self._body(had)).encode()))
        wanted = draw.randrange(VERSIONS)
        if draw.random() < 0.3:
            words = json.dumps(spoiled(self._body(wanted), draw)).encode()
            self._pull(spoiled_bytes(words, draw) if draw.random() < 0.3 else words)
        with self._damaged_source(draw):
            if draw.random() < 0.2 and had is not None and had != wanted:
                # Its copy of the wanted version would be handed out again: the server's checksums are for that one.
                self._damage(draw, next(local.glob(f"*/weight_v{had:06d}")))
            folder = self._pull(json.dumps(self._body(wanted)).encode())
            if folder is not None:
                self._exact(wanted, folder)
            assert not list(local.rglob("part-*")), "a part is left"
        self._exact(wanted, self._pull(json.dumps(self._body(wanted)).encode()))

    @contextlib.contextmanager
    def _damaged_source(self, draw: random.Random) -> Iterator[None]:
        for _ in range(draw.randint(1, 2)):
            self._damage(draw, self._source)
        try:
            yield
        finally:
            shutil.rmtree(self._source)
            shutil.copytree(self._root / "good", self._source)

    def _damage(self, draw: random.Random, root: pathlib.Path) -> None:
        files = sorted(file for file in root.rglob("*") if file.is_file())
        file = draw.choice(files)
        how = draw.randrange(6)
        if how == 0:
            file.unlink()
        elif how == 1:
            file.write_bytes(b"")
        elif how == 2 and file.suffix == ".json":
            content = file.read_text()
            file.write_text(json.dumps(spoiled(json.loads(content), draw)) if content else "{}")
        elif how == 3:
            shutil.rmtree(file.parent)
        else:
            file.write_bytes(spoiled_bytes(file.read_bytes(), draw))
