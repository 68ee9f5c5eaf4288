"""`quire rm`: delete models from the Hugging Face cache."""

import sys
from typing import Annotated, Any

import typer

from ..serving.api.sizes import amount
from . import options as o


@o.takes_engine(only=("download_dir",))
def main(
    names: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Model names as `quire list` shows them."),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete without confirmation.", show_default=False)
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Delete models from the Hugging Face cache.

    Other folders and bundled models are not touched.
    """
    from ..model.checkpoint import cached, hub  # not at the top: `--help` must not wait for it

    cached_models = {
        model.name: model for model in cached.cached_models(engine.get("download_dir"))[0]
    }
    for name in names:
        if name in hub.BUNDLED:
            raise o.UsageError(f"{name} came with Quire and stays")
        if hub.strip_host(name) not in cached_models:
            available = ", ".join(cached_models) or "none"
            raise o.UsageError(f"there is no {name!r} in the cache; there is {available}")
    for model in [cached_models[name] for name in dict.fromkeys(map(hub.strip_host, names))]:
        size = amount(model.size)
        if not yes:
            if not sys.stdin.isatty():
                raise o.UsageError(
                    f"{model.name} ({size}) is deleted only when you say so: quire rm -y "
                    f"{model.name}"
                )
            if not typer.confirm(f"Delete {model.name} ({size})?"):
                continue
        print(f"deleted {model.name}: {amount(cached.remove(model))} are free")
