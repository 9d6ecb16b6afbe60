"""The learner, which owns parameters and optimizer state on the mesh, and turns microbatches into optimizer steps.

Two compiled programs make an optimizer step. One, of `Gradients`, adds a microbatch's gradients to those of the step.
The other, `apply`, clips, updates and reports. The host fetches one small array at the end of the step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import models
from models.config import TextConfig
from models.decoder import Decoder, shapes_only
from models.inputs import PackedTokens
from sharding.links import Links
from sharding.mesh import exact_products, make_mesh
from sharding.walk import Params, Tally, is_abstract
from sharding.weights import WeightSpec, by_path, like, map_weights, with_shardings

from ..algorithms.loss import TALLIED, importance_metrics
from ..base.types import TrainBatch
from ..batch.composition import Microbatch
from ..config import ODC, Config, ConfigError, OptimConfig, Schedule
from ..config.schedules import rate_schedule
from .gradients import GAP, Gradients, Outcome, Scores, TokenLoss, TrainingPhase, on_every_device

if TYPE_CHECKING:
    from ..data.materializer import Materializer

# metrics that are summed over the optimizer steps of a training step
_ADDED = ("trained_tokens", "skipped_nonfinite", "seconds/idle")


class Learner:
    """Trains `model` with an algorithm's `token_loss`. `params` are never overwritten in place, because an engine or a
    checkpoint may still use them. The optimizer's moments are overwritten. `version` counts the training steps of the
    present phase (`reset`). The learner of an abstract model is abstract: it allocates nothing, and its programs can be
    compiled (`lowered`) but not run."""

    gradients_kind: type[Gradients] = Gradients
    gradients: Gradients  # programs of this phase, on the learner's mesh
    params: Params
    opt_state: Any
    version: int
    idle: float | None = None  # mean seconds that a device waited for others in the last step; None: not measured

    def __init__(
        self,
        config: Config,
        model: Decoder,
        token_loss: TokenLoss,
        *,
        mesh: Mesh | None = None,
        never_sampled: tuple[int, ...] = (),
        links: Links | None = None,
        materializer: Materializer | None = None,
    ) -> None:
        """`links` connect to the other processes, if there are several processes and `sharding.strategy` is `odc`.
        `materializer` fetches pixels that a media store holds.

        The weights of `model` are laid out over `mesh` (default: `config.sharding.devices` devices), without a copy if
        their layout fits. The policy's distribution has no token ids of `never_sampled`. Raises
        `sharding.mesh.MeshError` if there are fewer devices than `config.sharding.devices`. Raises ConfigError if
        `sharding.strategy.hybrid` is on and the mesh can't be cut into hosts of `sharding.devices_per_host` devices."""
        exact_products(config.model.compute_dtype.value)
        self.config = config
        self.mesh = make_mesh(config.sharding.devices) if mesh is None else mesh
        self._lora = lora_of(config)
        self._model = shapes_only(model) if self._lora is None else models.adapted(model, self._lora)
        self._decayed = decayed(self._model)
        self._links, self._materializer = links, materializer
        self._built_for: Any = None
        self.reset(token_loss, never_sampled=never_sampled)
        self._abstract = is_abstract(models.split(model)[1])
        self.params = self.laid_out(model)
        self._base = None  # fingerprints of the frozen weights
        if self._lora is not None and not self._abstract:
            self._base = fingerprint(self.gradients.strategy.frozen(self.params), self.mesh)
        self.opt_state = self._fresh_opt_state()
        if isinstance(config.sharding.strategy, ODC):
            _ = self.gradients.odc  # raises if the mesh can't be cut into hosts

    @property
    def text(self) -> TextConfig:
        """The decoder's sizes."""
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
        """Begins a phase, which is the warm start or RL. Parameters stay, and optimizer, schedule and version start
        afresh. `optim` and `steps` (the length of the schedule in optimizer steps) are those of the configuration by
        default. `temperature`, for log-probs, is by default the rollout's, or 1 if rollouts are greedy."""
        config = self.config
        optim = optim or config.optim
        temperature = config.rollout.fixed_temperature if temperature is None else temperature
        phase = TrainingPhase(token_loss, temperature or 1.0, never_sampled)
        self._schedule = learning_rate(optim, steps or config.policy_updates(config.steps))
        self._optimizer = optimizer(optim, self._schedule, self._decayed)
        built_for = phase, config.algorithm, config.model, config.sharding
        if self._built_for != built_for:  # equal programs are not compiled again, as for a second `fit`
            if self._built_for is not None:
                self.gradients.close()
            self.gradients = self.gradients_kind(
                config, self._model, phase, self.mesh, self._links, materializer=self._materializer
            )
            self._built_for = phase, *copy.deepcopy(built_for[1:])
        self._compile_update()
        self.version = 0
        if hasattr(self, "params"):
            self.opt_state = self._fresh_opt_state()

    def laid_out(self, model: Decoder) -> Params:
        """Lays out the weights of a model of the same sizes over the mesh, without a copy if their layout fits.
        Adapters, if any, are new and add nothing to the weights."""
        strategy = self.gradients.strategy
        if self._abstract:
            return with_shardings(strategy.abstract, strategy.shardings)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        if self._lora is not None:
            adapters = models.fresh_adapters(self._model, self.config.seed, strategy.shardings)
            params = unflatten_dict(by_path(params) | adapters)
        return strategy.shard(params)

    def weights(self) -> Params:
        """Returns the parameters as engines and files have them, on the mesh, with adapters added."""
        return self.gradients.merged(self.params)

    def adopt(self, adapters: Mapping[tuple[str, ...], np.ndarray]) -> None:
        """Replaces the learner's adapters by `adapters`, by path."""
        self.params = self.with_trained(self.gradients.strategy.shard_trained(unflatten_dict(dict(adapters))))

    def trained(self, params: Params) -> Params:
        """Returns the trained weights of `params`, a state of the learner's parameters. These are the adapters, or all
        weights if there are no adapters."""
        return self.gradients.strategy.trained(params)

    def with_trained(self, trained: Params) -> Params:
        """Returns the learner's parameters with `trained` in the place of their trained weights."""
        return self.gradients.strategy.with_trained(self.params, trained)

    def _fresh_opt_state(self) -> Any:
        trained = self.trained(self.params)
        if self._abstract:
            return with_shardings(jax.eval_shape(self._optimizer.init, trained), self._opt_shardings)
        return self._init(trained)

    def lowered(self, batch: TrainBatch) -> dict[str, jax.stages.Lowered]:
        """Returns the programs `accumulate`, `update` and `logprobs`, not compiled, for microbatches like `batch`."""
        programs = self.gradients.lowered(self.params, batch)
        grads, tally = programs["accumulate"].out_info
        grads = with_shardings(grads, self.trained(self.gradients.strategy.shardings))
        tally = on_every_device(tally, self.mesh)
        return programs | {"update": self._apply.lower(self.trained(self.params), grads, self.opt_state, tally)}

    def step(self, microbatches: Sequence[Microbatch], *, last: bool = True) -> dict[str, float]:
        """Makes one optimizer step over the sum of the microbatches' losses, and blocks until the step is done. The
        `last` optimizer step of a training step raises `version` by 1.

        Metrics are `loss`, `lr`, `grad_norm` before clipping, `trained_tokens`, and the means of the algorithm's
        metrics over trained tokens. Tokens that an engine generated add `importance_metrics`. Tokens that the step's
        first weights generated add the mean and the maximum of the absolute difference between engine's and trainer's
        log-probs under these weights. If the loss or a gradient is not finite, the weights stay, and
        `skipped_nonfinite` is 1. If work is predicted, `seconds/idle` is the mean time in seconds that devices waited,
        or 0 if no microbatch has an owner.

        Raises the errors of `Gradients.accumulate`, before anything changes.
        """
        metrics = self.update(*self.accumulate(microbatches), last=last)
        if microbatches[0].work is not None:
            alone = any(microbatch.owner is not None for microbatch in microbatches)
            metrics["seconds/idle"] = self.gradients.odc.idle if alone else 0.0
            self.idle = self.gradients.odc.idle if alone else None
        return metrics

    def update(self, grads: Params, tally: Tally, *, last: bool = True) -> dict[str, float]:
        """Makes the optimizer step with summed gradients, which are donated. `last` and metrics are those of `step`."""
        return _metrics(tally, self._updated(grads, tally, last=last))

    def _updated(self, grads: Params, tally: Tally, *, last: bool) -> np.ndarray:
        trained, self.opt_state, report = self._apply(self.trained(self.params), grads, self.opt_state, tally)
        self.params = self.with_trained(trained)
        self.version += last
        return np.asarray(report)

    def accumulate(self, microbatches: Sequence[Microbatch]) -> Outcome:
        """Calls `Gradients.accumulate` with the learner's parameters."""
        return self.gradients.accumulate(self.params, microbatches)

    def logprobs(self, inputs: PackedTokens, params: Params | None = None) -> Scores:
        """Calls `Gradients.logprobs` with the learner's parameters, or with `params` of the same layout."""
        return self.gradients.logprobs(self.params if params is None else params, inputs)

    def state(self) -> dict[str, Any]:
        """Returns the arrays of a checkpoint that training continues from, as a pytree. For frozen weights, which a
        resumed run reads or samples again, the state has only fingerprints."""
        everywhere = NamedSharding(self.mesh, P())
        # Processes that call `device_put` would wait for each other and compare their values.
        version = jax.make_array_from_callback((), everywhere, lambda _: np.int32(self.version))
        state = {"params": self.trained(self.params), "opt_state": self.opt_state, "version": version}
        return state if self._base is None else state | {"base": self._base}

    def forget(self) -> None:
        """Frees all arrays except for frozen weights. The learner is abstract until `load_state`."""
        self.params, self.opt_state = self.with_trained(like(self.trained(self.params))), like(self.opt_state)
        self._abstract = True

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over a result of `state()`, from this mesh or another mesh, and empties that result. Copies the moments
        one by one, because updates donate them. Raises ConfigError if the state has other frozen weights."""
        if self._base is not None and (np.asarray(state.pop("base")) != np.asarray(self._base)).any():
            raise ConfigError(
                "model.path has other weights than those that the adapters of the checkpoint were trained beside; "
                "restore the model folder with which the run began"
            )
        self._abstract = False
        self.params = self.with_trained(self.gradients.strategy.shard_trained(state.pop("params")))
        leaves, tree = jax.tree.flatten(state.pop("opt_state"))
        for number, sharding in enumerate(jax.tree.leaves(self._opt_shardings)):
            leaves[number] = jax.block_until_ready(jax.device_put(leaves[number], sharding, may_alias=False))
        self.opt_state = jax.tree.unflatten(tree, leaves)
        self.version = int(state.pop("version"))

    def _compile_update(self) -> None:
        strategy, replicated = self.gradients.strategy, NamedSharding(self.mesh, P())
        shardings, abstract = strategy.trained(strategy.shardings), strategy.trained(strategy.abstract)
        state = jax.eval_shape(self._optimizer.init, abstract)
        self._opt_shardings = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: replicated
        )
        # `jit(init)` alone would put all moments on the first device.
        self._init = jax.jit(self._optimizer.init, out_shardings=self._opt_shardings)

        def apply(params: Params, grads: Params, opt_state: Any, tally: Tally) -> tuple[Params, Any, Array]:
            grads = jax.tree.map(lambda grad, weight: grad.astype(weight.dtype), grads, params)
            grad_norm = optax.tree_utils.tree_norm(grads)
            finite = jnp.isfinite(grad_norm) & jnp.isfinite(tally.sums["loss"])
            with jax.numpy_dtype_promotion("standard"):  # optax relies on standard promotion
                lr = jnp.asarray(self._schedule(opt_state[-1].count), jnp.float32)
                updates, state = self._optimizer.update(grads, opt_state, params, finite=finite)
            updated = optax.apply_updates(params, updates)
            params = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, params)
            # The scalars are counts. `_adam` has already chosen between old and new moments.
            opt_state = jax.tree.map(lambda x, old: x if x.ndim else jnp.where(finite, x, old), state, opt_state)
            skipped = jnp.where(finite, 0.0, 1.0)
            return params, opt_state, jnp.stack([lr, grad_norm, skipped, *jax.tree.leaves(tally)])

        # The new parameters take the memory of the gradients, because engines may still use the old parameters. JAX
        # gives each result the memory of the first donated argument of its shape, so the donated arguments stand in the
        # order of the results.
        self._apply = jax.jit(apply, donate_argnums=(1, 2), out_shardings=(shardings, self._opt_shardings, replicated))


def _metrics(tally: Tally, report: np.ndarray) -> dict[str, float]:
    names = [*sorted(tally.sums), *sorted(tally.maxima)]  # the order of leaves in pytrees of dicts
    lr, grad_norm, skipped, *values = report.tolist()
    tallied = dict(zip(names, values, strict=True))
    loss, trained, generated = (tallied.pop(key) for key in ("loss", "trained_tokens", "generated_tokens"))
    fresh, gap, gap_max = (tallied.pop(key) for key in ("fresh_tokens", GAP, f"{GAP}_max"))
    weights = {name: tallied.pop(name) for name in TALLIED}
    metrics = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "trained_tokens": trained, "skipped_nonfinite": skipped}
    metrics |= {name: value / max(trained, 1.0) for name, value in tallied.items()}
    if fresh:
        metrics |= {GAP: gap / fresh, f"{GAP}_max": gap_max}
    if generated:
        metrics |= importance_metrics(weights, generated)
    return metrics


def of_all_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a training step from those of its optimizer steps. Metrics in `_ADDED` are summed, `lr` is
    the last value, and `*_max` the largest value. Every other metric is the mean, weighted by trained tokens, over the
    optimizer steps that have the metric. `updates` is the number of optimizer steps. Metrics of a single optimizer step
    stay unchanged, without `updates`."""
    if len(updates) == 1:
        return dict(updates[0])
    merged = {"updates": float(len(updates))}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if name == "lr":
            merged[name] = values[-1]
        elif name in _ADDED:
            merged[name] = float(np.sum(values))
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.average(values, weights=[update["trained_tokens"] for update in having]))
    return merged


def learning_rate(optim: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate by optimizer step, which counts from 0. A linear warm-up starts above zero. The rate
    after the warm-up is constant, follows its own schedule, or decays to zero at `steps`."""
    decay_steps, course = max(steps - optim.warmup_steps, 1), rate_schedule(optim.lr, "optim.lr")
    lr = course.value(0.0)
    if isinstance(optim.lr, str):
        rates = np.array([course.value(step / decay_steps) for step in range(decay_steps + 1)], np.float32)
        decay: optax.Schedule = lambda step: jnp.asarray(rates)[jnp.minimum(step, decay_steps)]  # noqa: E731
    elif optim.schedule is Schedule.LINEAR:
        decay = optax.linear_schedule(lr, 0.0, decay_steps)
    elif optim.schedule is Schedule.COSINE:
        decay = optax.cosine_decay_schedule(lr, decay_steps)
    else:
        decay = optax.constant_schedule(lr)
    if optim.warmup_steps == 0:
        return decay
    warmup = optax.linear_schedule(lr / optim.warmup_steps, lr, max(optim.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [optim.warmup_steps])


def optimizer(optim: OptimConfig, schedule: optax.Schedule, decayed: Params) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW after clipping by the global norm (`max_grad_norm` 0: no clipping). Decoupled weight decay applies
    to weights that are True in `decayed`. `update` with `finite=False` leaves the moments as they are. The last part of
    the state counts optimizer steps."""
    return optax.chain(
        _clip(optim.max_grad_norm or math.inf),
        _adam(optim),
        _decay(optim.weight_decay, decayed),
        optax.scale_by_learning_rate(schedule),
    )


def _clip(most: float) -> optax.GradientTransformation:
    """Clips as `optax.clip_by_global_norm`, with products instead of quotients, because XLA fuses only products."""

    def clipped(grads: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        norm = optax.tree_utils.tree_norm(grads)
        scale = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda grad: grad * scale, grads)

    return optax.stateless(clipped)


def decayed(model: Decoder) -> Params:
    """Returns True for each trained weight that decays (matrices, embeddings), False for norms and biases. Biases are
    recognised by name, because biases of queries have two axes."""

    def matrix(path: tuple, variable: nnx.Variable) -> bool | None:
        spec: WeightSpec = variable.get_metadata("spec")
        return None if spec.frozen else len(spec.shape) > 1 and not path[-1].key.endswith("_bias")

    found = by_path(map_weights(matrix, model))
    return unflatten_dict({path: value for path, value in found.items() if value is not None})


def _decay(weight_decay: float, decayed: Params) -> optax.GradientTransformation:
    """Decays as `optax.add_decayed_weights` with a mask, but without a masked state, which earlier checkpoints lack."""

    def added(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        return jax.tree.map(lambda u, p, matrix: u + weight_decay * p if matrix else u, updates, params, decayed)

    return optax.stateless(added)


def _adam(optim: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """Scales as `optax.scale_by_adam`, with moments in `moments_dtype` that overwrite the old moments. Updates are
    computed from the rounded moments. A barrier finishes all moments first. Otherwise XLA would compute the moments
    twice, for the update and for the state, and hold old and new moments of all weights at once."""
    dtype, trees = optim.moments_dtype.value, optax.tree_utils

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, *, finite: bool | Array = True, **_: Any
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        def kept(new: Array, old: Array) -> Array:
            return jnp.where(finite, new.astype(dtype), old)

        def wide(moments: optax.Updates) -> optax.Updates:
            return jax.tree.map(lambda x: x.astype(jnp.float32), moments)

        count = optax.safe_increment(state.count)
        mu = trees.tree_update_moment(updates, wide(state.mu), optim.betas[0], 1)
        nu = trees.tree_update_moment_per_elem_norm(updates, wide(state.nu), optim.betas[1], 2)
        moments = jax.tree.map(kept, (mu, nu), (state.mu, state.nu))
        mu, nu = jax.lax.optimization_barrier(moments)
        mean = trees.tree_bias_correction(wide(mu), optim.betas[0], count)
        square = trees.tree_bias_correction(wide(nu), optim.betas[1], count)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + optim.eps), mean, square)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def lora_of(config: Config) -> models.Lora | None:
    """Returns the settings of the trained adapters, or None without adapters."""
    settings = config.lora
    return models.Lora(settings.rank, settings.alpha, settings.targets) if settings.rank else None


def fingerprint(params: Params, mesh: Mesh) -> Array:
    """Returns a number for each of W arrays of weights, `[W]` uint32, on every device; any changed bit changes it."""
    of_all = jax.jit(lambda weights: jnp.stack([*map(_of, weights)]), out_shardings=NamedSharding(mesh, P()))
    return of_all(jax.tree.leaves(params))


def _of(weight: Array) -> Array:
    """Returns the sum of an array's numbers, each read as an integer and multiplied by an odd factor of its position. A
    sum of integers does not depend on the order, and an odd factor loses no bit."""
    factors = jnp.ones(weight.shape, jnp.uint32)
    for axis in range(weight.ndim):
        places = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        factors += places * jnp.uint32(2 * _STRIDES[axis])
    return jnp.sum(jax.lax.bitcast_convert_type(weight, jnp.uint32) * factors, dtype=jnp.uint32)


_STRIDES = (73856093, 19349663, 83492791, 49979687, 67867967)  # arbitrary primes, one for each axis
