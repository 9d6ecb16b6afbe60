"""The learner: owns parameters and optimizer state on the mesh and turns microbatches into optimizer steps.

Two compiled programs make a step: `Gradients` adds a microbatch's gradients to those of the step, `apply` clips,
updates and reports. Nothing is fetched until the end of the step, and then one small array.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from models.config import TextConfig
from models.decoder import Decoder, is_abstract, shapes_only
from models.inputs import PackedTokens
from sharding.links import Links
from sharding.mesh import make_mesh
from sharding.strategy import Params, Tally
from sharding.weights import with_shardings

from ..algorithms import importance
from ..base.types import TrainBatch
from ..batch.composition import Microbatch
from ..config import Config, DType, OptimConfig, Schedule, Strategy
from .gradients import GAP, Gradients, Outcome, Scores, TokenLoss, TrainingPhase, on_every_device


class Learner:
    """Trains `model` with an algorithm's `token_loss`.

    `params` are never overwritten in place: an engine or a checkpoint may hold on to them through later steps.
    The optimizer's moments are. `version` counts the steps taken since the last `reset`. An abstract model makes an
    abstract learner, which allocates nothing: for those who compile its programs without running them (`lowered`).
    """

    gradients: Gradients  # of this phase, on the learner's mesh
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

        `model`'s weights are spread over `mesh` (default: as `config.sharding.devices` says), without a copy where they
        lie so already; the learner does not hold on to the model. `never_sampled` are token ids that the engine is told
        never to generate: the policy's distribution leaves them out. Raises `sharding.mesh.MeshError` if there are not
        so many devices, and ConfigError for hosts (`sharding.hybrid`) that these can't be cut into."""
        self.config = config
        self.mesh = make_mesh(config.sharding.devices) if mesh is None else mesh
        self._model = shapes_only(model)
        self._links = links
        self._built_for: Any = None
        self.reset(token_loss, never_sampled=never_sampled)
        self._abstract = is_abstract(model)
        self.params = self._born(model)
        self.opt_state = self._fresh_opt_state()
        if config.sharding.strategy is Strategy.ODC:
            _ = self.gradients.odc  # hosts that can't be end here

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
        config = self.config
        optim = optim or config.optim
        temperature = config.rollout.temperature if temperature is None else temperature
        phase = TrainingPhase(token_loss, temperature or 1.0, never_sampled)
        self._schedule = learning_rate(optim, steps or config.steps)
        self._optimizer = optimizer(optim, self._schedule)
        built_for = phase, config.algorithm, config.model, config.sharding, config.optim.gradients_dtype
        if self._built_for != built_for:  # else `fit` again would compile again what there is
            self.gradients = Gradients(config, self._model, phase, self.mesh, self._links)
            self._built_for = phase, *copy.deepcopy(built_for[1:])
        self._compile_update()
        self.version = 0
        if hasattr(self, "params"):
            self.opt_state = self._fresh_opt_state()

    def _born(self, model: Decoder) -> Params:
        params, strategy = nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.gradients.strategy
        return with_shardings(params, strategy.shardings) if self._abstract else strategy.shard(params)

    def _fresh_opt_state(self) -> Any:
        if self._abstract:
            return with_shardings(jax.eval_shape(self._optimizer.init, self.params), self._opt_shardings)
        return self._init(self.params)

    def lowered(self, batch: TrainBatch) -> dict[str, jax.stages.Lowered]:
        """The programs of a step whose microbatches are shaped like `batch` (which may be abstract), by name, not
        compiled yet: `accumulate`, `update`, `logprobs`."""
        programs = self.gradients.lowered(self.params, batch)
        grads, tally = programs["accumulate"].out_info
        grads = with_shardings(grads, self.gradients.strategy.shardings)
        tally = on_every_device(tally, self.mesh)
        return programs | {"update": self._apply.lower(self.params, self.opt_state, grads, tally)}

    def step(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """One optimizer step over the sum of the microbatches' losses. Blocks until it is done.

        Metrics: `loss`; `lr`; `grad_norm` before clipping; `trained_tokens`; the means of the algorithm's metrics
        over trained tokens; for tokens that an engine generated, `importance.metrics`; for those that it generated
        with these very weights, mean and maximum absolute difference of its log-probs and the trainer's before the
        update. Gradients not finite change nothing and are reported by `skipped_nonfinite` = 1. `seconds/idle`, where
        work is predicted: how long a device waited for the last one at the end, on average; 0 if no microbatch has an
        owner.

        Raises what `Gradients.accumulate` does, before anything has changed.
        """
        metrics = self.update(*self.accumulate(microbatches))
        if microbatches[0].work is not None:
            alone = any(microbatch.owner is not None for microbatch in microbatches)
            metrics["seconds/idle"] = self.gradients.odc.idle if alone else 0.0
        return metrics

    def update(self, grads: Params, tally: Tally) -> dict[str, float]:
        """The optimizer step with the gradients of a whole step, which are donated. Metrics are those of `step`."""
        self.params, self.opt_state, report = self._apply(self.params, self.opt_state, grads, tally)
        self.version += 1
        return _metrics(tally, np.asarray(report))

    def accumulate(self, microbatches: Sequence[Microbatch]) -> Outcome:
        """See `Gradients.accumulate`."""
        return self.gradients.accumulate(self.params, microbatches)

    def logprobs(self, inputs: PackedTokens, params: Params | None = None) -> Scores:
        """See `Gradients.logprobs`; under the learner's parameters or others of the same layout (a frozen
        reference)."""
        return self.gradients.logprobs(self.params if params is None else params, inputs)

    def state(self) -> dict[str, Any]:
        """Everything that the rest of training depends on, as a pytree of arrays for a checkpoint."""
        return {
            "params": self.params,
            "opt_state": self.opt_state,
            "version": jax.device_put(np.int32(self.version), NamedSharding(self.mesh, P())),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned, here or on another mesh."""
        self.params = self.gradients.on_mesh(state["params"])
        self.opt_state = jax.device_put(state["opt_state"], self._opt_shardings, may_alias=False)
        self.version = int(state["version"])

    def _compile_update(self) -> None:
        """The optimizer's programs."""
        shardings, replicated = self.gradients.strategy.shardings, NamedSharding(self.mesh, P())
        abstract = self.gradients.strategy.abstract
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
            grads = jax.tree.map(lambda grad, weight: grad.astype(weight.dtype), grads, params)
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


def learning_rate(optim: OptimConfig, steps: int) -> optax.Schedule:
    """Optimizer step (from 0) -> learning rate: linear warm-up that starts above zero, then the schedule down to
    zero at `steps`."""
    decay_steps = max(steps - optim.warmup_steps, 1)
    if optim.schedule is Schedule.LINEAR:
        decay = optax.linear_schedule(optim.lr, 0.0, decay_steps)
    elif optim.schedule is Schedule.COSINE:
        decay = optax.cosine_decay_schedule(optim.lr, decay_steps)
    else:
        decay = optax.constant_schedule(optim.lr)
    if optim.warmup_steps == 0:
        return decay
    first = optim.lr / optim.warmup_steps
    warmup = optax.linear_schedule(first, optim.lr, max(optim.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [optim.warmup_steps])


def optimizer(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (decoupled weight decay on every weight) after clipping by the global norm; 0 clips nothing.

    The last part of its state counts the steps."""
    adam = optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm or math.inf),
        adam if optim.moments_dtype is DType.FLOAT32 else _kept_in(optim.moments_dtype, adam),
        optax.add_decayed_weights(optim.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _kept_in(dtype: DType, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, but what it remembers between two steps is rounded to this dtype."""

    def cast(state: Any, to: str) -> Any:
        return jax.tree.map(lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params: optax.Params) -> Any:
        return cast(inner.init(params), dtype.value)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        updates, state = inner.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype.value)

    return optax.GradientTransformation(init, update)
