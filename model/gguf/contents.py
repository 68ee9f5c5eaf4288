"""Typed access to a GGUF file's metadata and tensor shapes, and the config keys that architectures
share.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from .metadata import FLAG, Metadata, format_value
from .rotary import Read, rope_config

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]
DTYPES = {0: "float32", 1: "float16"}  # by general.file_type; all others: bfloat16


class Contents:
    """The metadata and tensor shapes of a file."""

    def __init__(self, meta: Metadata, shapes: Shapes, read: Read | None):
        self.meta = meta
        self.shapes = shapes
        self.read = read

    @property
    def num_layers(self) -> int:
        """The layers of the model itself, without multi-token-prediction layers at the end of the
        file.
        """
        blocks = self.meta.count(".block_count")
        mtp_layers = self.meta.count(".nextn_predict_layers", 0, minimum=0)
        if not 0 <= mtp_layers < blocks or blocks > len(self.shapes):
            name = self.meta.full_key(".block_count")
            raise ModelError(
                f"GGUF: {name} = {blocks}; the file has {len(self.shapes)} tensors, "
                f"and {mtp_layers} layers predict further tokens"
            )
        return blocks - mtp_layers

    @property
    def dtype(self) -> str:
        """The dtype of the weights before quantisation, as far as the file states it."""
        return DTYPES.get(self.meta.count("general.file_type", 32, minimum=0), "bfloat16")

    def has(self, name: str) -> bool:
        return name in self.shapes

    def in_all_layers(self, name: str, layers: range | None = None) -> bool:
        """Whether all layers have a tensor of this name, or none; raises if only some have it."""
        numbers = range(self.num_layers) if layers is None else layers
        is_present = [self.has(f"blk.{number}.{name}") for number in numbers]
        if any(is_present) and not all(is_present):
            missing = numbers[is_present.index(False)]
            raise ModelError(f"GGUF: layer {missing} has no tensor {name}, which others have")
        return any(is_present)

    def size(self, name: str, axis: int) -> int:
        """The size of a tensor along an axis."""
        shape = self.shapes.get(name, ())
        if len(shape) <= axis:
            raise ModelError(
                f"GGUF: the tensor {name} has shape {shape}; it must have at least {axis + 1} axes"
            )
        return shape[axis]

    def first_tensor(self, name: str) -> str:
        """The full name of the first layer's tensor that ends in `name`."""
        for number in range(self.num_layers):
            if self.has(tensor_name := f"blk.{number}.{name}"):
                return tensor_name
        raise ModelError(
            f"GGUF: no layer has a tensor {name}, which {self.meta.architecture} models need"
        )

    def layers_without(self, name: str) -> list[int]:
        """The numbers of the layers that have no tensor of this name."""
        return [number for number in range(self.num_layers) if not self.has(f"blk.{number}.{name}")]

    def have_bias(self, *names: str) -> bool:
        """Whether all of these projections have a bias, or none; raises if only some have one."""
        has_bias = {name: self.in_all_layers(f"{name}.bias") for name in names}
        if len({*has_bias.values()}) > 1:
            with_bias = next(name for name in names if has_bias[name])
            without_bias = next(name for name in names if not has_bias[name])
            raise ModelError(
                f"GGUF: {with_bias} has a bias and {without_bias} has none, which is not "
                "supported here"
            )
        return any(has_bias.values())

    def common_config(self, kind: str, norm: str = "rms_norm_eps") -> Config:
        """The config keys that nearly all models have, without those of the rotary embedding."""
        meta = self.meta
        heads = meta.uniform_count(".attention.head_count", self.num_layers)
        key = (
            ".attention.layer_norm_rms_epsilon"
            if norm == "rms_norm_eps"
            else ".attention.layer_norm_epsilon"
        )
        return {
            "model_type": kind,
            "torch_dtype": self.dtype,
            "vocab_size": self.size("token_embd.weight", 0),
            "hidden_size": meta.count(".embedding_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "max_position_embeddings": meta.count(".context_length"),
            norm: meta.positive(key),
            "tie_word_embeddings": not self.has("output.weight"),
        }

    def head_config(self, config: Config) -> Config:
        """The number of KV heads, the head size and the rotary embedding."""
        heads = config["num_attention_heads"]
        meta = self.meta
        size = meta.count(".attention.key_length", config["hidden_size"] // heads or 1)
        if (value_size := meta.count(".attention.value_length", size)) != size:
            name = meta.full_key(".attention.value_length")
            raise ModelError(
                f"GGUF: {name} = {value_size}; it must be the {size} of attention.key_length"
            )
        counts = [
            count
            for count in meta.per_layer_counts(".attention.head_count_kv", self.num_layers, heads)
            if count
        ]
        if len({*counts}) != 1:
            raise ModelError(
                f"GGUF: {meta.full_key('.attention.head_count_kv')} = {format_value(counts)}; it "
                "must be one number"
            )
        rope = rope_config(meta, self.shapes, self.read, size, config["max_position_embeddings"])
        return {"num_key_value_heads": counts[0], "head_dim": size} | rope

    def dense_config(self, kind: str, norm: str = "rms_norm_eps", **overrides: Any) -> Config:
        """The config of a model whose layers have attention and a feed-forward block of one
        width.
        """
        config = self.common_config(kind, norm)
        width = self.meta.uniform_count(".feed_forward_length", self.num_layers)
        return (
            config
            | self.head_config(config)
            | {"intermediate_size": width, "hidden_act": "silu"}
            | overrides
        )

    def window_config(self, default_period: int | None, default_window: int = 0) -> Config:
        """`sliding_window` and `layer_types`; without a list in the file, every `default_period`-th
        layer has no window.
        """
        window = self.meta.count(".attention.sliding_window", default_window, minimum=0)
        if not window:
            return {"sliding_window": None, "layer_types": ["full_attention"] * self.num_layers}
        key = ".attention.sliding_window_pattern"
        if self.meta.is_array(key):
            slides = self.meta.array(key, FLAG)
            if len(slides) < self.num_layers:
                raise ModelError(
                    f"GGUF: {self.meta.full_key(key)} has {len(slides)} entries for "
                    f"{self.num_layers} layers"
                )
        else:
            file_period = self.meta.count(key, default_period)
            slides = [bool((number + 1) % file_period) for number in range(self.num_layers)]
        kinds = [
            "sliding_attention" if slide else "full_attention"
            for slide in slides[: self.num_layers]
        ]
        return {"sliding_window": window, "layer_types": kinds}

    def expert_sizes(self) -> tuple[int, int, int]:
        """The number of experts, the experts per token, and the width of an expert."""
        count = self.meta.count(".expert_count")
        used = self.meta.uniform_count(".expert_used_count", self.num_layers)
        if used > count:
            raise ModelError(
                f"GGUF: {self.meta.full_key('.expert_used_count')} = {used}; there are {count} "
                "experts"
            )
        return count, used, self.size(self.first_tensor("ffn_down_exps.weight"), 2)

    def gating_function(self, default: str) -> str:
        """The function that turns router logits into weights: softmax or sigmoid."""
        number = self.meta.count(".expert_gating_func", 0, minimum=0)
        kinds = {0: default, 1: "softmax", 2: "sigmoid"}
        if number not in kinds:
            name = self.meta.full_key(".expert_gating_func")
            raise ModelError(f"GGUF: {name} = {number}; it can be 1 for softmax or 2 for sigmoid")
        return kinds[number]

    def count_leading_without(self, name: str) -> int:
        """The number of layers before the first one with a tensor of this name, which all later
        layers must have.
        """
        missing = self.layers_without(name)
        if missing != [*range(len(missing))]:
            raise ModelError(
                f"GGUF: layer {missing[-1]} has no tensor {name}, and one before it has"
            )
        return len(missing)
