"""Strict reading of a GGUF file's metadata: a value of the wrong type raises an error that names
its key.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ModelError

WHOLE = "a whole number"
NUMBER = "a number"
FLAG = "true or false"
TEXT = "text"


class Metadata:
    """The metadata of a file. A key that begins with a dot, such as `.block_count`, belongs to the
    architecture.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def full_key(self, key: str) -> str:
        """The key with the architecture's name in front if it begins with a dot."""
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.full_key(key) in self.values

    def value(self, key: str, kind: str, check: Callable[[Any], bool], default: Any) -> Any:
        """The checked value of a key, or the default; without a default the key is required."""
        name = self.full_key(key)
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise ModelError(f"GGUF: {name} is missing; it must be {kind}")
            return default
        if isinstance(value, np.generic):
            value = value.item()
        if not check(value):
            raise ModelError(f"GGUF: {name} = {format_value(value)}; it must be {kind}")
        return value

    def text(self, key: str, default: Any = ...) -> Any:
        return self.value(key, TEXT, lambda x: isinstance(x, str), default)

    def flag(self, key: str, default: Any = ...) -> Any:
        return self.value(key, FLAG, lambda x: isinstance(x, bool), default)

    def count(self, key: str, default: Any = ..., minimum: int = 1) -> Any:
        """An integer of at least `minimum`."""
        return self.value(
            key,
            f"{WHOLE} of at least {minimum}",
            lambda x: type(x) is int and x >= minimum,
            default,
        )

    def number(self, key: str, default: Any = ...) -> Any:
        """A finite number, as written before it was rounded to 32 bits."""
        value = self.value(
            key, NUMBER, lambda x: type(x) in (int, float) and math.isfinite(x), default
        )
        return decimal(value) if type(value) is float and value != default else value

    def positive(self, key: str, default: Any = ...) -> Any:
        """A number above zero."""
        value = self.number(key, default)
        if value is not None and value <= 0:
            raise ModelError(
                f"GGUF: {self.full_key(key)} = {value!r}; it must be a positive number"
            )
        return value

    def array(self, key: str, kind: str, default: Any = ...) -> Any:
        """A list whose entries all have one type: WHOLE, NUMBER, FLAG or TEXT."""
        values = self.value(key, f"a list, each of its entries {kind}", is_list, default)
        if values is default:
            return default
        types = {WHOLE: (int,), NUMBER: (int, float), FLAG: (bool,), TEXT: (str,)}[kind]
        values = values.tolist() if isinstance(values, np.ndarray) else values
        for index, entry in enumerate(values):
            if type(entry) not in types:
                if isinstance(entry, np.generic) and type(entry.item()) in types:
                    continue
                raise ModelError(
                    f"GGUF: {self.full_key(key)} has {format_value(entry)} at place {index}; it "
                    f"must be {kind}"
                )
        return [entry.item() if isinstance(entry, np.generic) else entry for entry in values]

    def is_array(self, key: str) -> bool:
        return is_list(self.values.get(self.full_key(key)))

    def per_layer_counts(
        self, key: str, layers: int, default: Any = ..., minimum: int = 0
    ) -> list[int]:
        """An integer for each layer; the file has a list, or one value for all layers."""
        if not self.is_array(key):
            return [self.count(key, default, minimum)] * layers
        counts = self.array(key, WHOLE)
        if len(counts) < layers or any(count < minimum for count in counts):
            raise ModelError(
                f"GGUF: {self.full_key(key)} = {format_value(counts)}; "
                f"it must be {layers} whole numbers of at least {minimum}"
            )
        return counts[:layers]

    def uniform_count(self, key: str, layers: int, default: Any = ...) -> Any:
        """An integer that must be the same for all layers."""
        distinct = {*self.per_layer_counts(key, layers, default, minimum=1)}
        if len(distinct) > 1:
            raise ModelError(
                f"GGUF: {self.full_key(key)} = {format_value(sorted(distinct))}; it must be the "
                "same for all layers"
            )
        return distinct.pop() if distinct else default

    def reject(self, key: str, *harmless: Any) -> None:
        """Raise if a key is present with a value that is not one of `harmless`."""
        value = self.values.get(self.full_key(key))
        if value is not None and value not in harmless:
            raise ModelError(
                f"GGUF: {self.full_key(key)} = {format_value(value)} is not supported for "
                f"{self.architecture!r}"
            )


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def decimal(value: float) -> float:
    """The shortest decimal number that rounds to the same float32: files store 1e-6 as
    9.999999974752427e-07.
    """
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(str(rounded)) if float(rounded) == value else value


def format_value(value: Any) -> str:
    """A short form of a value for an error message."""
    return f"{value[:60] if isinstance(value, str) or is_list(value) else value!a:.80}"
