"""The optimizer and its learning rate, from the configuration."""

from __future__ import annotations

import math

import optax

from ..config import OptimConfig, Schedule


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
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm or math.inf),
        optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps),
        optax.add_decayed_weights(optim.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
