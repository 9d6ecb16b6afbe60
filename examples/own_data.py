"""A data set of your own: pictures that are drawn here, and a question about each.

    python examples/own_data.py
    python examples/own_data.py --config.steps=50            every setting of fluxjax.train

A data set is a JSONL manifest. Each line is a question: an id, the prompt with a mark where each picture stands, the
answer, and the paths of the pictures, relative to the manifest. Videos (`"videos"`, `<video>`) and parquet files work
alike.
"""

import json
import pathlib
import sys
import tempfile

from PIL import Image, ImageDraw

from fluxjax.config import SourceConfig, cli
from fluxjax.run.trainer import FluxTrainer


def write_manifest(folder: pathlib.Path, name: str, counts: range) -> pathlib.Path:
    """Draws a picture of `count` bars for each of `counts`, and asks for their number; returns the manifest's path."""
    lines = []
    for index, count in enumerate(counts):
        picture = Image.new("RGB", (56, 28), "white")
        for bar in range(1 + count % 4):
            ImageDraw.Draw(picture).rectangle((6 + 12 * bar, 4, 12 + 12 * bar, 24), fill=("red", "blue")[index % 2])
        picture.save(folder / f"{name}-{index}.png")
        lines.append(
            {
                "id": f"{name}-{index}",
                "prompt": "<image>How many bars?",
                "answer": str(1 + count % 4),
                "images": [f"{name}-{index}.png"],
            }
        )
    manifest = folder / f"{name}.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


def main() -> None:
    config = cli.load(["--config=configs/vlm.py:debug", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train, held_out = write_manifest(folder, "train", range(64)), write_manifest(folder, "eval", range(8))
        config.data.sources = {"bars": SourceConfig(path=str(train), eval_path=str(held_out), reward="number")}
        with FluxTrainer(config) as trainer:
            print(f"{len(trainer.sources['bars'])} pictures to train on, such as {trainer.sources['bars'][0]}")
            result = trainer.fit()
    print(f"held-out accuracy: {result.summary.accuracy}")


if __name__ == "__main__":
    main()
