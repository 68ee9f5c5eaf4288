"""Imports libraries of optional extras, which only some commands need."""

import importlib
from typing import Any

from .errors import ModelError


def import_extra(module: str, extra: str, feature: str) -> Any:
    """Import a module of an extra's library, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"{feature} needs {module.partition('.')[0]}: pip install 'quire[{extra}]' ({error})"
        ) from None
