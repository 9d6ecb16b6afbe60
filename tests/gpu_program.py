"""Computes what a run is made of on JAX's first device, into a file: another device's is held against it.

    python gpu_program.py forward OUT.npz              log-probabilities and gradients of packed rows with media
    python gpu_program.py forward OUT.npz float64      the same in float64: for a CPU
    python gpu_program.py step OUT.npz                 a training step: loss, gradients, the weights after it
    python gpu_program.py engine OUT.npz               greedy answers of the engine; the whole forward pass over them

A process of its own, since tests have JAX for CPUs only. Heads have 64 numbers, so that GPUs run our kernels.
"""

import dataclasses
import functools
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER / "models"), str(FOLDER / "rollout")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

WIDE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def named(tree, prefix):
    """The arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix} {jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def forward(dtype="float32"):
    if dtype == "float64":  # norms, softmax and logits name float32
        jax.config.update("jax_enable_x64", True)
        jnp.float32 = jnp.float64
    from tiny import rows, sequence, vl_config

    import models
    from models.config import RopeConfig
    from models.decoder import logprobs
    from sharding.walk import Walk

    rng = np.random.default_rng(0)
    config = vl_config(rope=RopeConfig(mrope_section=(16, 8, 8)), **WIDE)
    a, b, c, d = (sequence(rng, length, image) for length, image in ((40, True), (23, False), (31, True), (30, False)))
    inputs = rows([[a, b], [c, d]], 64, config)
    graphdef, params = models.split(models.create(config, seed=1))
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    shares = jnp.asarray(rng.normal(size=inputs.tokens_BT.shape) * (inputs.segments_BT > 0), dtype)

    @jax.jit
    def both(params, inputs):
        def loss(params):
            found, _ = logprobs(models.merge(graphdef, params), inputs, Walk())
            return jnp.sum(found * shares), found

        return jax.grad(loss, has_aux=True)(params)

    grads, found = both(params, inputs)
    return {"logprobs": np.asarray(found) * (inputs.segments_BT > 0)} | named(grads, "gradient")


def step():
    import learner_cases
    from packing_cases import MODEL, compose, make_config

    from fluxjax.algorithms import grpo
    from fluxjax.learner.learner import Learner
    from sharding.mesh import make_mesh

    rope = dataclasses.replace(MODEL.text.rope, mrope_section=(16, 8, 8))
    wide = dataclasses.replace(MODEL, text=dataclasses.replace(MODEL.text, rope=rope, **WIDE))
    config = make_config()
    config.optim.eps = 1e-2  # Adam divides by roots of second moments: rounding of tiny gradients would be whole steps
    learner = Learner(config, learner_cases.tiny(None, wide), grpo.token_loss, mesh=make_mesh(1))
    groups, prepared = learner_cases.random_groups(3)
    batches = compose(groups, prepared, config, vision=wide.vision).microbatches
    grads, tally = learner.accumulate(batches)
    found = {"loss": np.asarray(tally.sums["loss"])} | named(grads, "gradient")
    learner.step(batches)
    return found | named(learner.params, "weight")


def engine():
    import rollout_cases as cases

    from models.config import RopeConfig

    text = dataclasses.replace(cases.VL.text, rope=RopeConfig(mrope_section=(16, 8, 8)), **WIDE)
    model = cases.build(dataclasses.replace(cases.VL, text=text))
    prompts = [cases.text_prompt(9), cases.media_prompt(4, ("image", (1, 4, 8)), 3)]
    requests = [cases.request(str(i), p, temperature=0.0, max_new_tokens=12) for i, p in enumerate(prompts)]
    found = {}
    for number, ((answer,), prompt) in enumerate(zip(cases.run(cases.engine(model), *requests), prompts, strict=True)):
        found[f"tokens {number}"] = np.asarray(answer.ids)
        found[f"engine {number}"] = np.asarray(answer.logprobs)
        found[f"whole {number}"] = cases.full_logprobs(model, prompt, answer.ids)
    return found


if __name__ == "__main__":
    what, file, *dtype = sys.argv[1:]
    run = functools.partial({"forward": forward, "step": step, "engine": engine}[what], *dtype)
    np.savez(file, device=jax.devices()[0].device_kind, **run())
