"""`--config`: option values from a YAML file; the command line takes precedence."""

from pathlib import Path
from typing import Any

import typer

from .. import options as o
from ..command import advice, check_value, no_effect, note_without_effect


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`: make the values in a YAML file the defaults of the command."""
    if path is None:
        return None
    import yaml  # not at the top: `--help` must not wait for it

    try:
        values = yaml.safe_load(o.read_text(path))
    except yaml.YAMLError as error:
        raise o.UsageError(
            f"--config {path} is not YAML: {' '.join(str(error).split())[:200]}"
        ) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise o.UsageError(f"--config {path} must map options to values")
    params_by_name = {
        flag.lstrip("-"): param
        for param in context.command.params
        for flag in (*param.opts, *param.secondary_opts)
    }
    params_by_name |= {param.name: param for param in context.command.params if param.name}
    params_by_name["model"] = params_by_name["models"]
    defaults: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        option = params_by_name.get(str(key), params_by_name.get(name))
        if option is None and no_effect(name) is not None:
            check_value(name, str(value))
            ignored.append(name)
            continue
        if option is None or option.name == "config":
            # Keys in the file have no leading dashes.
            flags = [f"--{param_name}" for param_name in params_by_name]
            hint = advice(f"--{name}", flags).replace(" --", " ")
            raise o.UsageError(f"--config {path} has {key!r}, which is no option{hint}")
        takes_several = option.multiple or option.nargs == -1
        if isinstance(value, list):
            defaults[option.name] = [str(item) for item in value]
        else:
            defaults[option.name] = [value] if takes_several else value
    note_without_effect(ignored)
    context.default_map = defaults
    return path
