"""Declaration of options that are flags of the commands and keyword arguments in Python."""

from dataclasses import field
from typing import Any

# Panels of `--help`.
MODEL = "The model"
DEVICES = "Devices and processes"
MEMORY = "Memory and batching"
PREFIXES = "Prefix cache"
SPECULATION = "Speculative decoding"
OUTPUT = "Input and output"
SAMPLING = "Sampling"
ADAPTERS = "Adapters"


def flag(
    default: Any,
    panel: str,
    help: str,
    metavar: str | None = None,
    default_text: str | None = None,
    short_name: str = "",
) -> Any:
    """Declare a field that is also a flag of the commands.

    An integer with a metavar may be written there as 32K or 8G.

    Args:
        default_text: The default as a text, if it depends on other settings.
        short_name: One-letter or short form of the flag.
    """
    metadata = {
        "panel": panel,
        "help": help,
        "metavar": metavar,
        "default_text": default_text,
        "short": short_name,
    }
    return field(default=default, metadata=metadata)


def no_flag(default: Any, help: str) -> Any:
    """Declare a field that only Python's arguments have."""
    return field(default=default, metadata={"help": help})
