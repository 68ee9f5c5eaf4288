"""`--config`: a file of options, which the command line overrides."""

from pathlib import Path
from typing import Any

import typer

from .. import options as o
from ..command import advice, check_value, no_effect, note_without_effect


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a YAML file's values the defaults of the command whose option this is."""
    if path is None:
        return None
    import yaml  # not at the top: `--help` must not wait for it

    try:
        found = yaml.safe_load(o.read_text(path))
    except yaml.YAMLError as error:
        raise o.UsageError(
            f"--config {path} is not YAML: {' '.join(str(error).split())[:200]}"
        ) from None
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise o.UsageError(f"--config {path} must map options to values")
    names = {
        option.lstrip("-"): one
        for one in context.command.params
        for option in (*one.opts, *one.secondary_opts)
    }
    names |= {one.name: one for one in context.command.params if one.name}
    names["model"] = names["models"]
    defaults: dict[str, Any] = {}
    without: list[str] = []
    for key, value in found.items():
        name = str(key).replace("_", "-")
        option = names.get(str(key), names.get(name))
        if option is None and no_effect(name) is not None:
            check_value(name, str(value))
            without.append(name)
            continue
        if option is None or option.name == "config":
            # a file has no dashes
            hint = advice(f"--{name}", [f"--{known}" for known in names]).replace(" --", " ")
            raise o.UsageError(f"--config {path} has {key!r}, which is no option{hint}")
        many = option.multiple or option.nargs == -1
        defaults[option.name] = (
            [str(each) for each in value] if isinstance(value, list) else [value] if many else value
        )
    note_without_effect(without)
    context.default_map = defaults
    return path
