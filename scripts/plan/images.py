"""What the images of a model cost, by the vision tower in its config.json."""

from pathlib import Path
from typing import Any

from ...serving.api.sizes import amount

WIDTH, HEIGHT = 1024, 768


def image_costs(folder: Path, config: Any, device: Any) -> dict[str, Any] | None:
    """Memory, and the cost of one image, or under "left_out" the reason why they are not counted;
    None if the model reads none, or if the folder does not say how images are read.

    Args:
        folder: The model's folder.
        config: The text model.
        device: A `cost.Device`.
    """
    from ...model import multimodal
    from ...model.checkpoint.folder import read_config_json
    from ...model.errors import ModelError
    from ...model.towers import TOWERS
    from ...model.towers.cost import image_operations
    from ...serving.media_reader import limited_rule
    from ...serving.vision import SPANS_ON_CPUS, max_media_rows, media_bytes

    hf = read_config_json(folder, embeds=True)
    if multimodal.tower_kind(hf) not in TOWERS or not multimodal.has_preprocessor(folder):
        return None
    platform = "cpu" if device.platform == "cpu" else "gpu"
    if multimodal.span_layers(hf) and platform != "cpu":
        return {"left_out": SPANS_ON_CPUS}
    try:
        tower = multimodal.read_tower(hf)
        model_rule = multimodal.read_rule(folder, hf, tower)
    except ModelError as error:
        return {"left_out": str(error)}
    max_rows = max_media_rows(model_rule, platform, config.max_len)
    rule = limited_rule(model_rule, max_rows * tower.group)
    rows, columns = rule.grid(WIDTH, HEIGHT)
    return {
        "bytes": media_bytes(config, tower),
        "max_tokens": max_rows,
        "width": WIDTH,
        "height": HEIGHT,
        "tokens": rule.num_tokens(WIDTH, HEIGHT),
        "seconds": image_operations(tower, rows * columns) / device.flops,
    }


def text(images: dict[str, Any]) -> str:
    if "left_out" in images:
        return f"images are left out: {images['left_out']}"
    return (
        f"images: {amount(images['bytes'])} for the vision tower and for the rows of images. One "
        f"of {images['width']} x {images['height']}\npixels takes {images['tokens']:,} tokens and "
        f"{images['seconds']:.2g} s of arithmetic; none has more than {images['max_tokens']:,} "
        "tokens."
    )
