"""Whole training steps of what needs more than a batch: ratios of responses, KL in the reward, changing references."""

import dataclasses

import jax
import numpy as np
import pytest
from packing_cases import TEXT
from step_cases import VERSION, WIDE, composed, key_of, near_policy, samples_of, trained, trainer_of

import models
from fluxjax.algorithms import grpo
from fluxjax.config import AlgorithmConfig, ConfigError, ImportanceConfig, KlEstimator
from fluxjax.learner.policy_trainer import Portion
from fluxjax.learner.run_models import first_reference
from fluxjax.run.build import check_reference

pytestmark = pytest.mark.slow


# --- ratios of responses ---------------------------------------------------------------------------


@pytest.mark.slow
def test_gspo_has_the_ratios_of_whole_responses():
    step = trained("gspo")[0]
    groups, _, own = near_policy()
    advantages = {key_of(s): s.advantage for g in grpo.advantages(groups, WIDE) for s in g.samples}
    ratios, losses, lengths, clips = [], [], [], []
    for sample in samples_of(groups):
        key = key_of(sample)
        ratio = np.exp(np.mean(np.float64(own[key]) - np.array(sample.response.logprobs)))
        bounded = np.clip(ratio, 1 - WIDE.clip_low, 1 + WIDE.clip_high)
        losses.append(-min(ratio * advantages[key], bounded * advantages[key]))
        clips.append(losses[-1] != -ratio * advantages[key])
        ratios.append(ratio)
        lengths.append(len(own[key]))
    assert step.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert step.metrics["ratio"] == pytest.approx(np.average(ratios, weights=lengths), abs=1e-5)
    assert step.metrics["clip_fraction"] == pytest.approx(np.average(clips, weights=lengths), abs=1e-6)
    assert 0 < step.metrics["clip_fraction"] < 1


@pytest.mark.slow
def test_gspo_scores_the_policy_again_before_each_optimizer_step():
    assert trained("gspo twice")[0].metrics["ratio"] != pytest.approx(trained("gspo")[0].metrics["ratio"], abs=1e-4)
    ratios = []
    for epochs in (1, 2):
        cfg = dataclasses.replace(WIDE, epochs=epochs, importance=ImportanceConfig(decoupled=True))
        ratios.append(trainer_of(cfg)[0].train(0, *near_policy()[:2]).metrics["ratio"])
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)
    assert ratios[1] != pytest.approx(1.0, abs=1e-4)


# --- the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 2])
def test_kl_in_the_reward(minibatches):
    cfg = AlgorithmConfig.of("rloo", kl_coefficient=0.3, kl_estimator=KlEstimator.K1, kl_in_reward=True)
    cfg.minibatches = minibatches
    trainer, learner = trainer_of(cfg, referred=True)
    groups, prepared, own = near_policy()
    [composition] = composed(trainer, [Portion(groups, prepared)])
    reference = composition.of_responses([b.reference_logprobs_BT for b in composition.batches], np.float64)
    parts = dict(zip(composition.keys, np.split(reference, np.cumsum(composition.lengths))[:-1], strict=True))
    paid = {key_of(s): s.reward.value for g in groups for s in g.samples}
    for key in parts:  # those with tokens
        paid[key] -= 0.3 * np.sum(own[key] - parts[key])
    want = {}
    for one in groups:
        keys = [key_of(sample) for sample in one.samples]
        for key in keys:
            want[key] = paid[key] - np.mean([paid[other] for other in keys if other != key])
    step = trainer.train(0, groups, prepared)
    got = {key_of(s): s.advantage for g in step.groups for s in g.samples}
    assert got == pytest.approx(want, abs=1e-4)
    mean = np.mean([s.reward.value for g in groups for s in g.samples])
    assert step.metrics["reward/mean"] == pytest.approx(mean), "rewards are reported as they were given"
    assert step.metrics["reference_kl"] != 0 and learner.version == VERSION + 1
    in_loss = [b.advantages_BT for b in composition.batches]
    wanted = np.repeat([want[key] for key in composition.keys], composition.lengths)
    assert composition.of_responses(in_loss) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_the_reference_is_renewed():
    cfg = AlgorithmConfig.of("grpo", kl_coefficient=0.1, reference_every=2)
    trainer, learner = trainer_of(cfg, referred=True)
    run_models = trainer._models
    groups, prepared, _ = near_policy()
    first = trainer.train(0, groups, prepared).metrics["reference_kl"]  # version 12
    assert run_models.reference is learner.params and first > 1e-4
    second = trainer.train(1, groups, prepared).metrics["reference_kl"]
    assert run_models.reference is not learner.params
    third = trainer.train(2, groups, prepared).metrics["reference_kl"]
    assert second == pytest.approx(0.0, abs=1e-6), "the policy itself"
    assert third > 1e-6, "one step later"
    assert run_models.reference is learner.params


def test_distillation_goes_towards_its_teacher_and_stays_there():
    cfg = AlgorithmConfig.of("distillation", importance=ImportanceConfig(decoupled=True))
    trainer, learner = trainer_of(cfg, referred=True)
    teacher = trainer._models.reference
    groups, prepared, _ = near_policy()
    [composition] = composed(trainer, [Portion(groups, prepared)])

    def distance():
        scores = [[learner.logprobs(b.inputs, p)[0] for b in composition.batches] for p in (learner.params, teacher)]
        own, wanted = (composition.of_responses(logprobs, np.float64) for logprobs in scores)
        return np.mean((own - wanted) ** 2)

    before = distance()
    for step in range(5):
        trainer.train(step, groups, prepared)
    assert distance() < 0.8 * before
    trainer._models.reference = learner.params
    metrics = trainer.train(5, groups, prepared).metrics
    assert metrics["teacher_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["grad_norm"] < 1e-5


def test_a_reference_from_another_checkpoint(tmp_path):
    cfg = AlgorithmConfig.of("distillation", reference=str(tmp_path / "teacher"))
    _, learner = trainer_of(cfg)
    with pytest.raises(ConfigError, match=r"algorithm\.reference: .*teacher"):
        check_reference(learner.config)
    teacher = models.create(TEXT, seed=7)
    models.save(teacher, tmp_path / "teacher")
    check_reference(learner.config)
    got, want = first_reference(learner.config, learner), models.split(teacher)[1]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    wider = dataclasses.replace(TEXT, text=dataclasses.replace(TEXT.text, intermediate_size=32))
    models.save(models.create(wider, seed=7), tmp_path / "other")
    learner.config.algorithm.reference = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"other has other sizes than the model"):
        first_reference(learner.config, learner)
