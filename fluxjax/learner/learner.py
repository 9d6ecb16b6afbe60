"""The learner: owns parameters and optimizer state on the mesh and turns microbatches into optimizer steps.

Two compiled programs make a step: `accumulate` adds a microbatch's gradients to those of the step, `apply` clips,
updates and reports. Nothing is fetched until the end of the step, and then one small array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from models.config import TextConfig
from models.decoder import Decoder
from models.forward import logprobs as model_logprobs
from models.inputs import PackedTokens
from sharding.fsdp import Fsdp
from sharding.gpu_flags import compiler_options
from sharding.links import Links
from sharding.mesh import MeshError, make_mesh
from sharding.odc import Odc
from sharding.strategy import Params, Tally
from sharding.walk import Walk

from ..algorithms import importance
from ..base.types import TrainBatch
from ..batch.fill import COLLECTIVE
from ..batch.spreading import shape_book
from ..config import AlgorithmConfig, Config, ConfigError, OptimConfig, Remat, Strategy
from .optim import learning_rate, optimizer

# (logprobs_BT, entropies_BT, batch, config) -> (token_loss_BT, metrics by name, each [B, T])
TokenLoss: TypeAlias = Callable[[Array, Array, TrainBatch, AlgorithmConfig], tuple[Array, dict[str, Array]]]

_T = TypeVar("_T")
GAP = "rollout_trainer_logprob_gap"


class Learner:
    """Trains `model` with an algorithm's `token_loss`.

    `shapes` are the buffer sizes that batches of spread sequences had so far, for `compose`: part of a run's state.

    `params` are never overwritten in place: an engine or a checkpoint may hold on to them through later steps.
    The optimizer's moments are. `version` counts the steps taken since the last `reset`.
    """

    params: Params
    opt_state: Any
    version: int

    def __init__(
        self,
        config: Config,
        model: Decoder,
        token_loss: TokenLoss,
        *,
        mesh: Mesh | None = None,
        never_sampled: tuple[int, ...] = (),
        links: Links | None = None,
    ) -> None:
        """`links` are those to the other processes, where there are others and `sharding.strategy` is `odc`.

        `model` keeps its own weights: the learner starts from a copy, spread over `mesh` (default: as
        `config.sharding.devices` says). `never_sampled` are token ids that the engine is told never to generate: the
        policy's distribution leaves them out. Raises `sharding.mesh.MeshError` if there are not so many devices, and
        ConfigError for hosts (`sharding.hybrid`) that these can't be cut into."""
        self.config = config
        self.mesh = make_mesh(config.sharding.devices) if mesh is None else mesh
        self.shapes = shape_book(config)
        self._model = model
        self._links = links
        self._built_for: Any = None
        self.reset(token_loss, never_sampled=never_sampled)
        self.params = self._strategy.shard(nnx.to_pure_dict(nnx.state(model, nnx.Param)), may_alias=False)
        self.opt_state = self._init(self.params)
        if config.sharding.strategy is Strategy.ODC:
            _ = self.odc  # hosts that can't be end here

    @property
    def text(self) -> TextConfig:
        """The decoder's sizes: what spreading sequences depends on."""
        return self._model.config.text

    def reset(
        self,
        token_loss: TokenLoss,
        *,
        optim: OptimConfig | None = None,
        steps: int | None = None,
        temperature: float | None = None,
        never_sampled: tuple[int, ...] = (),
    ) -> None:
        """Begins a phase (warm start, then RL): parameters stay; optimizer, schedule and version start afresh.

        `optim` and `steps`, the length of the schedule, default to the configuration's. So does `temperature`, that
        of the distribution which log-probs are of: the rollout's, or 1 where rollouts are greedy.
        """
        optim = optim or self.config.optim
        self._never_sampled = never_sampled
        self._temperature = self.config.rollout.temperature if temperature is None else temperature
        self._temperature = self._temperature or 1.0
        self._token_loss = token_loss
        self._schedule = learning_rate(optim, steps or self.config.steps)
        self._optimizer = optimizer(optim, self._schedule)
        settings = self.config.algorithm, self.config.model, self.config.sharding, self._temperature, never_sampled
        if self._built_for != (token_loss, settings):  # else `fit` again would compile again what there is
            self._build()
            self._built_for = token_loss, copy.deepcopy(settings)
        self._compile_update()
        self.version = 0
        if hasattr(self, "params"):
            self.opt_state = self._init(self.params)

    def on(self, devices: Sequence[Any]) -> Learner:
        """One with the parameters of this moment on other devices of this process, for gradients and log-probs only: it
        has no optimizer state. Bring newer parameters with `follow`."""
        other = copy.copy(self)
        other.mesh, other._links = make_mesh(devices=devices), None
        del other.opt_state
        other._build()
        other.follow(self)
        return other

    def follow(self, other: Learner) -> None:
        """Takes over its parameters and version; they may lie on another mesh."""
        self.params, self.version = self.on_mesh(other.params), other.version

    def on_mesh(self, params: Params) -> Params:
        """Parameters, or gradients, laid out on this learner's mesh."""
        return self._strategy.shard(params)

    def bring(self, grads: Params, tally: Tally) -> tuple[Params, Tally]:
        """What `accumulate` returned on another mesh, on this one."""
        return self.on_mesh(grads), jax.device_put(tally, NamedSharding(self.mesh, P()))

    def add(self, one: tuple[Params, Tally], other: tuple[Params, Tally]) -> tuple[Params, Tally]:
        """The sum of what `accumulate` returned for two parts of a step; `one` is donated."""
        return self._add(one, other)

    def _build(self) -> None:
        """Strategy and programs of a phase on `mesh`, but for the optimizer's."""
        self._strategy = Fsdp(
            self.mesh,
            self._model,
            forward=self._forward,
            loss=self._loss,
            row_dims=_row_dims,
            compute_dtype=jnp.dtype(self.config.model.compute_dtype.value),
            remat=self.config.sharding.remat is Remat.LAYER,
        )
        self._odc: Odc | None = None  # until it is needed
        self._compile()

    def step(
        self, batches: Sequence[TrainBatch], devices: Sequence[int] = (), work: Sequence[float] = ()
    ) -> dict[str, float]:
        """One optimizer step over the sum of the microbatches' losses. Blocks until it is done.

        All devices compute each of `batches` together, or `devices[i]` the `i`-th alone, each device at its own pace
        (`sharding.odc`), after those for which it is `COLLECTIVE`; `work` is what each is predicted to cost.

        Metrics: `loss`; `lr`; `grad_norm` before clipping; `trained_tokens`; the means of the algorithm's metrics
        over trained tokens; for tokens that an engine generated, `importance.metrics`; for those that it generated
        with these very weights, mean and maximum absolute difference of its log-probs and the trainer's before the
        update. Gradients not finite change nothing and are reported by `skipped_nonfinite` = 1. `seconds/idle`, with
        `devices`: how long a device waited for the last one at the end, on average; 0 if all microbatches are
        collective.

        Raises ValueError without a microbatch, or if the devices do not divide its rows; `sharding.odc.OdcError` for a
        device that fails alone, before anything has changed.
        """
        metrics = self.update(*self.accumulate(batches, devices, work))
        if devices:
            metrics["seconds/idle"] = self.odc.idle if set(devices) != {COLLECTIVE} else 0.0
        return metrics

    def update(self, grads: Params, tally: Tally) -> dict[str, float]:
        """The optimizer step with the gradients of a whole step, which are donated. Metrics are those of `step`."""
        self.params, self.opt_state, report = self._apply(self.params, self.opt_state, grads, tally)
        self.version += 1
        return _metrics(tally, np.asarray(report))

    def accumulate(
        self, batches: Sequence[TrainBatch], devices: Sequence[int] = (), work: Sequence[float] = ()
    ) -> tuple[Params, Tally]:
        """(gradients, tally) summed over the microbatches, laid out like the parameters. If all are collective, they
        are not waited for."""
        if not batches:
            raise ValueError("an optimizer step needs at least one microbatch")
        together, alone = _by_kind(len(batches), devices)
        if not alone:
            return self._accumulate_together(batches)
        first = self._accumulate_together(_at(together, batches)) if together else None
        jax.block_until_ready(first)  # so that all devices begin at their own pace together
        _, tally, grads = self.odc.loss_and_grad(
            self.params, _at(alone, batches), _at(alone, devices), _at(alone, work) if work else ()
        )
        return (grads, tally) if first is None else self._add(first, (grads, tally))

    def _accumulate_together(self, batches: Sequence[TrainBatch]) -> tuple[Params, Tally]:
        placed = self._place(batches[0].inputs, batches[0])
        _, abstract, _ = jax.eval_shape(self._loss_and_grad, self.params, placed)
        grads, tally = self._zeros(tuple(abstract.sums), tuple(abstract.maxima))
        for batch in batches:
            placed = placed if batch is batches[0] else self._place(batch.inputs, batch)
            grads, tally = self._accumulate(self.params, grads, tally, placed)
        return grads, tally

    def logprobs(self, inputs: PackedTokens, params: Params | None = None) -> tuple[jax.Array, jax.Array]:
        """(log-probability of each token, entropy of its distribution), `[B, T]` float32, under the learner's
        parameters or others of the same layout (a frozen reference). Meaningless where a token has no predecessor."""
        return self._logprobs(self.params if params is None else params, self._place(inputs, inputs))

    def scores(
        self, batches: Sequence[PackedTokens], devices: Sequence[int] = (), params: Params | None = None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """`logprobs` of each batch, computed as `step` would. Raises ConfigError where devices of other processes
        compute some of them: nothing brings their scores here."""
        together, alone = _by_kind(len(batches), devices)
        scores = {i: self.logprobs(batches[i], params) for i in together}
        if alone:
            jax.block_until_ready(scores)
            params = self.params if params is None else params
            found = self.odc.logprobs(params, _at(alone, batches), _at(alone, devices))
            if None in found:
                raise ConfigError("sharding.strategy is odc: log-probs of several processes can't be brought together")
            scores |= dict(zip(alone, found, strict=True))
        return [scores[i] for i in range(len(batches))]

    @property
    def odc(self) -> Odc:
        """Runs microbatches that belong to single devices. Raises ConfigError for hosts that the mesh can't be cut
        into."""
        if self._odc is None:
            settings = self.config.sharding
            try:
                self._odc = Odc(
                    self._strategy,
                    live_layers=settings.live_layers,
                    deterministic=settings.deterministic,
                    group=settings.devices_per_host if settings.hybrid else 0,
                    links=self._links,
                )
            except MeshError as error:
                raise ConfigError(f"sharding.devices_per_host is {settings.devices_per_host}: {error}") from error
        return self._odc

    def state(self) -> dict[str, Any]:
        """Everything that the rest of training depends on, as a pytree of arrays for a checkpoint."""
        return {
            "params": self.params,
            "opt_state": self.opt_state,
            "version": jax.device_put(np.int32(self.version), NamedSharding(self.mesh, P())),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned, here or on another mesh."""
        self.params = self._strategy.shard(state["params"])
        self.opt_state = jax.device_put(state["opt_state"], self._opt_shardings, may_alias=False)
        self.version = int(state["version"])

    def _place(self, inputs: PackedTokens, batch: Any) -> Any:
        if inputs.spread is not None and not set(inputs.spread.axes) <= set(self.mesh.axis_names):
            raise ValueError(
                f"the batch is spread over axes {inputs.spread.axes}, the mesh has {self.mesh.axis_names}; for these "
                f"strategies make the mesh with make_mesh({self.mesh.size}), without further replicas"
            )
        return self._strategy.place(batch)

    def _forward(self, model: Any, inputs: PackedTokens, walk: Walk) -> tuple[Array, Array]:
        return model_logprobs(
            model,
            inputs,
            walk,
            temperature=self._temperature,
            vocab_chunk=self.config.sharding.vocab_chunk,
            never_sampled=self._never_sampled,
        )

    def _loss(self, model: Any, batch: TrainBatch, walk: Walk) -> tuple[Float[Array, ""], Tally]:
        logprobs_BT, entropies_BT = self._forward(model, batch.inputs, walk)
        token_loss_BT, metrics = self._token_loss(logprobs_BT, entropies_BT, batch, self.config.algorithm)
        trained_BT = batch.loss_weights_BT != 0.0
        generated_BT = trained_BT & (batch.lags_BT >= 0)
        fresh_BT = trained_BT & (batch.lags_BT == 0)  # generated by these very weights
        gap_BT = jnp.where(fresh_BT, jnp.abs(logprobs_BT - batch.behaviour_logprobs_BT), 0.0)
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
        more, maxima = importance.tally(logprobs_BT, batch, generated_BT, self.config.algorithm.importance)
        return loss, Tally(sums | more, maxima | {f"{GAP}_max": jnp.max(gap_BT)})

    def _compile(self) -> None:
        """The programs of a phase; each is compiled at its first use, `accumulate` once for each batch shape."""
        shardings, replicated = self._strategy.shardings, NamedSharding(self.mesh, P())
        abstract = self._strategy.abstract
        options = compiler_options(self.mesh)
        self._loss_and_grad = jax.jit(self._strategy.loss_and_grad)
        self._logprobs = jax.jit(self._strategy.logprobs, compiler_options=options)

        def zeros(sums: tuple[str, ...], maxima: tuple[str, ...]) -> tuple[Params, Tally]:
            grads = jax.tree.map(lambda weight: jnp.zeros(weight.shape, weight.dtype), abstract)
            return grads, Tally(dict.fromkeys(sums, jnp.float32(0)), dict.fromkeys(maxima, jnp.float32(0)))

        self._zeros = jax.jit(zeros, static_argnums=(0, 1), out_shardings=(shardings, replicated))

        def accumulate(params: Params, grads: Params, tally: Tally, batch: TrainBatch) -> tuple[Params, Tally]:
            _, more_tally, more_grads = self._loss_and_grad(params, batch)
            return jax.tree.map(jnp.add, grads, more_grads), tally + more_tally

        def add(one: tuple[Params, Tally], other: tuple[Params, Tally]) -> tuple[Params, Tally]:
            return jax.tree.map(jnp.add, one[0], other[0]), one[1] + other[1]

        self._add = jax.jit(add, donate_argnums=0, out_shardings=(shardings, replicated))
        self._accumulate = jax.jit(
            accumulate, donate_argnums=(1, 2), out_shardings=(shardings, replicated), compiler_options=options
        )

    def _compile_update(self) -> None:
        """The optimizer's programs."""
        shardings, replicated = self._strategy.shardings, NamedSharding(self.mesh, P())
        abstract = self._strategy.abstract
        self._opt_shardings = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, abstract),
            shardings,
            transform_non_params=lambda _: replicated,
        )
        # `jit(init)` alone would put all of it on the first device.
        self._init = jax.jit(self._optimizer.init, out_shardings=self._opt_shardings)

        def apply(params: Params, opt_state: Any, grads: Params, tally: Tally) -> tuple[Params, Any, Array]:
            grad_norm = optax.tree_utils.tree_norm(grads)
            finite = jnp.isfinite(grad_norm) & jnp.isfinite(tally.sums["loss"])
            with jax.numpy_dtype_promotion("standard"):  # optax relies on it
                lr = jnp.asarray(self._schedule(opt_state[-1].count), jnp.float32)
                updates, new_opt_state = self._optimizer.update(grads, opt_state, params)
            new = optax.apply_updates(params, updates), new_opt_state
            params, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, opt_state))
            skipped = jnp.where(finite, 0.0, 1.0)
            return params, opt_state, jnp.stack([lr, grad_norm, skipped, *jax.tree.leaves(tally)])

        # The new parameters take the place of the gradients; the old ones may still be in use elsewhere.
        self._apply = jax.jit(apply, donate_argnums=(1, 2), out_shardings=(shardings, self._opt_shardings, replicated))


def _by_kind(count: int, devices: Sequence[int]) -> tuple[list[int], list[int]]:
    """(the microbatches that all devices compute together, those of one device each), as indices."""
    if devices and len(devices) != count:
        raise ValueError(f"{count} microbatches, {len(devices)} devices; as many each, or no devices")
    alone = [i for i, device in enumerate(devices) if device != COLLECTIVE]
    return sorted(set(range(count)) - set(alone)), alone


def _at(indices: Sequence[int], values: Sequence[_T]) -> list[_T]:
    return [values[i] for i in indices]


def _row_dims(batch: TrainBatch | PackedTokens) -> Any:
    """Rows and patches are the first dimension of everything but the rotary positions."""

    def one(path: tuple, _: Any) -> int:
        return 1 if getattr(path[-1], "name", "") == "positions_3BT" else 0

    return jax.tree_util.tree_map_with_path(one, batch)


def _metrics(tally: Tally, report: np.ndarray) -> dict[str, float]:
    """Names the entries of `apply`'s report; sums over tokens become means."""
    names = [*sorted(tally.sums), *sorted(tally.maxima)]  # pytrees of dicts are in the order of their keys
    lr, grad_norm, skipped, *values = report.tolist()
    tallied = dict(zip(names, values, strict=True))
    loss, trained, generated = (tallied.pop(key) for key in ("loss", "trained_tokens", "generated_tokens"))
    fresh, gap, gap_max = (tallied.pop(key) for key in ("fresh_tokens", GAP, f"{GAP}_max"))
    weights = {name: tallied.pop(name) for name in importance.TALLIED}
    metrics = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "trained_tokens": trained, "skipped_nonfinite": skipped}
    metrics |= {name: value / max(trained, 1.0) for name, value in tallied.items()}
    if fresh:
        metrics |= {GAP: gap / fresh, f"{GAP}_max": gap_max}
    if generated:
        metrics |= importance.metrics(weights, generated)
    return metrics
