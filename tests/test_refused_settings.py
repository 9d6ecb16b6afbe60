"""Settings that cannot work, or would do nothing, end in one clear line that names the field."""

import pytest

from fluxjax.config import ConfigError, cli

STREAM = "rollout.engines=2 stream_trainer=True"
PARALLEL = "rollout.engines=1 parallelism"
CANNOT_WORK = [
    # --- the wrong type, or beyond the upper bound: `test_config` has the lower ones ---------------
    ("optim.lr=abc", "optim.lr is 'abc': 'abc' is no finite number"),
    ("optim.eps=abc", "--config.optim.eps: 'abc' is not a number"),
    ("rollout.slots=2.5", "--config.rollout.slots: '2.5' is not an integer"),
    ("sharding.strategy=fdsp", "'fdsp' is not one of fsdp"),
    ("rollout.dynamic_sampling=maybe", "'maybe' is not one of off, correct, value"),
    ("policy=aprl", "'aprl' is not one of synchronous, tail_batching, april, adaptive_async"),
    ("optim=1", "--config.optim is a section"),
    ("steps.x=1", "steps is a value and has no field 'x'"),
    ("rollout.temperature=nan", "rollout.temperature is nan; it must be a finite number"),
    ("rollout.temperature=0", "rollout.temperature is 0.0; it must be at least 1e-06: greedy responses"),
    ("rollout.temperature=1e-7", "rollout.temperature is 1e-07; it must be at least 1e-06"),
    ("optim.betas=(0,2)", "optim.betas is (0.0, 2.0); it must be two numbers, in [0, 1) and [0, 1)"),
    ("optim.betas=0.9", "'0.9' is not a tuple like (1, 2)"),
    ("report.prometheus=99999", "report.prometheus is '99999'; it must be a port, or host:port"),
    ("data.sources.digits.weight=0", "data.sources.digits.weight is 0.0; it must be greater than 0"),
    ("seed=3000000000", "seed is 3000000000"),
    # --- the model and its buffers ------------------------------------------------------------------
    ("rollout.max_new_tokens=100000", "rollout.max_sequence_tokens"),
    ("rollout.kv_tokens=40", "rollout.kv_tokens (40) holds no sequence of rollout.max_sequence_tokens (48)"),
    ("packing.tokens_per_row=8", "packing.tokens_per_row (8)"),
    (
        "lora.rank=3 lora.targets=('q_proj','lm_head')",
        "lora.targets is ('q_proj', 'lm_head'); it must name some",
    ),
    ("lora.rank=3 lora.targets=()", "lora.targets is (); it must name some of q_proj"),
    ("lora.rank=3 lora.targets=('q_proj','q_proj')", "in_proj_a, out_proj, each once"),
    ("lora.rank=-1", "lora.rank is -1; it must not be negative"),
    ("lora.rank=3 lora.alpha=0", "lora.alpha is 0.0; it must be greater than 0"),
    # --- algorithms ---------------------------------------------------------------------------------
    ("rollout.group_size=1", "rollout.group_size is 1; grpo compares"),
    ("rollout.group_size=1 algorithm.name=rloo", "group_size is 1; rloo compares"),
    ("rollout.group_size=1 algorithm.name=dpo", "group_size is 1; dpo compares"),
    ("algorithm.name=sft", "algorithm.name is sft"),
    ("algorithm.minibatches=333", "algorithm.minibatches is 333, but the responses of a prompt stay"),
    ("algorithm.dual_clip=0.5", "algorithm.dual_clip is 0.5; it must be 0 or above 1"),
    ("algorithm.kl_in_reward=True", "algorithm.kl_in_reward needs algorithm.kl_coefficient above 0"),
    ("algorithm.name=distillation", "algorithm.reference must be the folder of its teacher"),
    ("algorithm.name=distillation algorithm.kl_coefficient=0", "its teacher needs algorithm.kl_coefficient above 0"),
    ("algorithm.name=dpo algorithm.kl_coefficient=0", "set algorithm.kl_coefficient above 0"),
    ("algorithm.name=dpo algorithm.kl_in_reward=True", "algorithm.name is dpo, whose beta is algorithm.kl_coefficient"),
    ("algorithm.importance.bounds=(1.5,2)", "algorithm.importance.bounds is (1.5, 2.0); it must be two numbers, in"),
    ("algorithm.importance.bounds=(0.5,1)", "in [0, 1) and (1, inf): a ratio of 1 counts"),
    ("algorithm.importance.decay=1.1", "algorithm.importance.decay is 1.1; it must be in (0, 1]"),
    ("algorithm.importance.kind=clip", "algorithm.importance.kind: 'clip' is not one of none, truncate, mask"),
    ("algorithm.name=ppo rollout.group_size=1 critic.lr=0", "critic.lr is 0.0; it must be greater than 0"),
    ("algorithm.name=ppo critic.warmup_steps=9 steps=9", "critic.warmup_steps is 9, and the run has 9 steps"),
    ("replay.share=1", "replay.share is 1.0; it must be in [0, 1)"),
    ("replay.share=-0.1", "replay.share is -0.1; it must be in [0, 1)"),
    (
        "replay.share=0.5 policy=april policy.max_staleness=2",
        "replay.max_age is 4, but policy.max_staleness is 2, and older groups are not trained on",
    ),
    (
        "replay.share=0.5 policy=adaptive_async replay.max_age=5",
        "replay.max_age is 5, but policy.max_staleness is 4",
    ),
    # --- gradients before a step is complete --------------------------------------------------------
    *(
        (f"rollout.engines=2 {name} algorithm.{field}=2", "algorithm.minibatches and algorithm.epochs to 1")
        for name in ("stream_trainer=True", "speculative_sync=0.5")
        for field in ("minibatches", "epochs")
    ),
    (f"{STREAM} rollout.engines=1", "stream_trainer needs rollout.engines of at least 2, not 1"),
    (f"{STREAM} policy=adaptive_async", "stream_trainer needs a policy that trains in rounds"),
    ("speculative_sync=1", "speculative_sync is 1.0; it must be in"),
    (
        f"{STREAM} algorithm.importance.kind=truncate algorithm.importance.normalize=True",
        "needs algorithm.importance.normalize off",
    ),
    # --- devices and processes ----------------------------------------------------------------------
    (
        "sharding.remat=offload sharding.strategy=odc",
        "sharding.remat is offload, which sharding.strategy=odc does not support",
    ),
    (f"{PARALLEL}.degree=3", "parallelism.degree is 3; it must be a power of two"),
    (f"{PARALLEL}.min_degree=2", "parallelism.degree is 1; it must be at least parallelism.min_degree (2)"),
    (f"{PARALLEL}.profile=p.json", "parallelism.profile needs parallelism.min_degree above 0"),
    (f"{PARALLEL}.min_degree=1", "needs at least two devices"),
    ("policy=adaptive_async rollout.engines=2 parallelism.min_degree=1", "adaptive_async never has idle engines"),
    ("distributed.processes=2", "must be the host:port of process 0"),
    ("distributed.processes=2 distributed.coordinator=somewhere", "must be the host:port of process 0"),
    (
        "distributed.processes=2 distributed.process=2 distributed.coordinator=localhost:1234",
        "distributed.process is 2; it must be below distributed.processes",
    ),
    ("distributed.processes=1 distributed.process=1", "below distributed.processes"),
]

SERVERS = [  # of rollout.engine=sglang
    ("servers.addresses=('10.0.0.1:30000',)", "servers.addresses has '10.0.0.1:30000'; an address is like http://"),
    ("servers.addresses=('http://a:1','http://a:1')", "servers.addresses has http://a:1 twice"),
    ("servers.addresses=('http://a:1',) servers.python=python3", "leave them out"),
    ("servers.flags=('--port','1')", "servers.flags has --port, which the run sets itself"),
    ("servers.flags=('--pp-size=2',)", "servers.flags has --pp-size=2: weights that are divided"),
    ("servers.environment=('CUDA_VISIBLE_DEVICES',)", "an entry is like NAME=value"),
    ("rollout.engines=2", "rollout.engines is 2, but there are 1 servers"),
    ("rollout.engines=0 stream_trainer=True", "set servers.colocated, or rollout.engine to jax"),
    ("servers.colocated=True servers.addresses=('http://10.0.0.1:1',)", "needs servers on this host"),
    ("servers.colocated=True policy=adaptive_async", "servers.colocated has the servers sleep"),
    ("servers.colocated=True speculative_sync=0.5", "servers.colocated has the servers sleep"),
    ("parallelism.min_degree=1 servers.count=2", "add to servers.flags: ('--tp-size', '{degree}')"),
    (
        "parallelism.min_degree=1 servers.count=3 servers.flags=('--tp-size','{degree}') rollout.engines=2",
        "rollout.engines is 2, but with parallelism.min_degree above 0 each of the 3 servers is an engine",
    ),
    ("weights.route=orbax", "set weights.folder"),
    ("weights.route=ipc rollout.engine=serve", "rollout.serve takes shm, bucket or orbax"),
    ("weights.route=shm servers.addresses=('http://10.0.0.1:1',)", "reaches only servers on this host"),
    ("weights.agents=('http://a:1',)", "weights.agents has 1 addresses, servers.addresses 0"),
    ("weights.folder=/shared servers.addresses=('http://a:1',)", "run python -m rollout.weights.agent"),
    ("parallelism.degree=2", "add to servers.flags: ('--tp-size', '{degree}')"),
    ("rollout.engine=jax servers.count=2", "--config.servers.count needs rollout.engine serve or sglang, not jax"),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [*CANNOT_WORK, *((f"rollout.engine=sglang {settings}", expected) for settings, expected in SERVERS)],
)
def test_settings_that_cannot_work_are_named(settings, expected):
    with pytest.raises(ConfigError) as caught:
        cli.load([f"--config.{setting}" for setting in settings.split()])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


UNREAD = [  # (settings, the last of which is ignored; what it would need to be read)
    ("algorithm.importance.bounds=(0.1,3)", "algorithm.importance.kind truncate or mask, not none"),
    ("algorithm.importance.level=sequence", "algorithm.importance.kind truncate or mask, not none"),
    ("algorithm.importance.normalize=True", "algorithm.importance.kind truncate or mask, not none"),
    (
        "algorithm.importance.decay=0.9",
        "policy.name april or adaptive_async (or replay.share above 0), not synchronous",
    ),
    (
        "policy=april algorithm.importance.decoupled=True algorithm.clip_high=0.28",
        "algorithm.importance.decoupled False (or several algorithm.minibatches or epochs), not True",
    ),
    ("algorithm.name=gspo algorithm.dual_clip=4", "algorithm.name another, not gspo"),
    ("algorithm.name=rloo algorithm.normalize_std=False", "algorithm.name grpo, dr_grpo, dapo, gspo"),
    ("algorithm.reference_every=5", "algorithm.kl_coefficient above 0"),
    ("algorithm.name=dpo algorithm.clip_high=0.3", "algorithm.name another, not dpo"),
    ("algorithm.name=dpo algorithm.loss_aggregation=constant", "algorithm.name another, not dpo"),
    ("algorithm.name=dpo algorithm.importance.kind=mask", "algorithm.name another, not dpo"),
    ("algorithm.name=dpo algorithm.entropy_coefficient=0.1", "algorithm.name another, not dpo"),
    ("critic.lr=0.1", "algorithm.name ppo, not grpo"),
    ("model.path=here model.tiny.num_layers=5", "model.path empty, not here"),
    ("model.tiny.architecture=qwen3_vl model.tiny.window_size=32", "model.tiny.architecture qwen2_5_vl, not qwen3_vl"),
]


@pytest.mark.parametrize(("settings", "needs"), UNREAD)
def test_a_setting_that_would_do_nothing_is_refused(settings, needs):
    flags = [f"--config.{setting}" for setting in settings.split()]
    with pytest.raises(ConfigError) as caught:
        cli.load(flags)
    assert str(caught.value).startswith(f"{flags[-1].partition('=')[0]} needs {needs}")
    assert "; set " in str(caught.value) and ", or leave " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "policy.prefer=('curriculum',) policy=adaptive_async algorithm.importance.decay=0.9",
        "policy.oversample=2 policy=april rollout.temperature=linear(1,0.9)",
        "policy.prompts=1.5 policy.responses=linear(1.5,1) policy=tail_batching",
        "rollout.dynamic_sampling=True rollout.max_num_gen_batches=0 optim.max_grad_norm=0",
        "algorithm.importance.kind=mask algorithm.importance.bounds=(0,3)",
        "policy=april algorithm.importance.decoupled=True algorithm.importance.level=sequence",
        "stream_trainer=True rollout.engines=2 speculative_sync=0.5",
        "sharding.strategy=flex_ulysses sharding.strategy.max_degree=4",
        "sharding.strategy=odc sharding.strategy.hybrid=True",
        "rollout.temperature=0.8 model.tiny.num_layers=5",
        "weights.folder=/shared",  # engines of several processes read versions there
        "rollout.group_size=1 algorithm.name=reinforce_plus_plus",  # it compares no responses of one prompt
    ],
)
def test_a_setting_that_is_read_is_taken(settings):
    cli.load([f"--config.{setting}" for setting in settings.split()])


NOT_THE_CHOICE = [  # settings of a choice that was not made; of earlier releases
    ("policy.oversample=2", "synchronous has no oversample, but april has it: --config.policy=april"),
    ("policy=adaptive_async policy.prompts=1.5", "adaptive_async has no prompts, but tail_batching has it"),
    ("policy.max_staleness=1", "tail_batching and april and adaptive_async have"),
    ("sharding.strategy.max_degree=2", "fsdp has no max_degree, but ulysses and flex_ulysses and odc have it"),
    ("sharding.strategy=ulysses sharding.strategy.hybrid=True", "ulysses has no hybrid, but odc has it"),
    *(
        (f"{old}=1", f"--config.{old}: no such field; did you mean --config.{now}?")
        for old, now in (
            ("policy.name", "policy"),
            ("composer.lengths", "policy.prefer"),
            ("sharding.hybrid", "sharding.strategy.hybrid"),
            ("adaptive_async.ratio", "policy.ratio"),
            ("optim.beta1", "optim.betas"),
            ("parallelism.enabled", "parallelism.min_degree"),
            ("schedules.temperature", "rollout.temperature"),
            ("model.num_layers", "model.tiny.num_layers"),
            ("model.tiny.vision", "model.tiny.architecture"),
        )
    ),
]


@pytest.mark.parametrize(("settings", "expected"), NOT_THE_CHOICE)
def test_a_setting_of_another_choice_is_refused(settings, expected):
    with pytest.raises(ConfigError) as caught:
        cli.load([f"--config.{setting}" for setting in settings.split()])
    assert expected in str(caught.value) and "\n" not in str(caught.value)
