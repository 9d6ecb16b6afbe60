"""A tiny vision-language model learns from real images and real video files by reinforcement learning.

    python -m fluxjax.train --config=configs/vlm.py
    python -m fluxjax.train --config=configs/vlm.py:debug      (the whole loop in less than a minute)
    python -m fluxjax.train --config=configs/vlm.py:digits     (the strips alone)
    python -m fluxjax.train --config=configs/vlm.py:qwen3_vl   (the same with a tiny Qwen3-VL)
    python -m fluxjax.train --config=configs/vlm.py:qwen3_5    (with a tiny Qwen3.5)

Expect, in 425 to 450 s on two idle CPU cores (eleven minutes on slow ones): strips from about 35 % held out after the
warm start to between 90 and 97 % by RL, clips from about 38 % to between 97 and 99 %; one seed of ten ends with one
answer for all clips (docs/log.md).

`:qwen3_vl` ends at 95 to 98 % of strips and 97 to 99 % of clips (seeds 0 to 2; at 0.5 to 1.6 s a step beside other
work), `:qwen3_5` at 91 to 94 % of strips and 97 to 99 % of clips (seeds 0 to 2; 15 to 17 minutes on one core beside
other work). Of strips of six digits and more, 30 % stay wrong there.

Nothing is downloaded: strips of handwritten digits (PNG) and clips panned over photographs (h264) are built once
from data inside scikit-learn and scikit-image.
"""

from fluxjax.config import Config, ConfigError, LossAggregation, Schedule, SourceConfig


def get_config(variant: str = "") -> Config:
    config = Config(name="vlm")
    config.data.sources = {
        "digits": SourceConfig(reward="digits", weight=2.0),
        "pans": SourceConfig(reward="exact"),
    }
    config.steps = 1000
    config.warm_start.steps = 150
    config.rollout.prompts_per_step = 46
    config.rollout.max_new_tokens = 13
    config.rollout.max_sequence_tokens = 48
    config.rollout.slots = 368
    config.packing.tokens_per_row = 128
    config.packing.rows_per_device = 14
    config.packing.patches_per_device = 1152
    config.algorithm.loss_aggregation = LossAggregation.SEQUENCE_MEAN
    config.algorithm.entropy_coefficient = 0.02  # 0.01: one seed of three lost a direction; 0.02: one of ten
    config.optim.schedule = Schedule.LINEAR
    config.optim.betas = (0.9, 0.95)
    config.optim.warmup_steps = 10
    config.evaluation.samples = 400
    config.evaluation.every = 100
    config.model.tiny["mrope_section"] = (1, 1, 6)  # strips are wide: most frequencies tell where in a row
    if variant == "debug":
        config.name = "vlm-debug"
        config.model.tiny["num_layers"] = 1  # most of a short run is compiling
        config.steps = 5
        config.warm_start.steps = 15
        config.evaluation.samples = 40
        config.report.dump_samples_every = 5
    elif variant == "digits":
        config.name = "vlm-digits"
        del config.data.sources["pans"]
    elif variant in ("qwen3_vl", "qwen3_5"):
        config.name = f"vlm-{variant}"
        config.model.tiny |= {"architecture": variant, "num_heads": 2}
        config.model.tiny |= {"vision_depth": 3, "vision_intermediate_size": 256}  # 2 and 128: clips are not learned
        # Without a gate in the tower's MLPs, directions are told apart later: with 0.03 and 10 steps, one seed of two
        # settled on one answer for all clips before that.
        config.algorithm.entropy_coefficient = 0.05
        config.optim.warmup_steps = 60
        if variant == "qwen3_vl":
            config.model.tiny["mrope_section"] = (6, 5, 5)
        else:
            config.model.tiny |= {"num_layers": 4, "mrope_section": (1, 1, 2)}  # two layers with states, two without
            # Only one of the four rotary frequencies tells columns apart. Neighbouring columns differ by half a radian.
            # With a rope_theta of 30 it is only 0.18 radians. The model then read no strip of four or more digits.
            config.model.tiny["rope_theta"] = 4.0
            # The decoder reads only the tower's last layer, and a shallow tower learns sooner. A tower of width 128
            # answered held-out clips wrongly in their colours, and the same photographs in grey correctly.
            config.model.tiny["vision_depth"] = 1
            # Smaller initial weights learn sooner: a tower of width 128 needs 40 supervised steps to tell directions
            # apart, and needed 70 with the default of 0.1.
            config.model.tiny["initializer_range"] = 0.03
            config.warm_start.steps = 130  # after 90, RL began with twice the entropy, and learned more slowly
            config.algorithm.entropy_coefficient = 0.06
    elif variant:
        variants = "'', 'debug', 'digits', 'qwen3_vl' and 'qwen3_5'"
        raise ConfigError(f"configs/vlm.py has the variants {variants}, not {variant!r}")
    return config
