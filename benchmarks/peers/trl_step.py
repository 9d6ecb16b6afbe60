"""Runs and times GRPO steps in TRL. `benchmarks/train_step.py` runs this peer in an interpreter that has TRL.

Model and prompts (text, image files and the expected token ids) come from a Hugging Face folder that our side has
written. `GRPOTrainer.train()` runs unchanged; the parent decides when each step begins.

    prepare   the rest of `_generate_and_score_completions`: chat template, image preprocessing, padding, rewards
    rollout   `_generate_single_turn`: `model.generate` with its KV cache, padding and cutting included
    train     the rest of the step: forward, backward, clipping, AdamW, the trainer's own bookkeeping
    step      from the parent's request to `on_step_end`

No step of `GRPOTrainer` is changed: two methods are timed by a subclass.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, ProcessorMixin, TrainerCallback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from common import Channel, Stopwatch, peak_rss_mib

MARK = "<image>"
# Renders a conversation as plain text: media first, as `prepare_multimodal_messages` orders them.
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


class ImageTextProcessor(ProcessorMixin):
    """Qwen2.5-VL's processor without its video half, which needs torchvision."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)


class TimedTrainer(trl.GRPOTrainer):
    """`GRPOTrainer`, with the wall time of its two stages."""

    def __init__(self, watch: Stopwatch, **kwargs: Any) -> None:
        self.watch = watch
        super().__init__(**kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.watch("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.watch("until_training"):
            result = super()._generate_and_score_completions(inputs)
        self.responses = int(result["completion_mask"].sum()), len(result["completion_mask"])
        return result


class Stepper(TrainerCallback):
    """Begins each step when the parent asks, and answers with its times."""

    def __init__(self, channel: Channel, watch: Stopwatch) -> None:
        self.channel = channel
        self.watch = watch
        self.trainer: TimedTrainer | None = None
        self.requests: Iterator[dict[str, Any]] = channel.requests()
        self.began = 0.0

    def wait(self) -> bool:
        request = next(self.requests, None)
        if request is not None and "threads" in request:
            torch.set_num_threads(request["threads"])
        self.began = time.perf_counter()
        return request is not None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        step = time.perf_counter() - self.began
        parts = self.watch.take()
        tokens, samples = self.trainer.responses
        seconds = {
            "prepare": parts["until_training"] - parts["rollout"],
            "rollout": parts["rollout"],
            "train": step - parts["until_training"],
            "step": step,
        }
        self.channel.say(seconds=seconds, tokens=tokens, samples=samples)
        control.should_training_stop = not self.wait()


def load(folder: pathlib.Path, vision: bool) -> tuple[Any, Any]:
    """Returns the model of the exchange folder, in float32, and its processing class."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left", truncation_side="left")
    if not vision:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model, ImageTextProcessor(images, tokenizer, chat_template=TEMPLATE)


def dataset(prompts: list[dict[str, Any]], vision: bool) -> datasets.Dataset:
    """Returns the prompts as a data set for TRL. TRL puts images before the text of a message; raises SystemExit for a
    prompt whose marks are not at its begin."""
    if not vision:
        return datasets.Dataset.from_list([{"prompt": prompt["text"]} for prompt in prompts])
    rows = []
    for prompt in prompts:
        marks, text = MARK * len(prompt["images"]), prompt["text"]
        if not text.startswith(marks) or MARK in text.removeprefix(marks):
            raise SystemExit(f"TRL puts images first; the prompt {text!r} does not")
        rows.append({"prompt": [{"role": "user", "content": text.removeprefix(marks)}], "images": prompt["images"]})
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))


def grpo_config(settings: dict[str, Any], output_dir: str) -> trl.GRPOConfig:
    """The settings of our side in TRL's words; everything that only costs time is off."""
    rollout, algorithm, optim = settings["rollout"], settings["algorithm"], settings["optim"]
    samples = rollout["prompts_per_step"] * rollout["group_size"]
    parts = settings["microbatches"]
    if samples % parts:
        raise SystemExit(f"--peer-microbatches={parts} does not divide {samples} samples")
    aggregation = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
    return trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=samples // parts,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        num_generations=rollout["group_size"],
        max_completion_length=rollout["max_new_tokens"],
        temperature=rollout["temperature"],
        top_p=1.0,
        top_k=0,
        generation_kwargs={"suppress_tokens": settings["forbidden_ids"]},
        loss_type=aggregation[algorithm["loss_aggregation"]],
        scale_rewards="group" if algorithm["normalize_std"] else "none",
        epsilon=algorithm["clip_low"],
        epsilon_high=algorithm["clip_high"],
        beta=algorithm["kl_coefficient"],
        entropy_coef=algorithm["entropy_coefficient"],
        learning_rate=optim["lr"],
        lr_scheduler_type=optim["schedule"],
        warmup_steps=optim["warmup_steps"],
        adam_beta1=optim["betas"][0],
        adam_beta2=optim["betas"][1],
        adam_epsilon=optim["eps"],
        weight_decay=optim["weight_decay"],
        max_grad_norm=optim["max_grad_norm"],
        max_steps=settings["steps"],
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )


def half_right(completions: list[Any], **_: Any) -> list[float]:
    """Scores every second response as right, so that each group has advantages; scoring is not measured."""
    return [float(i % 2) for i in range(len(completions))]


def check_prompts(processing: Any, trainer: TimedTrainer, prompts: list[dict[str, Any]], rows: Any) -> None:
    """Raises SystemExit if TRL's tokens of a prompt differ from ours."""
    if rows.column_names == ["prompt"]:
        texts = list(rows["prompt"])
    else:
        texts = [trl.data_utils.prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    ids = trainer._tokenize_prompts(texts)[0]
    for prompt, trl_ids in zip(prompts, ids, strict=True):
        if prompt["token_ids"] != list(trl_ids):
            raise SystemExit(f"TRL tokenises {prompt['text']!r} to {list(trl_ids)}, our side to {prompt['token_ids']}")


def main(settings: dict[str, Any]) -> None:
    channel = Channel()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    folder = pathlib.Path(settings["exchange"])
    prompts = json.loads((folder / "prompts.json").read_text())
    vision = any(prompt["images"] for prompt in prompts)
    model, processing = load(folder / "model", vision)
    rows = dataset(prompts, vision)
    watch = Stopwatch()
    stepper = Stepper(channel, watch)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = TimedTrainer(
            watch,
            model=model,
            reward_funcs=half_right,
            args=grpo_config(settings, output_dir),
            train_dataset=rows,
            processing_class=processing,
            callbacks=[stepper],
        )
        stepper.trainer = trainer
        check_prompts(processing, trainer, prompts, rows)
        channel.say(
            model=f"{type(model).__name__}, float32",
            parameters=sum(p.numel() for p in model.parameters()),
            attention=model.config._attn_implementation,
            device="cpu",
            setup_rss_mib=peak_rss_mib(),
            versions={m.__name__: m.__version__ for m in (trl, torch, transformers)}
            | {"python": sys.version.split()[0]},
        )
        if stepper.wait():
            trainer.train()
    channel.say(peak_rss_mib=peak_rss_mib())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
