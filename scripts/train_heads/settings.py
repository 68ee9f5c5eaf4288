"""Settings of a training run of draft heads: the flags of `quire train-heads`. The output folder
records them.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...model.config import ModelError

DATA = "Data"
LEARNING = "Learning"
SHAPE = "Heads"


def flag(
    default: Any, panel: str, help: str, metavar: str | None = None, default_text: str | None = None
) -> Any:
    """Declare a setting that is also a flag; `default_text` is its default in `--help`, where the
    value itself is not clear.
    """
    text = default_text or (f"{default:g}" if isinstance(default, float) else str(default))
    return field(
        default=default,
        metadata={"help": help, "panel": panel, "metavar": metavar, "default_text": text},
    )


@dataclass(frozen=True)
class Settings:
    kind: str = flag("eagle", SHAPE, "Kind of draft heads: medusa, eagle or eagle3.")
    heads: int = flag(4, SHAPE, "medusa: number of heads, one per draft token.", "N")
    depth: int = flag(1, SHAPE, "medusa: residual blocks per head.", "N")
    shared_head: bool = flag(
        False, SHAPE, "medusa: share the model's LM head, instead of training one per head."
    )
    draft_vocab: int = flag(
        0,
        SHAPE,
        "eagle3: size of the draft vocabulary, the tokens most frequent in the answers.",
        "N",
        "the whole vocabulary",
    )
    start: Path | None = flag(
        None,
        SHAPE,
        "Folder of trained heads to continue from; its config.json overrides the settings above.",
        "FOLDER",
        "new heads",
    )
    prompts: Path | None = flag(
        None,
        DATA,
        "Prompts to answer, one per line; or a .jsonl file of objects with prompt, "
        "prompt_token_ids or messages.",
        "FILE",
        "the BOS token alone",
    )
    samples: int = flag(4000, DATA, "Number of answers to generate without --prompts.", "N")
    max_tokens: int = flag(256, DATA, "Maximum number of tokens per answer.", "N")
    temperature: float | None = flag(
        None, DATA, "Temperature of the sampled answers.", "NUMBER", "the model's own, or 1"
    )
    greedy: float = flag(0.5, DATA, "Fraction of the prompts to answer greedily.", "SHARE")
    held_out: float = flag(0.02, DATA, "Fraction of the answers held out for evaluation.", "SHARE")
    steps: int = flag(1000, LEARNING, "Total number of training steps.", "N")
    rows: int = flag(8, LEARNING, "Batch size in rows.", "N")
    length: int = flag(512, LEARNING, "Tokens per row, into which answers are packed.", "N")
    places: int = flag(4, LEARNING, "eagle, eagle3: number of draft positions to train.", "N")
    rate: float = flag(
        1e-3, LEARNING, "Peak learning rate; linear warm-up, then cosine decay.", "NUMBER"
    )
    warmup: int = flag(50, LEARNING, "Number of warm-up steps.", "N")
    seed: int = flag(0, LEARNING, "Seed for sampling, initial weights and data order.", "N")
    check: int = flag(200, LEARNING, "Steps between checkpoints and evaluations.", "N")

    def __post_init__(self):
        for name in ("heads", "depth", "samples", "max_tokens", "steps", "rows", "places", "check"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("greedy", "held_out"):
            if not 0 <= getattr(self, name) <= 1:
                raise ModelError(f"{name} is {getattr(self, name):g}; it is a share, from 0 to 1")
        if not 0 < self.held_out < 1:
            raise ModelError(f"held_out is {self.held_out:g}; some must be held out, and some not")
        if self.length < 8 or not self.rate > 0 or self.warmup < 0 or self.draft_vocab < 0:
            raise ModelError(
                "length must be at least 8, rate above 0, warmup and draft_vocab not negative"
            )

    def begin(self, folder: Path) -> None:
        """Write the settings into a new folder; raises if the folder has different settings."""
        path = folder / "settings.json"
        values = {name: json_value(value) for name, value in asdict(self).items()}
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values, indent=2) + "\n")
            return
        recorded = json.loads(path.read_text())
        for setting in fields(self):
            if recorded.get(setting.name) != values[setting.name]:
                raise ModelError(
                    f"{folder} was begun with {setting.name} = {recorded.get(setting.name)!r}, and "
                    f"now it is {values[setting.name]!r}; give what it was begun with, or another "
                    "folder"
                )


def json_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
