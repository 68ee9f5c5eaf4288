"""What heads are trained, on what, and how: the flags of `quire train-heads`, which a folder is
begun with.
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
    default: Any, panel: str, help: str, metavar: str | None = None, shown: str | None = None
) -> Any:
    """A setting with its default; `shown` says what happens without it, where the default does
    not.
    """
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return field(
        default=default,
        metadata={"help": help, "panel": panel, "metavar": metavar, "shown": shown or text},
    )


@dataclass(frozen=True)
class Settings:
    kind: str = flag("eagle", SHAPE, "medusa, eagle or eagle3.")
    heads: int = flag(4, SHAPE, "medusa: heads, each for one place ahead.", "N")
    depth: int = flag(1, SHAPE, "medusa: residual blocks of a head.", "N")
    shared_head: bool = flag(
        False, SHAPE, "medusa: use the model's output matrix, in place of one for each head."
    )
    draft_vocab: int = flag(
        0, SHAPE, "eagle3: tokens that can be drafted, those written most.", "N", "all"
    )
    start: Path | None = flag(
        None, SHAPE, "Folder of heads to go on from; they are what it says.", "FOLDER", "new ones"
    )
    prompts: Path | None = flag(
        None,
        DATA,
        "A prompt a line; or .jsonl, objects with prompt or messages.",
        "FILE",
        "the beginning of a text",
    )
    samples: int = flag(4000, DATA, "Answers to write where there is no file.", "N")
    max_tokens: int = flag(256, DATA, "Tokens of an answer at most.", "N")
    temperature: float | None = flag(
        None, DATA, "Of the answers that are drawn.", "NUMBER", "the model's own, or 1"
    )
    greedy: float = flag(0.5, DATA, "Share of the answers that are the likeliest.", "SHARE")
    held_out: float = flag(
        0.02, DATA, "Share of the answers that nothing is learned from.", "SHARE"
    )
    steps: int = flag(1000, LEARNING, "Steps, all sessions together.", "N")
    rows: int = flag(8, LEARNING, "Rows of a batch.", "N")
    length: int = flag(512, LEARNING, "Tokens of a row.", "N")
    places: int = flag(4, LEARNING, "eagle, eagle3: places ahead that are learned.", "N")
    rate: float = flag(
        1e-3, LEARNING, "Learning rate after the warm-up; it falls along a cosine.", "NUMBER"
    )
    warmup: int = flag(50, LEARNING, "Steps until the rate is reached.", "N")
    seed: int = flag(0, LEARNING, "Another seed draws, begins and mixes in another way.", "N")
    check: int = flag(200, LEARNING, "Steps from checkpoint to checkpoint.", "N")

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
        """Write them into a new folder; one that was begun with others is refused."""
        path = folder / "settings.json"
        values = {name: own(value) for name, value in asdict(self).items()}
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values, indent=2) + "\n")
            return
        before = json.loads(path.read_text())
        for each in fields(self):
            if before.get(each.name) != values[each.name]:
                raise ModelError(
                    f"{folder} was begun with {each.name} = {before.get(each.name)!r}, and now it "
                    f"is {values[each.name]!r}; give what it was begun with, or another folder"
                )


def own(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
