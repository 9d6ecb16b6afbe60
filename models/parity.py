"""Compares a checkpoint, as it is computed here, with `transformers`: part by part, in float32 on the CPU.

    python -m models.parity --model DIR [--text TEXT] [--image FILE ...] [--video FILE ...] [--tolerance X]

The parts, in order: template or token ids, patches of images (not of videos, which need torchvision in transformers),
positions by axis, embeddings, features of the tower, each decoder layer, final norm, logits, log-probs. Parts up to
positions are compared for a text prompt, then for a media prompt if the model reads media. The further parts follow in
the same order of prompts. Ids and positions must be equal. Other parts differ if their largest difference is above the
tolerance; except for log-probs, the tolerance is multiplied by the part's largest magnitude if this is above 1. The
first difference without a known reason ends the comparison with exit status 1. Wrong input, or a missing torch or
transformers, ends the comparison with one line on stderr and exit status 2.
"""

import argparse
import dataclasses
import functools
import importlib
import io
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import models
from sharding.walk import Walk

from .decoder import hidden_states, logprobs
from .inputs import ModelInput, PackedTokens
from .processing import Processor
from .processing.processor import PADS

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}  # arguments of a model of transformers
# Model types for which transformers gives other positions to text behind a video (`models.qwen2_5_vl.positions`)
MOVED = {
    "qwen2_5_vl": "known: from 5.3 on, transformers has other positions for text behind a video; later parts use ours"
}


class Probe:
    """A prompt for the model here and in transformers. Media stand before the text, images first."""

    def __init__(self, processor: Processor, text: str, media: Sequence[tuple[str, bytes]]) -> None:
        self.text, self.media = text, media
        self.ids = processor.tokenise_chat("".join(f"<{kind}>" for kind, _ in media) + text, media)
        self.inputs = processor.prepare_ids(self.ids, media)
        tokens_T = self.inputs.token_ids_T.astype(np.int64)
        self.arguments: dict[str, np.ndarray] = {"input_ids": tokens_T[None]}  # for the model in transformers
        found = processor.outline(self.ids, media, count=True).media
        if self.inputs.vision is not None:
            packed_PX, order_M = self.inputs.vision.patches_PX, self.inputs.shown[1]
            raster_PX = packed_PX.reshape(len(order_M), -1)[order_M].reshape(packed_PX.shape)
            image, video = (tokens_T == processor.tokenizer.token_to_id(pad) for pad in PADS.values())
            self.arguments["mm_token_type_ids"] = (image + 2 * video)[None]
            for kind in dict(media):
                grids = np.array([medium.grid for medium in found if medium.kind == kind])
                count = int(grids.prod(axis=1).sum())
                self.arguments |= {f"{kind}_grid_thw": grids, PIXELS[kind]: raster_PX[:count]}
                raster_PX = raster_PX[count:]
        if seconds := [medium.seconds_per_grid for medium in found if medium.kind == "video" and not medium.times]:
            self.arguments["second_per_grid_ts"] = np.array(seconds, np.float32)


class Reference:
    """The checkpoint as a model of transformers."""

    def __init__(self, folder: str, vision: bool) -> None:
        self._torch, self._library = importlib.import_module("torch"), importlib.import_module("transformers")
        self._from = {"pretrained_model_name_or_path": folder, "local_files_only": True}
        auto = self._library.AutoModelForImageTextToText if vision else self._library.AutoModelForCausalLM
        self._model = auto.from_pretrained(**self._from, dtype=self._torch.float32, attn_implementation="eager").eval()
        self.moved = MOVED.get(self._model.config.model_type, "")
        decoder, head = self._model.get_decoder(), self._model.get_output_embeddings()
        names = ["positions", "embedded", *(f"layer {n}" for n in range(len(decoder.layers))), "final norm"]
        for name, module in zip(names, [decoder, *decoder.layers, decoder.norm, head], strict=True):
            module.register_forward_pre_hook(functools.partial(self._keep, name), with_kwargs=True)

    def _keep(self, name: str, _: Any, args: tuple, settings: dict[str, Any]) -> None:
        if name != "positions":
            self._seen[name] = (args[0] if args else settings["hidden_states"])[0].numpy()
        elif (positions := settings.get("position_ids")) is not None:  # None for text
            self._seen[name] = positions[-3:, 0].numpy()

    def preprocessed(self, processor: Processor, probe: Probe) -> Iterator[tuple[str, Any, Any]]:
        """Yields (name, our value, the reference's value) of each part before the model."""
        # For `qwen2`, AutoTokenizer takes a class that splits as Qwen does, whatever tokenizer.json says
        tokenizer = self._library.PreTrainedTokenizerFast.from_pretrained(**self._from)
        written = text = processor.decode(probe.ids, skip_special_tokens=False)
        if processor.chat_template:
            content = [*({"type": kind} for kind, _ in probe.media), {"type": "text", "text": probe.text}]
            message = {"role": "user", "content": content if probe.media else probe.text}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield "template" if ids != probe.ids and text != written else "token ids", probe.ids, ids
        if (patches_PX := probe.arguments.get(PIXELS["image"])) is not None:
            files = [Image.open(io.BytesIO(data)) for kind, data in probe.media if kind == "image"]
            images = [self._library.image_utils.load_image(file) for file in files]
            preprocess = self._library.AutoImageProcessor.from_pretrained(**self._from, backend="pil")
            yield "patches of images", patches_PX, preprocess(images=images, return_tensors="np")[PIXELS["image"]]

    def parts(self, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The parts of the model by name, and the `positions` that it computed with."""
        given: dict[str, Any] = {name: self._torch.as_tensor(value) for name, value in arguments.items()}
        ids = given["input_ids"]
        self._seen = {"positions": np.tile(np.arange(ids.shape[1]), (3, 1))}
        with self._torch.no_grad():
            logits = self._model(**given, use_cache=False).logits[0]
        logs = self._torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        return self._seen | {"logits": logits.numpy(), "log-probs": logs.numpy()}


@dataclasses.dataclass(frozen=True)
class Recorder(Walk):
    """The walk of one device. `stacks` has the input of each stack of layers, and the output of each layer."""

    stacks: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def scan(self, stack: Any, carry: Any, step: Callable, xs: Any = None) -> tuple[Any, Any]:
        def recorded(layer: Any, carry: Any, x: Any) -> tuple[Any, Any]:
            after, y = step(layer, carry, x)
            return after, (after, y)

        last, (states, ys) = super().scan(stack, carry, recorded, xs)
        self.stacks.append((carry, states))
        return last, ys


def our_parts(model: Any, inputs: ModelInput) -> dict[str, np.ndarray]:
    """The parts of the model by name, as `models.decoder` computes them."""
    ones = np.ones((1, len(inputs)), np.int32)
    packed = PackedTokens(
        tokens_BT=inputs.token_ids_T[None],
        segments_BT=ones,
        branches_BT=ones - 1,
        positions_3BT=inputs.positions_3T[:, None],
        predecessor_BT=np.cumsum(ones, axis=1, dtype=np.int32) - 2,
        feature_index_BT=inputs.feature_index_T[None],
        vision=inputs.vision,
    )
    packed = packed if model.config.text.delta is None else packed.with_runs()
    hidden = hidden_states(model, packed, walk := Recorder())
    embedded, states_LBTD = walk.stacks[-1]  # stacks of the tower come first
    found = {"embedded": embedded} | {f"layer {number}": state for number, state in enumerate(states_LBTD)}
    found |= {"final norm": hidden, "logits": jnp.einsum("BTD,VD->BTV", hidden, model.head_weight(walk))}
    found |= {"log-probs": logprobs(model, packed, Walk())[0][:, 1:]}
    return {name: np.asarray(value[0]) for name, value in found.items()}


def compared(options: argparse.Namespace) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields (name, our value, the reference's value, reason of a known difference if any) of every part, in order."""
    processor = Processor.load(options.model)
    media = [("image", pathlib.Path(file).read_bytes()) for file in options.image]
    media += [("video", pathlib.Path(file).read_bytes()) for file in options.video]
    if processor.vision and not media:
        Image.linear_gradient("L").resize((180, 120)).save(picture := io.BytesIO(), "PNG")
        media = [("image", picture.getvalue())]
    probes = {"text": Probe(processor, options.text, [])}
    probes |= {"media": Probe(processor, options.text, media)} if media else {}
    reference, expected = Reference(options.model, processor.vision), {}
    for name, asked in probes.items():
        yield from ((f"{name}: {part}", a, b, "") for part, a, b in reference.preprocessed(processor, asked))
        theirs, ours_3T = reference.parts(asked.arguments), asked.inputs.positions_3T
        first = int((ours_3T != theirs["positions"]).any(0).argmax())  # first position that differs; 0 if none differs
        behind = processor.tokenizer.token_to_id(PADS["video"]) in asked.inputs.token_ids_T[:first]
        moved = reference.moved if behind and asked.inputs.feature_index_T[first] < 0 else ""
        for axis, a, b in zip(("time", "height", "width"), ours_3T, theirs["positions"], strict=True):
            yield f"{name}: positions ({axis})", a, b, moved
        ours = {"position_ids": ours_3T[:, None].astype(np.int64)}
        expected[name] = reference.parts(asked.arguments | ours) if moved else theirs
    del reference
    model = models.load(options.model, jnp.float32)
    for name, asked in probes.items():
        ours, theirs, shown_T = our_parts(model, asked.inputs), expected[name], asked.inputs.feature_index_T >= 0
        for part, rows_T in (("embeddings", ~shown_T), ("features of the tower", shown_T)):
            yield f"{name}: {part}", ours["embedded"][rows_T], theirs["embedded"][rows_T], ""
        yield from ((f"{name}: {part}", ours[part], theirs[part], "") for part in [*ours][1:])


def difference(ours: Any, theirs: Any, tolerance: float, absolute: bool) -> tuple[str, bool]:
    """(how much two parts differ, whether that is too much). Integers must be equal."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape:
        return f"shapes {ours.shape} and {theirs.shape}", True
    apart = np.abs(ours - theirs)
    limit = tolerance * max(1.0, 0 if absolute else np.abs(theirs).max(initial=0)) if ours.dtype.kind == "f" else 0
    wrong = np.argwhere(~(apart <= limit))  # NaN is wrong
    first = f", first at {tuple(wrong[0].tolist())}" if len(wrong) else ""
    return f"{apart.max(initial=0):.2e}{first}", bool(len(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.parity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--text", default="Which of the 3 boxes is red?", help="text of the prompts")
    parser.add_argument("--image", nargs="+", default=[], metavar="FILE", help="images to show (default: a gradient)")
    parser.add_argument("--video", nargs="+", default=[], metavar="FILE", help="videos to show (default: none)")
    parser.add_argument("--tolerance", type=float, default=1e-4, metavar="X")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    try:
        for part, ours, theirs, known in compared(options):
            text, wrong = difference(ours, theirs, options.tolerance, part.endswith("log-probs"))
            print(f"{part:32} {text}{f' ({known})' if wrong and known else ''}", flush=True)
            if wrong and not known:
                print(f"first difference: {part}")
                return 1
    except (ImportError, ValueError, OSError) as error:
        missing = "; the comparison needs it: pip install 'fluxjax[parity]'" if isinstance(error, ImportError) else ""
        print(f"error: {' '.join(str(error).split())}{missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
