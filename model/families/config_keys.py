"""Strict reading of config.json: a key that the family does not read raises an error."""

import json
from typing import Any

from ..config import Mlp, ModelError, Rope
from . import rope

# Keys that do not affect the forward pass: about training, generation and the exporting code.
HARMLESS = {
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "pretraining_tp",
    "cache_implementation",
    "auto_map",
    "id2label",
    "label2id",
    "num_labels",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "problem_type",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
    "tokenizer_class",
    "task_specific_params",
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "unsloth_version",
    "unsloth_fixed",
    "num_nextn_predict_layers",
    "attn_implementation",
    "is_llama_config",
    "transformers.js_config",
    "neftune_noise_alpha",
    "model_max_length",
    "max_length",
    "min_length",
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "early_stopping",
}
INSIDE = "_inside"  # key added to a nested config: its key in the outer config.json
TRAINING = ("dropout", "pdrop", "initializer")  # substrings of keys about training
SPECIAL = ("_token_id", "_token_ids")  # suffixes of keys of special tokens
HARMLESS_VALUES = {"activation": "swiglu"}  # repeats `hidden_act`

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Keys:
    """Reads a config.json, or a section of it, key by key and records which keys were read.

    `done` raises an error for keys that were not read.
    """

    def __init__(self, hf: dict[str, Any], inside: str | None = None):
        self.hf = hf
        self.inside = inside or hf.get(INSIDE)
        self.read = set(HARMLESS)

    def __call__(self, name: str, default: Any = ...):
        """The value of a key, or the default if it is missing or null; raises without a default."""
        self.read.add(name)
        value = self.hf.get(name)
        if value is not None:
            return check_type(f"config.json: {name}", value, default)
        if default is ...:
            raise ModelError(
                f"config.json lacks {name!r}, which {self.hf.get('model_type')!r} models need"
            )
        return default

    def count(self, name: str, default: Any = ...) -> Any:
        """The value of a key that must be an integer of at least 1, or the default."""
        value = self(name, default)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(
                f"config.json: {name} = {value!r}; it must be a whole number of at least 1"
            )
        return value

    def positive(self, name: str, default: float | None) -> Any:
        """The value of a key that must be a number above zero, or the default."""
        value = self(name, default)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise ModelError(f"config.json: {name} = {value!r}; it must be a positive number")
        return value

    def heads(self, head_dim: int | None = None) -> dict[str, Any]:
        """The fields of every `Attention`: numbers of heads, head size and the usual scale."""
        N = self.count("num_attention_heads")
        H = self.count("head_dim", head_dim or self.count("hidden_size") // N)
        return {
            "heads": N,
            "kv_heads": self.count("num_key_value_heads", N),
            "head_dim": H,
            "scale": H**-0.5,
        }

    def mlp(self, **fields: Any) -> Mlp:
        """The MLP, from the keys that most families use; `fields` take precedence."""
        activation = self.activation("hidden_act")
        return Mlp(
            self.count("intermediate_size"),
            activation,
            **({"bias": self("mlp_bias", False)} | fields),
        )

    def ignore(self, *names: str) -> None:
        """Mark keys that have no effect in this family as read."""
        self.read.update(names)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise if a key is present with a value that is not one of `harmless`."""
        if (value := self(name, None)) is not None and value not in harmless:
            supported = repr(harmless[0]) if harmless else "null"
            raise ModelError(
                f"config.json: {name} = {value!r} is not supported; supported is {supported}"
            )

    def activation(self, *names: str) -> str:
        """The activation named by the first of these keys that has a value; silu by default."""
        value = next((v for name in names if (v := self(name, None)) is not None), "silu")
        if value not in list(ACTIVATION_NAMES):
            raise ModelError(
                f"activation {value!r} is not known; it can be one of {', '.join(ACTIVATION_NAMES)}"
            )
        return ACTIVATION_NAMES[value]

    def dtype(self) -> str:
        """The dtype in which the checkpoint was saved."""
        name = str(self("dtype", None) or self("torch_dtype", None) or "float32").removeprefix(
            "torch."
        )
        if name not in ("float32", "bfloat16", "float16"):
            raise ModelError(
                f"config.json: dtype {name!r} is not known; it can be float32, bfloat16 or float16"
            )
        return name

    def quantization(self, *methods: str) -> str | None:
        """The weight format of a quantised checkpoint: one of `methods`, or None."""
        params = check_type(
            "config.json: quantization_config", self("quantization_config", None) or {}, {}
        )
        if not params:
            return None
        method = params.get("quant_method")
        if method not in methods:
            raise ModelError(
                f"config.json: quantization_config.quant_method = {method!r} is not supported for "
                f"model type {self.hf.get('model_type')!r}; supported is {' or '.join(methods)}"
            )
        return method

    def rope(
        self,
        head_dim: int,
        max_len: int,
        layer_type: str | None = None,
        theta: float = 10000.0,
        ignores_old_keys: bool = False,
    ) -> Rope | None:
        """The rotary embedding from `rope_parameters` (Transformers 5), or from `rope_theta` and
        `rope_scaling` (older).

        Args:
            head_dim: Head size.
            max_len: Maximum length of a sequence.
            layer_type: Layer type whose parameters to read, if `rope_parameters` has several sets.
            theta: Default base.
            ignores_old_keys: The older keys do not apply to this layer type; without
                `rope_parameters` it has the base `theta` and no scaling.
        """
        old_theta = self("rope_theta", theta)
        rope_scaling = self("rope_scaling", None)
        rope_parameters = self("rope_parameters", None)
        rotary_fraction = self("partial_rotary_factor", None)
        original_len = self("original_max_position_embeddings", None)
        if ignores_old_keys and not rope_parameters:
            return rope.build({"rope_theta": theta}, head_dim, max_len)
        params = check_type(
            "config.json: rope parameters", rope_parameters or rope_scaling or {}, {}
        )
        if layer_type is not None and layer_type in params:
            if params[layer_type] is None:
                return None
            params = check_type(
                f"config.json: rope parameters of {layer_type}", params[layer_type], {}
            )
        elif ignores_old_keys:
            raise ModelError(
                f"config.json: rope_parameters lacks {layer_type!r}; this family has a set for "
                "each type"
            )
        declared_len = self("max_position_embeddings", max_len)
        params = {"rope_theta": old_theta, "partial_rotary_factor": rotary_fraction} | dict(params)
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if rope_type in ("llama3", "yarn", "longrope"):
            params["original_max_position_embeddings"] = (
                original_len or params.get("original_max_position_embeddings") or declared_len
            )
        if rope_type == "dynamic":  # the base grows for lengths beyond the declared one
            params["original_max_position_embeddings"] = declared_len
        if rope_type in ("yarn", "longrope") and params.get("factor") is None:
            params["factor"] = declared_len / params["original_max_position_embeddings"]
        return rope.build(params, head_dim, max_len)

    def harmless(self, name: str, value: Any) -> bool:
        """Whether an unread key cannot affect the result."""
        if (
            not value
            or name.startswith("_")
            or name.endswith(SPECIAL)
            or any(word in name for word in TRAINING)
        ):
            return True
        if name == "layer_types":
            return isinstance(value, list) and set(map(str, value)) == {"full_attention"}
        if (
            name in ("sliding_window", "max_window_layers")
            and self.hf.get("use_sliding_window") is False
        ):
            return True
        return HARMLESS_VALUES.get(name) == value

    def unknown(self) -> list[str]:
        """The unread keys that may affect the result."""
        unread = [name for name in self.hf if name not in self.read]
        return sorted(name for name in unread if not self.harmless(name, self.hf[name]))

    def done(self) -> None:
        """Raise ModelError if config.json has unread keys that may affect the result."""
        if not (unknown := self.unknown()):
            return
        model_type = self.hf.get("model_type")
        first_unknown = unknown[0]
        if "quantization_config" in unknown:
            method = dict(self.hf["quantization_config"]).get("quant_method")
            raise ModelError(
                f"config.json: quantization_config.quant_method = {method!r} is not supported for "
                f"model type {model_type!r}; give the original checkpoint, or one in the "
                "compressed-tensors format"
            )
        overrides = dict.fromkeys(unknown)
        if self.inside is not None:
            overrides = {self.inside: overrides}
        raise ModelError(
            f"config.json: {first_unknown} = {format_value(self.hf[first_unknown])} is not "
            f"understood for model type {model_type!r}; it may change the result, so the model is "
            f"not loaded. If you know better: --hf-overrides '{json.dumps(overrides)}'"
        )


def format_value(value: Any) -> str:
    """The repr of a value for an error message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_type(name: str, value: Any, default: Any) -> Any:
    """Return the value; raises ModelError unless it has the same JSON type as the default."""
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    kind = (int, float) if is_number else object if default in (None, ...) else type(default)
    if not isinstance(value, kind) or (is_number and isinstance(value, bool)):
        expected = (
            "a number"
            if is_number
            else {bool: "true or false", dict: "an object", list: "a list"}.get(kind, "text")
        )
        raise ModelError(f"{name} = {value!r}; it must be {expected}")
    return value
