"""Computes gradients and log-probs of a model on one mesh. Each call gets the parameters."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from models.creation import abstract
from models.decoder import Decoder
from models.decoder import logprobs as model_logprobs
from models.inputs import PackedTokens
from sharding.links import Links
from sharding.mesh import MeshError, compiler_options, make_mesh
from sharding.walk import Fsdp, Params, Tally, Walk
from sharding.weights import adapted, by_path, with_adapters, with_shardings, without_adapters

from ..algorithms.loss import importance_tally, proximal
from ..base.types import TrainBatch
from ..batch.composition import Microbatch
from ..config import ODC, AlgorithmConfig, Config, Remat
from ..config.bounds import as_config_error

if TYPE_CHECKING:
    from sharding.odc.executor import Odc

    from ..data.materializer import Materializer

# (logprobs_BT, entropies_BT, batch, config) -> (token_loss_BT, {metric: [B, T]})
TokenLoss: TypeAlias = Callable[[Array, Array, TrainBatch, AlgorithmConfig], tuple[Array, dict[str, Array]]]
Outcome: TypeAlias = tuple[Params, Tally]  # gradients laid out like the trained parameters; sums and maxima
# (log-probability of each token, entropy of its distribution), in nats. A critic has only (values).
Scores: TypeAlias = tuple[Float[Array, "B T"], ...]

GAP = "rollout_trainer_logprob_gap"


class TrainingPhase(NamedTuple):
    """A phase of training: its loss, and the policy's distribution for log-probs."""

    token_loss: TokenLoss
    temperature: float
    never_sampled: tuple[int, ...]  # token ids to which the policy gives no probability


class Gradients:
    """Computes gradients and log-probs on `mesh`. A program is compiled at its first use with each batch shape. `links`
    connect to the other processes, if there are several processes and `sharding.strategy` is `odc`."""

    def __init__(
        self,
        config: Config,
        model: Decoder,
        phase: TrainingPhase,
        mesh: Mesh,
        links: Links | None = None,
        background: concurrent.futures.ThreadPoolExecutor | None = None,
        materializer: Materializer | None = None,
    ) -> None:
        """`background` compiles ahead (None: a new thread). `materializer` fetches pixels that a media store holds."""
        self._config, self._model, self._phase, self._links = config, model, phase, links
        self._materializer = materializer
        self.mesh = mesh
        self.strategy = self._strategy_of(model)
        self._compile()
        self._ahead: dict[tuple[object, ...], concurrent.futures.Future[jax.stages.Compiled]] = {}  # by name and shapes
        self._background = background or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")

    def _strategy_of(self, model: Decoder) -> Fsdp:
        config = self._config
        return Fsdp(
            self.mesh,
            model,
            forward=self._forward,
            loss=self._loss,
            row_dims=_row_dims,
            compute_dtype=jnp.dtype(config.model.compute_dtype.value),
            remat="none" if config.sharding.remat is Remat.AUTO else config.sharding.remat.value,
        )

    def on(self, devices: Sequence[Any]) -> Gradients:
        """Returns the same programs for other devices of this process."""
        mesh = make_mesh(devices=devices)
        return type(self)(
            self._config, self._model, self._phase, mesh, background=self._background, materializer=self._materializer
        )

    def close(self) -> None:
        """Cancels compilations that have not begun."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def bring(self, outcome: Outcome) -> Outcome:
        """Moves an outcome of `accumulate` from another mesh to this mesh."""
        grads, tally = outcome
        return self.strategy.shard_trained(grads), jax.device_put(tally, NamedSharding(self.mesh, P()))

    def merged(self, params: Params) -> Params:
        """Returns the parameters as engines and files have them, with adapters added to their weights."""
        if not self._config.lora.rank:
            return params
        weights = adapted(params, self.strategy.specs)
        changed = self._merged(weights, self.strategy.trained(params))
        return unflatten_dict(by_path(without_adapters(params)) | by_path(changed))

    def copies(self, params: Params) -> Params:
        """Returns the weights that all microbatches of a step read (`Fsdp.copies`). Parameters may be abstract."""
        if not self.strategy.copied:
            return params
        if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
            return with_shardings(jax.eval_shape(self._copies, params), self.strategy.shardings)
        return self._copies(params)

    def accumulate(self, params: Params, microbatches: Sequence[Microbatch]) -> Outcome:
        """Returns (gradients, tally), summed over the microbatches. Gradients are laid out like the trained parameters.

        First all devices compute together the microbatches without an owner. Then each device computes its own
        microbatches at its own pace (`sharding.odc`). Microbatches of other processes need only shapes. Raises
        ValueError without a microbatch, or if the devices do not divide a microbatch's rows. Raises
        `sharding.odc.OdcError` if a device fails in its own microbatches, and DataError if pixels can't be fetched.
        """
        if not microbatches:
            raise ValueError("an optimizer step needs at least one microbatch")
        self._expect(microbatches)
        try:
            return self._accumulated(params, microbatches)
        finally:
            if self._materializer is not None:
                self._materializer.forget(microbatch.batch for microbatch in microbatches)

    def _accumulated(self, params: Params, microbatches: Sequence[Microbatch]) -> Outcome:
        together = [microbatch.batch for microbatch in microbatches if microbatch.owner is None]
        first = self._accumulate_together(params, together) if together else None
        if first is not None and len(together) == len(microbatches):
            return first
        jax.block_until_ready(first)  # all devices begin their own microbatches at the same time
        _, batches, owners = _owned(microbatches)
        work = [m.work for m in microbatches if m.owner is not None and m.work is not None]
        _, tally, grads = self.odc.loss_and_grad(self.merged(params), batches, owners, work)
        if self._config.lora.rank:
            specs = self.strategy.specs
            grads = self._pulled(adapted(params, specs), self.strategy.trained(params), adapted(grads, specs))
        return (grads, tally) if first is None else self.add(first, (grads, tally))

    def _accumulate_together(self, params: Params, batches: Sequence[TrainBatch]) -> Outcome:
        params = self.copies(params)
        placed = self._place(batches[0].inputs, batches[0])
        _, abstract, _ = jax.eval_shape(self._loss_and_grad, params, placed)
        grads, tally = self._zeros(tuple(abstract.sums), tuple(abstract.maxima))
        for batch in batches:
            placed = placed if batch is batches[0] else self._place(batch.inputs, batch)
            grads, tally = self._program("accumulate", self._accumulate, placed)(params, grads, tally, placed)
        return grads, tally

    def lowered(
        self, params: Params, batch: TrainBatch, names: Collection[str] = ("accumulate", "logprobs")
    ) -> dict[str, jax.stages.Lowered]:
        """Returns these programs for microbatches like `batch`, not compiled. Parameters and batch may be abstract."""
        placed = self._place(batch.inputs, batch)
        programs: dict[str, jax.stages.Lowered] = {}
        if "logprobs" in names:
            programs["logprobs"] = self._logprobs.lower(params, placed.inputs)
        if "accumulate" not in names:
            return programs
        copies = self.copies(params)
        _, tally, _ = jax.eval_shape(self._loss_and_grad, copies, placed)
        tally = on_every_device(tally, self.mesh)
        trained = self.strategy.trained(params)
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained)
        return {"accumulate": self._accumulate.lower(copies, grads, tally, placed), **programs}

    def compile_ahead(self, params: Params, batches: Sequence[TrainBatch], *, scores: bool) -> None:
        """Compiles the programs for microbatches shaped like `batches` in the background. The first call that needs a
        program waits for its compilation. With `scores`, the program of log-probs is compiled, too."""
        weights, shapes = jax.tree.map(_described, (params, list(batches)))
        processes = self.mesh.size // len(self.mesh.local_devices)
        for batch in (_of_all(processes, batch) for batch in shapes):
            for name, tree in [("accumulate", batch), *([("logprobs", batch.inputs)] if scores else [])]:
                if (key := (name, *_shapes(tree))) not in self._ahead:
                    self._ahead[key] = self._background.submit(self._compiled, weights, batch, name)

    def _compiled(self, params: Params, batch: TrainBatch, name: str) -> jax.stages.Compiled:
        return self.lowered(params, batch, [name])[name].compile()

    def _program(self, name: str, jitted: Callable[..., Any], tree: Any) -> Callable[..., Any]:
        compiled = self._ahead.get((name, *_shapes(tree))) if self._ahead else None
        return jitted if compiled is None else compiled.result()

    def logprobs(self, params: Params, inputs: PackedTokens) -> Scores:
        """Returns `Scores`, `[B, T]` float32. The values are meaningless at tokens without a predecessor."""
        placed = self._place(inputs, inputs)
        return self._program("logprobs", self._logprobs, placed)(params, placed)

    def scores(self, params: Params, microbatches: Sequence[Microbatch]) -> list[Scores | None]:
        """Returns `logprobs` of each microbatch, or None for a microbatch that a device of another process computes
        alone. The devices are those of `accumulate`."""
        self._expect(microbatches)
        indices, batches, owners = _owned(microbatches)
        together = sorted(set(range(len(microbatches))) - set(indices))
        scores: dict[int, Scores | None] = {i: self.logprobs(params, microbatches[i].batch.inputs) for i in together}
        if indices:
            jax.block_until_ready(scores)
            found = self.odc.logprobs(self.merged(params), [batch.inputs for batch in batches], owners)
            scores |= dict(zip(indices, found, strict=True))
        return [scores[i] for i in range(len(microbatches))]

    @functools.cached_property
    def odc(self) -> Odc:
        """The executor of microbatches that have an owner, which takes `merged` weights. Raises ConfigError if the mesh
        can't be cut into hosts of `sharding.devices_per_host` devices."""
        from sharding.odc.executor import Odc

        settings, chosen = self._config.sharding, self._config.sharding.strategy
        assert isinstance(chosen, ODC)
        strategy = self._strategy_of(abstract(self._model.config)) if self._config.lora.rank else self.strategy
        group, fixed = settings.devices_per_host if chosen.hybrid else 0, chosen.deterministic
        with as_config_error(f"sharding.devices_per_host is {settings.devices_per_host}", MeshError):
            return Odc(strategy, deterministic=fixed, group=group, links=self._links, read=self._read)

    def _place(self, inputs: PackedTokens, batch: Any) -> Any:
        if inputs.spread is not None and not set(inputs.spread.axes) <= set(self.mesh.axis_names):
            raise ValueError(
                f"the batch is spread over axes {inputs.spread.axes}, the mesh has {self.mesh.axis_names}; make "
                f"the mesh of ulysses and flex_ulysses with make_mesh({self.mesh.size})"
            )
        return self.strategy.place(self._read(batch))

    def _expect(self, microbatches: Sequence[Microbatch]) -> None:
        if self._materializer is not None:
            self._materializer.expect(microbatch.batch for microbatch in microbatches)

    def _read(self, batch: Any) -> Any:
        return batch if self._materializer is None else self._materializer.read(batch)

    def _forward(self, model: Any, inputs: PackedTokens, walk: Walk) -> Scores:
        phase = self._phase
        return model_logprobs(model, inputs, walk, temperature=phase.temperature, never_sampled=phase.never_sampled)

    def _loss(self, model: Any, batch: TrainBatch, walk: Walk) -> tuple[Float[Array, ""], Tally]:
        logprobs_BT, entropies_BT = self._forward(model, batch.inputs, walk)
        token_loss_BT, metrics = self._phase.token_loss(logprobs_BT, entropies_BT, batch, self._config.algorithm)
        trained_BT = batch.loss_weights_BT != 0.0
        generated_BT = trained_BT & (batch.lags_BT >= 0)
        fresh_BT = trained_BT & (batch.lags_BT == 0)  # generated by the weights with which the step began
        unchanged_BT = proximal(logprobs_BT, batch)  # log-probs under the weights with which the step began
        gap_BT = jnp.where(fresh_BT, jnp.abs(unchanged_BT - batch.behaviour_logprobs_BT), 0.0)
        loss = jnp.sum(jnp.where(trained_BT, batch.loss_weights_BT * token_loss_BT, 0.0))
        sums = {name: jnp.sum(jnp.where(trained_BT, metric_BT, 0.0)) for name, metric_BT in metrics.items()}
        sums |= {
            "entropy": jnp.sum(jnp.where(trained_BT, entropies_BT, 0.0)),
            "loss": loss,
            "trained_tokens": jnp.sum(trained_BT, dtype=jnp.float32),
            "generated_tokens": jnp.sum(generated_BT, dtype=jnp.float32),
            "fresh_tokens": jnp.sum(fresh_BT, dtype=jnp.float32),
            GAP: jnp.sum(gap_BT),
        }
        more, maxima = importance_tally(logprobs_BT, batch, generated_BT, self._config.algorithm.importance)
        return loss, Tally(sums | more, maxima | {f"{GAP}_max": jnp.max(gap_BT)})

    def _compile(self) -> None:
        strategy = self.strategy
        trained = strategy.trained(strategy.shardings)
        shardings = trained, NamedSharding(self.mesh, P())
        options = compiler_options(self.mesh)
        self._loss_and_grad = jax.jit(strategy.loss_and_grad)
        self._copies = jax.jit(strategy.copies, out_shardings=strategy.shardings)
        self._logprobs = jax.jit(strategy.logprobs, compiler_options=options)

        def zeros(sums: tuple[str, ...], maxima: tuple[str, ...]) -> Outcome:
            abstract = strategy.trained(strategy.abstract)
            grads = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), abstract)
            return grads, Tally(dict.fromkeys(sums, jnp.float32(0)), dict.fromkeys(maxima, jnp.float32(0)))

        def accumulate(params: Params, grads: Params, tally: Tally, batch: TrainBatch) -> Outcome:
            _, more_tally, more_grads = self._loss_and_grad(params, batch)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, more_grads), tally + more_tally

        def add(first: Outcome, second: Outcome) -> Outcome:
            return jax.tree.map(jnp.add, first[0], second[0]), first[1] + second[1]

        self._zeros = jax.jit(zeros, static_argnums=(0, 1), out_shardings=shardings)
        # Adds the outcomes of `accumulate` for two parts of a step. The first outcome is donated.
        self.add = jax.jit(add, donate_argnums=0, out_shardings=shardings)
        self._accumulate = jax.jit(accumulate, donate_argnums=(1, 2), out_shardings=shardings, compiler_options=options)
        if self._config.lora.rank:
            self._compile_adapters()

    def _compile_adapters(self) -> None:
        strategy = self.strategy

        def merged(weights: Params, adapters: Params) -> Params:
            return with_adapters(weights, adapters, strategy.specs)

        def pulled(weights: Params, adapters: Params, grads: Params) -> Params:
            changed, pull = jax.vjp(functools.partial(merged, weights), adapters)
            return pull(jax.tree.map(lambda grad, weight: grad.astype(weight.dtype), grads, changed))[0]

        self._merged = jax.jit(merged, out_shardings=adapted(strategy.shardings, strategy.specs))
        self._pulled = jax.jit(pulled, out_shardings=strategy.trained(strategy.shardings))


def _described(array: Any) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _of_all(processes: int, batch: TrainBatch) -> TrainBatch:
    def shape(array: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
        sizes = [size * processes if axis == rows else size for axis, size in enumerate(array.shape)]
        return jax.ShapeDtypeStruct(tuple(sizes), array.dtype)

    return jax.tree.map(shape, batch, _row_dims(batch))


def _shapes(tree: Any) -> tuple[object, ...]:
    """Returns the structure and the shapes of a batch, which together identify its compiled program."""
    return (jax.tree.structure(tree), *(x.shape for x in jax.tree.leaves(tree)))


def on_every_device(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns the shapes of arrays that every device of the mesh holds completely."""
    return with_shardings(tree, jax.tree.map(lambda _: NamedSharding(mesh, P()), tree))


def _owned(microbatches: Sequence[Microbatch]) -> tuple[list[int], list[TrainBatch], list[int]]:
    owned = [(i, m.batch, m.owner) for i, m in enumerate(microbatches) if m.owner is not None]
    return [i for i, _, _ in owned], [batch for _, batch, _ in owned], [owner for _, _, owner in owned]


def _row_dims(batch: TrainBatch | PackedTokens) -> Any:
    """Returns each array's dimension of rows or patches: the second in rotary positions, else the first."""

    def dimension(path: tuple, _: Any) -> int:
        return 1 if getattr(path[-1], "name", "") == "positions_3BT" else 0

    return jax.tree_util.tree_map_with_path(dimension, batch)
