"""Seconds that the stages of RL training take on a cluster of GPUs: decoding, prefill, training, rewards, weight sync.

A time is bytes read or FLOPs, divided by a data sheet's rates. Overheads and utilisations are constants below, some
fitted to Flexes' figures for H800 clusters. Flexes' Table 1 gives the shares of the stages of a synchronous step,
14B/16k on 32 GPUs, for three tasks. Such a step takes about 230 s: rewards of code are 13 % of it, and end with the
sandbox's time-out of 30 s, which 5 % of the responses hit (figure 7a). Table 3 gives 124.2 s for a long round
(`docs/policies.md`), 7B/8k on 16 GPUs, math, with rewards hidden by rollouts.

Attention's own FLOPs are left out: at the mean length of a response they are 3 % of the weights' FLOPs.
"""

import dataclasses

from sharding.cost import LINEAR_UTILISATION, PEAK_FLOPS, ModelSizes

TASKS = ("math", "code", "judge")  # each with its own kind of reward
LONGEST_PROMPT = 2000  # tokens

# --- data sheets and configurations (H800; Flexes, section 6) -------------------------------------------

MEMORY = 80e9  # bytes of a GPU
BANDWIDTH = 3.35e12  # bytes a second of its memory
NVLINK = 400e9  # bytes a second between GPUs of a host (FlexRL, section 6)
NETWORK = 50e9  # bytes a second into a host: 400 Gbps InfiniBand
SANDBOX_LIMIT = 30.0  # seconds of a code sandbox, at most

# --- assumed, because no figure gives them --------------------------------------------------------------

MEMORY_FRACTION = 0.6  # share of a GPU's memory for rollout (the usual setting of veRL), weights included
WORKSPACE = 2e9  # bytes of rollout's memory for activations
BANDWIDTH_UTILISATION = 0.8  # used share of the memory's bandwidth, in decode steps
ALL_REDUCE = 12e-6  # fixed seconds of an all-reduce of a decode step, in addition to sending bytes
SYNC = 1.0  # fixed seconds of a weight sync, in addition to sending bytes
BACKWARD, REFERENCE, OLD_LOGPROBS = 2.0, 1.0, 1.0  # FLOPs of other passes of a step, in units of a forward pass

# --- fitted to Flexes: the nine shares of Table 1 and the 124.2 s of Table 3, least squares ---------------

STEP = 4.6e-3  # fixed seconds of a decode step, in addition to reading and computing
TRAIN_UTILISATION = 0.34  # used share of the GPUs' FLOP/s, with tensor parallelism only (7B: Table 3)
SPLIT = 0.29  # factor on TRAIN_UTILISATION with pipeline or context parallelism (14B: Table 1; 32B: assumed)
MATH = 10.7e-3  # seconds in which a rule scores a response, one at a time (Table 1: 5 %)
JUDGE = 0.09  # seconds of a judge's GPU for a verdict, after reading the response (Table 1: 7 %)

QWEN2_5_7B = ModelSizes("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064)
QWEN2_5_14B = ModelSizes("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064)
QWEN2_5_32B = ModelSizes("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064)


def parameters(model: ModelSizes) -> float:
    """Returns the number of weights; embedding and head are two matrices."""
    return model.linear_flops() / 2 + model.vocabulary * model.width


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The seconds of one model's stages. `utilisation` is the used share of FLOP/s in training. A GPU computes and
    reads memory `scale` times as fast as an H800. Seconds of training are one GPU's, divided by the number."""

    model: ModelSizes
    utilisation: float = TRAIN_UTILISATION
    scale: float = 1.0
    memory_fraction: float = MEMORY_FRACTION
    gpus_per_host: int = 8
    judge: ModelSizes = QWEN2_5_7B

    # --- engines of `degree` GPUs -----------------------------------------------------------------------

    def step_seconds(self, batch: int, degree: int) -> float:
        """Returns the seconds of a decode step of `batch` > 0 samples, without reading the cache. The result is the
        longer of reading the weights and computing, plus the engine's own overhead. Engines of several GPUs take two
        all-reduces a layer in addition."""
        model, speed = self.model, self.scale * degree
        read = 2 * (parameters(model) - model.vocabulary * model.width) / (BANDWIDTH * BANDWIDTH_UTILISATION * speed)
        compute = batch * model.linear_flops() / (PEAK_FLOPS * LINEAR_UTILISATION * speed)
        reduced = batch * model.width * 2 * 2 * (degree - 1) / degree / NVLINK
        return max(read, compute) + (degree > 1) * 2 * model.layers * (ALL_REDUCE + reduced) + STEP

    def kv_seconds(self, degree: int) -> float:
        """Returns the seconds of reading one token of the cache, in a decode step."""
        return self.kv_bytes / (BANDWIDTH * BANDWIDTH_UTILISATION * self.scale * min(degree, self.model.kv_heads))

    def prefill_seconds(self, tokens: int, degree: int) -> float:
        """Returns the seconds of computing `tokens` tokens in one pass."""
        flops = tokens * self.model.linear_flops()
        return flops / (PEAK_FLOPS * LINEAR_UTILISATION * self.scale * degree) + STEP

    def kv_limit(self, degree: int) -> int:
        """Returns the number of tokens that fit beside the weights. Raises ValueError if the weights don't fit."""
        room = degree * (self.memory_fraction * MEMORY - WORKSPACE) - 2 * parameters(self.model)
        if room <= 0:
            raise ValueError(f"{self.model.name} does not fit on {degree} GPUs")
        return int(room / self.kv_bytes / (max(degree, self.model.kv_heads) / self.model.kv_heads))

    @property
    def kv_bytes(self) -> int:
        """The bytes of the keys and values of one token in all layers."""
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_size * self.model.value_bytes

    # --- the other stages -------------------------------------------------------------------------------

    def train_seconds(self, tokens: int, gpus: int, update: bool = True) -> float:
        """Returns the seconds of training on `tokens` tokens (prompts and responses, every sample with its prompt) on
        `gpus` GPUs. These seconds are for the log-probs of the reference and of the policy before the step, for the
        gradients and, with `update`, for the optimizer's step."""
        passes = 1 + BACKWARD + REFERENCE + OLD_LOGPROBS
        seconds = tokens * passes * self.model.linear_flops() / (PEAK_FLOPS * self.utilisation * self.scale * gpus)
        # The optimizer reads 16 bytes of state a parameter, and writes as many.
        optimizer = 2 * 16 * parameters(self.model) / (gpus * BANDWIDTH * BANDWIDTH_UTILISATION * self.scale)
        return seconds + (optimizer if update else 0.0)

    def sync_seconds(self) -> float:
        """Returns the seconds until all engines have new weights, which all hosts receive at the same time."""
        return 2 * parameters(self.model) / NETWORK + SYNC

    def reward_seconds(self, task: str, tokens: int, sandbox: float = 0.0) -> float:
        """Returns the seconds of scoring a response of `tokens` tokens with its prompt on one worker. The worker is a
        rule, a sandbox that runs for `sandbox` seconds, or a judge's GPU. Raises KeyError for another task."""
        if task == "judge":
            return tokens * self.judge.linear_flops() / (PEAK_FLOPS * LINEAR_UTILISATION * self.scale) + JUDGE
        return {"math": MATH, "code": min(sandbox, SANDBOX_LIMIT)}[task]


_SPLIT = TRAIN_UTILISATION * SPLIT
HARDWARE = {  # by model of Flexes' evaluation (section 6)
    "7b": Hardware(QWEN2_5_7B),
    "14b": Hardware(QWEN2_5_14B, _SPLIT),
    "32b": Hardware(QWEN2_5_32B, _SPLIT),
}
