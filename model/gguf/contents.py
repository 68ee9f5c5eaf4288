"""What a GGUF file says and holds, asked as the architectures need it."""

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from .metadata import FLAG, Metadata, shown
from .rotary import Read, rope_of

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]
DTYPES = {0: "float32", 1: "float16"}  # general.file_type of files that are not quantised; all others: bfloat16


class Contents:
    """What a file says, and what it holds."""

    def __init__(self, meta: Metadata, shapes: Shapes, read: Read | None):
        self.meta, self.shapes, self.read = meta, shapes, read

    @property
    def layers(self) -> int:
        """Those of the model itself: the last of a file may predict further tokens."""
        blocks, ahead = self.meta.count(".block_count"), self.meta.count(".nextn_predict_layers", 0, least=0)
        if not 0 <= ahead < blocks or blocks > len(self.shapes):
            name = self.meta.name(".block_count")
            raise ModelError(f"GGUF: {name} = {blocks}; the file has {len(self.shapes)} tensors, {ahead} layers ahead")
        return blocks - ahead

    @property
    def dtype(self) -> str:
        """What the numbers were before any were made smaller, as far as the file says."""
        return DTYPES.get(self.meta.count("general.file_type", 32, least=0), "bfloat16")

    def has(self, name: str) -> bool:
        return name in self.shapes

    def everywhere(self, name: str, layers: range | None = None) -> bool:
        """Whether each layer has a tensor of this name, or none; a file where some have it is refused."""
        numbers = range(self.layers) if layers is None else layers
        found = [self.has(f"blk.{number}.{name}") for number in numbers]
        if any(found) and not all(found):
            missing = numbers[found.index(False)]
            raise ModelError(f"GGUF: layer {missing} has no tensor {name}, which others have")
        return any(found)

    def size(self, name: str, axis: int) -> int:
        """One number of a tensor's shape."""
        shape = self.shapes.get(name, ())
        if len(shape) <= axis:
            raise ModelError(f"GGUF: the tensor {name} has shape {shape}; it must have at least {axis + 1} axes")
        return shape[axis]

    def first_with(self, name: str) -> str:
        """The first layer's tensor of this name."""
        for number in range(self.layers):
            if self.has(found := f"blk.{number}.{name}"):
                return found
        raise ModelError(f"GGUF: no layer has a tensor {name}, which {self.meta.architecture} models need")

    def without(self, name: str) -> list[int]:
        """The layers that have no tensor of this name."""
        return [number for number in range(self.layers) if not self.has(f"blk.{number}.{name}")]

    def biases(self, *names: str) -> bool:
        """Whether all of these products have a bias, or none: the families know no other."""
        found = {name: self.everywhere(f"{name}.bias") for name in names}
        if len({*found.values()}) > 1:
            some = next(name for name in names if found[name])
            other = next(name for name in names if not found[name])
            raise ModelError(f"GGUF: {some} has a bias and {other} has none, which is not supported here")
        return any(found.values())

    def common(self, kind: str, norm: str = "rms_norm_eps") -> Config:
        """The keys that nearly all models have, their rotary embedding apart."""
        meta, heads = self.meta, self.meta.same(".attention.head_count", self.layers)
        key = ".attention.layer_norm_rms_epsilon" if norm == "rms_norm_eps" else ".attention.layer_norm_epsilon"
        return {
            "model_type": kind,
            "torch_dtype": self.dtype,
            "vocab_size": self.size("token_embd.weight", 0),
            "hidden_size": meta.count(".embedding_length"),
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "max_position_embeddings": meta.count(".context_length"),
            norm: meta.positive(key),
            "tie_word_embeddings": not self.has("output.weight"),
        }

    def heads(self, config: Config) -> Config:
        """The numbers of heads of keys and values, and the size of all: rotated as the file says."""
        heads, meta = config["num_attention_heads"], self.meta
        size = meta.count(".attention.key_length", config["hidden_size"] // heads or 1)
        if (other := meta.count(".attention.value_length", size)) != size:
            name = meta.name(".attention.value_length")
            raise ModelError(f"GGUF: {name} = {other}; it must be the {size} of attention.key_length")
        counts = [each for each in meta.of_layers(".attention.head_count_kv", self.layers, heads) if each]
        if len({*counts}) != 1:
            raise ModelError(f"GGUF: {meta.name('.attention.head_count_kv')} = {shown(counts)}; it must be one number")
        rope = rope_of(meta, self.shapes, self.read, size, config["max_position_embeddings"])
        return {"num_key_value_heads": counts[0], "head_dim": size} | rope

    def dense(self, kind: str, norm: str = "rms_norm_eps", **more: Any) -> Config:
        """A model whose layers have attention and a feed-forward block of one width."""
        config = self.common(kind, norm)
        width = self.meta.same(".feed_forward_length", self.layers)
        return config | self.heads(config) | {"intermediate_size": width, "hidden_act": "silu"} | more

    def windows(self, every: int | None, otherwise: int = 0) -> Config:
        """`sliding_window` and `layer_types`: without a list in the file every `every`-th layer has no window."""
        window = self.meta.count(".attention.sliding_window", otherwise, least=0)
        if not window:
            return {"sliding_window": None, "layer_types": ["full_attention"] * self.layers}
        key = ".attention.sliding_window_pattern"
        if self.meta.is_array(key):
            slides = self.meta.array(key, FLAG)
            if len(slides) < self.layers:
                raise ModelError(f"GGUF: {self.meta.name(key)} has {len(slides)} entries for {self.layers} layers")
        else:
            period = self.meta.count(key, every)
            slides = [bool((number + 1) % period) for number in range(self.layers)]
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides[: self.layers]]
        return {"sliding_window": window, "layer_types": kinds}

    def experts(self) -> tuple[int, int, int]:
        """How many there are, how many a token has, and how wide each is."""
        count, used = self.meta.count(".expert_count"), self.meta.same(".expert_used_count", self.layers)
        if used > count:
            raise ModelError(f"GGUF: {self.meta.name('.expert_used_count')} = {used}; there are {count} experts")
        return count, used, self.size(self.first_with("ffn_down_exps.weight"), 2)

    def gate(self, otherwise: str) -> str:
        """What makes weights of experts' scores."""
        number = self.meta.count(".expert_gating_func", 0, least=0)
        kinds = {0: otherwise, 1: "softmax", 2: "sigmoid"}
        if number not in kinds:
            name = self.meta.name(".expert_gating_func")
            raise ModelError(f"GGUF: {name} = {number}; it can be 1 for softmax or 2 for sigmoid")
        return kinds[number]

    def leading(self, name: str) -> int:
        """How many layers come before the first with a tensor of this name, which all after it have."""
        without = self.without(name)
        if without != [*range(len(without))]:
            raise ModelError(f"GGUF: layer {without[-1]} has no tensor {name}, and one before it has")
        return len(without)
