"""Reinforcement learning from top to bottom: one synchronous loop over the parts that a run is made of.

    python examples/plain_loop.py
    python examples/plain_loop.py --config=configs/vlm.py:debug          settings are those of fluxjax.train

A step draws prompts, samples a group of responses to each, scores them, turns rewards into advantages, packs all tokens
into microbatches and makes one optimizer step; then the engine gets the new weights. Scheduling, evaluation, resuming,
KL terms, critics and several processes are `fluxjax.run.trainer.FluxTrainer`'s.
"""

import asyncio
import sys

from fluxjax.algorithms import find_algorithm
from fluxjax.base.types import Group, PreparedPrompt, Response, Sample
from fluxjax.config import cli
from fluxjax.data.loader import open_sources, open_warm_start
from fluxjax.learner.warm_start import warm_start
from fluxjax.rewards import Scorer
from fluxjax.run.build import build_learning, describe_model, sampling_params, training_prompts
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine


async def respond(
    engine: JaxEngine, scorer: Scorer, prompt: PreparedPrompt, sampling: SamplingParams, count: int
) -> Group:
    """Samples `count` responses to a prompt and scores them."""
    about, draw = prompt.prompt, prompt.prompt.draw
    tokens, logprobs, versions = ([[] for _ in range(count)] for _ in range(3))
    finish = [""] * count
    async for chunk in engine.generate(GenerateRequest(f"{draw}", prompt.inputs.laid_out(), sampling, count, draw)):
        tokens[chunk.sample] += chunk.token_ids
        logprobs[chunk.sample] += chunk.logprobs
        versions[chunk.sample] += chunk.versions
        finish[chunk.sample] = chunk.finish.value if chunk.finish else ""
    responses = [
        Response(f"{draw}/{i}", draw, i, tuple(tokens[i]), tuple(logprobs[i]), tuple(versions[i]), finish[i])
        for i in range(count)
    ]
    rewards = await asyncio.gather(*(scorer.score(about, response) for response in responses))
    return Group(about, tuple(map(Sample, responses, rewards)))


async def main() -> None:
    config = cli.load(["--config=configs/text.py", "--config.sharding.devices=1", *sys.argv[1:]])
    algorithm, rollout = find_algorithm(config.algorithm), config.rollout

    # --- the parts ------------------------------------------------------------------------------
    sources = open_sources(config)
    sizes, processor = describe_model(config, sources)
    learning = build_learning(config, sizes, processor)
    learner, composer = learning.learner, learning.composer
    engine = JaxEngine(learning.model, slots=rollout.slots, max_sequence_tokens=rollout.max_sequence_tokens)
    sampling, count = sampling_params(config, processor), rollout.group_size
    scorer = Scorer(config.data.sources, processor.decode, config.rewards)
    prompts = training_prompts(config, sources, processor)

    # --- supervised steps, so that the policy answers in the right form -------------------------
    async for step, metrics in warm_start(
        config, learner, composer, open_warm_start(config), processor, count_skip=print
    ):
        print(f"warm start, step {step}/{config.warm_start.steps}: loss {metrics['loss']:.3f}")
    learner.reset(algorithm.token_loss, never_sampled=sampling.forbidden_ids)

    # --- the loop -------------------------------------------------------------------------------
    for step in range(1, config.steps + 1):
        await engine.update_weights(learner.version, learner.weights())
        drawn, _ = await prompts.draw(rollout.prompts_per_step)
        groups = await asyncio.gather(*(respond(engine, scorer, prompt, sampling, count) for prompt in drawn))
        groups = algorithm.advantages(groups, config.algorithm)
        microbatches = composer.compose(groups, {prompt.prompt.draw: prompt for prompt in drawn}).everywhere
        metrics = learner.step(microbatches)
        correct = [sample.reward.correct for group in groups for sample in group.samples]
        print(
            f"step {step}/{config.steps}: correct {sum(correct) / len(correct):.1%}, loss {metrics['loss']:+.4f}, "
            f"log-probs of engine and trainer differ by {metrics['rollout_trainer_logprob_gap']:.1e} nats"
        )

    prompts.close()
    scorer.close()
    learner.gradients.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
