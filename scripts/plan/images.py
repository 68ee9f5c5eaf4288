"""What the images of a model cost, by the vision tower in its config.json."""

from pathlib import Path
from typing import Any

from ...serving.api.sizes import amount

FILES = ("preprocessor_config.json", "processor_config.json")
WIDTH, HEIGHT = 1024, 768


def image_costs(folder: Path, config: Any, device: Any) -> dict[str, Any] | None:
    """Memory, and the cost of one image; None if the model reads none, or if the folder does not
    say how images are read.

    Args:
        folder: The model's folder.
        config: The text model.
        device: A `cost.Device`.
    """
    from ...model import multimodal
    from ...model.checkpoint.folder import read_config_json
    from ...model.towers import TOWERS
    from ...model.towers.cost import image_operations
    from ...serving.media_reader import limited_rule
    from ...serving.vision import max_media_rows, media_bytes

    kind = multimodal.tower_kind(read_config_json(folder, embeds=True))
    if kind not in TOWERS or not any((folder / name).is_file() for name in FILES):
        return None
    described = multimodal.read(folder)
    tower = described.tower
    platform = "cpu" if device.platform == "cpu" else "gpu"
    max_rows = max_media_rows(described.rule, platform, config.max_len)
    rule = limited_rule(described.rule, max_rows * tower.group)
    rows, columns = rule.grid(WIDTH, HEIGHT)
    return {
        "bytes": media_bytes(config, described),
        "max_tokens": max_rows,
        "width": WIDTH,
        "height": HEIGHT,
        "tokens": rule.num_tokens(WIDTH, HEIGHT),
        "seconds": image_operations(tower, rows * columns) / device.flops,
    }


def text(images: dict[str, Any]) -> str:
    return (
        f"images: {amount(images['bytes'])} for the vision tower and for the rows of images. One "
        f"of {images['width']} x {images['height']}\npixels takes {images['tokens']:,} tokens and "
        f"{images['seconds']:.2g} s of arithmetic; those above {images['max_tokens']:,} tokens are "
        "shrunk."
    )
