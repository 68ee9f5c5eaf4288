"""Libraries of an extra, which only some commands need."""

import importlib
from typing import Any

from .errors import ModelError


def imported(module: str, extra: str, what: str) -> Any:
    """A module of an extra's library; without it an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"{what} needs {module.partition('.')[0]}: pip install 'quire[{extra}]' ({error})") from None
