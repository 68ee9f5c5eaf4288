"""Strict reading of a GGUF file's metadata: every value is of its kind, or the error names its key."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ModelError

WHOLE, NUMBER, FLAG, TEXT = "a whole number", "a number", "true or false", "text"


class Metadata:
    """The keys of a file; those of its architecture are named without it: `.block_count`."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def name(self, key: str) -> str:
        """The whole key; one that begins with a dot follows the architecture's name."""
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.values

    def value(self, key: str, kind: str, check: Callable[[Any], bool], default: Any) -> Any:
        """The value of a key, or the default; without one the key must be there."""
        name = self.name(key)
        found = self.values.get(name)
        if found is None:
            if default is ...:
                raise ModelError(f"GGUF: {name} is missing; it must be {kind}")
            return default
        if isinstance(found, np.generic):
            found = found.item()
        if not check(found):
            raise ModelError(f"GGUF: {name} = {shown(found)}; it must be {kind}")
        return found

    def text(self, key: str, default: Any = ...) -> Any:
        return self.value(key, TEXT, lambda x: isinstance(x, str), default)

    def flag(self, key: str, default: Any = ...) -> Any:
        return self.value(key, FLAG, lambda x: isinstance(x, bool), default)

    def count(self, key: str, default: Any = ..., least: int = 1) -> Any:
        """A whole number of at least `least`."""
        return self.value(key, f"{WHOLE} of at least {least}", lambda x: type(x) is int and x >= least, default)

    def number(self, key: str, default: Any = ...) -> Any:
        """A finite number, as it was written before it was rounded to 32 bits."""
        found = self.value(key, NUMBER, lambda x: type(x) in (int, float) and math.isfinite(x), default)
        return decimal(found) if type(found) is float and found != default else found

    def positive(self, key: str, default: Any = ...) -> Any:
        """A number above zero."""
        found = self.number(key, default)
        if found is not None and found <= 0:
            raise ModelError(f"GGUF: {self.name(key)} = {found!r}; it must be a positive number")
        return found

    def array(self, key: str, kind: str, default: Any = ...) -> Any:
        """A list whose entries are all of one kind: WHOLE, NUMBER, FLAG or TEXT."""
        found = self.value(key, f"a list, each of its entries {kind}", is_list, default)
        if found is default:
            return default
        types = {WHOLE: (int,), NUMBER: (int, float), FLAG: (bool,), TEXT: (str,)}[kind]
        found = found.tolist() if isinstance(found, np.ndarray) else found
        for index, entry in enumerate(found):
            if type(entry) not in types:
                if isinstance(entry, np.generic) and type(entry.item()) in types:
                    continue
                raise ModelError(f"GGUF: {self.name(key)} has {shown(entry)} at place {index}; it must be {kind}")
        return [entry.item() if isinstance(entry, np.generic) else entry for entry in found]

    def is_array(self, key: str) -> bool:
        return is_list(self.values.get(self.name(key)))

    def of_layers(self, key: str, layers: int, default: Any = ..., least: int = 0) -> list[int]:
        """A whole number for each layer: the file may say one for all."""
        if not self.is_array(key):
            return [self.count(key, default, least)] * layers
        found = self.array(key, WHOLE)
        if len(found) < layers or any(each < least for each in found):
            raise ModelError(
                f"GGUF: {self.name(key)} = {shown(found)}; it must be {layers} whole numbers of at least {least}"
            )
        return found[:layers]

    def same(self, key: str, layers: int, default: Any = ...) -> Any:
        """A whole number that is the same for all layers."""
        found = {*self.of_layers(key, layers, default, least=1)}
        if len(found) > 1:
            raise ModelError(f"GGUF: {self.name(key)} = {shown(sorted(found))}; it must be the same for all layers")
        return found.pop() if found else default

    def refuse(self, key: str, *harmless: Any) -> None:
        """Refuse a key whose value is none of these."""
        found = self.values.get(self.name(key))
        if found is not None and found not in harmless:
            raise ModelError(f"GGUF: {self.name(key)} = {shown(found)} is not supported for {self.architecture!r}")


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def decimal(value: float) -> float:
    """The shortest decimal number that rounds to the same 32 bits: files hold 1e-6 as 9.999999974752427e-07."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(str(rounded)) if float(rounded) == value else value


def shown(value: Any) -> str:
    """A value as an error quotes it."""
    return f"{value[:60] if isinstance(value, str) or is_list(value) else value!a:.80}"
