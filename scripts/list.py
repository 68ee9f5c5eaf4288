"""`quire list`: list the downloaded and bundled models."""

import sys
from datetime import datetime
from typing import Any

from ..serving.api.sizes import amount
from . import options as o
from .tables import table


@o.takes_engine(only=("download_dir",))
def main(*, engine: dict[str, Any]) -> None:
    """List the downloaded models in the Hugging Face cache, and the bundled ones."""
    from ..model.checkpoint import cached  # not at the top: `--help` must not wait for it

    models, num_others = cached.cached_models(engine.get("download_dir"))
    rows = [
        (model.name, amount(model.size), model.format, day(model.modified))
        for model in cached.bundled_models() + models
    ]
    print(table(("NAME", "SIZE", "FORMAT", "MODIFIED"), rows))
    if num_others:
        print(f"{num_others} more in the cache are no models that Quire reads", file=sys.stderr)


def day(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
