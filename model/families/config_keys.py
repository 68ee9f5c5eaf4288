"""Strict reading of config.json: a key that the family has not read is an error."""

import json
from typing import Any

from ..config import Mlp, ModelError, Rope
from . import rope

# Keys that do not change the arithmetic of a forward pass: of training, of the code that wrote the file, of generation.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "pretraining_tp",
    "cache_implementation", "auto_map", "id2label", "label2id", "num_labels", "gradient_checkpointing",
    "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder", "chunk_size_feed_forward",
    "problem_type", "sentence_transformers", "sbert_ce_default_activation_function",
    "tokenizer_class", "task_specific_params", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
    "aux_loss_alpha", "seq_aux", "ep_size", "unsloth_version", "unsloth_fixed", "num_nextn_predict_layers",
    "attn_implementation", "is_llama_config", "transformers.js_config", "neftune_noise_alpha", "model_max_length",
    "max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "num_beams", "num_beam_groups", "num_return_sequences", "early_stopping",
}  # fmt: skip
INSIDE = "_inside"  # the key of the whole config.json that these keys are the value of
TRAINING = ("dropout", "pdrop", "initializer")  # names with these in them
SPECIAL = ("_token_id", "_token_ids")  # endings of the names of token ids
HARMLESS_VALUES = {"activation": "swiglu"}  # what `hidden_act` says too

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip


class Keys:
    """A config.json, or a part of it, that is read key by key; `done` refuses keys that were not read."""

    def __init__(self, hf: dict[str, Any], inside: str | None = None):
        self.hf, self.inside, self.read = hf, inside or hf.get(INSIDE), set(HARMLESS)

    def __call__(self, name: str, default: Any = ...):
        """The value of a key; a missing or null one gives the default, or an error if there is none."""
        self.read.add(name)
        value = self.hf.get(name)
        if value is not None:
            return same_kind(f"config.json: {name}", value, default)
        if default is ...:
            raise ModelError(f"config.json lacks {name!r}, which {self.hf.get('model_type')!r} models need")
        return default

    def count(self, name: str, default: Any = ...) -> Any:
        """The value of a key that must be a whole number of at least 1, or its default."""
        value = self(name, default)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(f"config.json: {name} = {value!r}; it must be a whole number of at least 1")
        return value

    def positive(self, name: str, default: float | None) -> Any:
        """The value of a key that must be a number above zero, or its default."""
        value = self(name, default)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise ModelError(f"config.json: {name} = {value!r}; it must be a positive number")
        return value

    def heads(self, head_dim: int | None = None) -> dict[str, Any]:
        """What every `Attention` needs: the numbers of heads, their size and the usual scale."""
        N = self.count("num_attention_heads")
        H = self.count("head_dim", head_dim or self.count("hidden_size") // N)
        return {"heads": N, "kv_heads": self.count("num_key_value_heads", N), "head_dim": H, "scale": H**-0.5}

    def mlp(self, **fields: Any) -> Mlp:
        """The dense block, by the names that most files have."""
        activation = self.activation("hidden_act")
        return Mlp(self.count("intermediate_size"), activation, **({"bias": self("mlp_bias", False)} | fields))

    def ignore(self, *names: str) -> None:
        """Keys that this family knows to have no effect."""
        self.read.update(names)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse all values of a key but those that are harmless: the others are not supported."""
        if (value := self(name, None)) is not None and value not in harmless:
            right = repr(harmless[0]) if harmless else "null"
            raise ModelError(f"config.json: {name} = {value!r} is not supported; supported is {right}")

    def activation(self, *names: str) -> str:
        """The activation that the first of these keys with a value names; silu without one."""
        value = next((v for name in names if (v := self(name, None)) is not None), "silu")
        if value not in list(ACTIVATION_NAMES):
            raise ModelError(f"activation {value!r} is not known; it can be one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[value]

    def dtype(self) -> str:
        """The dtype the checkpoint was saved in."""
        name = str(self("dtype", None) or self("torch_dtype", None) or "float32").removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise ModelError(f"config.json: dtype {name!r} is not known; it can be float32, bfloat16 or float16")
        return name

    def quantization(self, *methods: str) -> str | None:
        """The format of a quantised checkpoint's weights: one of `methods`, or None."""
        params = same_kind("config.json: quantization_config", self("quantization_config", None) or {}, {})
        if not params:
            return None
        method = params.get("quant_method")
        if method not in methods:
            raise ModelError(
                f"config.json: quantization_config.quant_method = {method!r} is not supported for model type "
                f"{self.hf.get('model_type')!r}; supported is {' or '.join(methods)}"
            )
        return method

    def rope(
        self, head_dim: int, max_len: int, layer_type: str | None = None, theta: float = 10000.0, plain: bool = False
    ) -> Rope | None:
        """The rotary embedding from `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old).

        `layer_type`: in the new form each type of layer has its own parameters. `plain`: the old keys do not apply to
        this type, which there has base `theta` without scaling.
        """
        old_theta, scaling, new = self("rope_theta", theta), self("rope_scaling", None), self("rope_parameters", None)
        partial, trained = self("partial_rotary_factor", None), self("original_max_position_embeddings", None)
        if plain and not new:
            return rope.build({"rope_theta": theta}, head_dim, max_len)
        params = same_kind("config.json: rope parameters", new or scaling or {}, {})
        if layer_type is not None and layer_type in params:
            if params[layer_type] is None:
                return None
            params = same_kind(f"config.json: rope parameters of {layer_type}", params[layer_type], {})
        elif plain:
            raise ModelError(f"config.json: rope_parameters lacks {layer_type!r}; this family has a set for each type")
        declared = self("max_position_embeddings", max_len)
        params = {"rope_theta": old_theta, "partial_rotary_factor": partial} | dict(params)
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind in ("llama3", "yarn", "longrope"):
            params["original_max_position_embeddings"] = (
                trained or params.get("original_max_position_embeddings") or declared
            )
        if kind == "dynamic":  # its base grows for sequences longer than the declared length
            params["original_max_position_embeddings"] = declared
        if kind in ("yarn", "longrope") and params.get("factor") is None:
            params["factor"] = declared / params["original_max_position_embeddings"]
        return rope.build(params, head_dim, max_len)

    def harmless(self, name: str, value: Any) -> bool:
        """Whether a key that nobody reads cannot change the result: it is of no forward pass, or its value is off."""
        if not value or name.startswith("_") or name.endswith(SPECIAL) or any(word in name for word in TRAINING):
            return True
        if name == "layer_types":
            return isinstance(value, list) and set(map(str, value)) == {"full_attention"}
        if name in ("sliding_window", "max_window_layers") and self.hf.get("use_sliding_window") is False:
            return True
        return HARMLESS_VALUES.get(name) == value

    def unknown(self) -> list[str]:
        """The keys that were not read and may change the result."""
        unread = [name for name in self.hf if name not in self.read]
        return sorted(name for name in unread if not self.harmless(name, self.hf[name]))

    def done(self) -> None:
        """Refuse a config.json with keys that were not read and may change the result."""
        if not (unknown := self.unknown()):
            return
        kind, first = self.hf.get("model_type"), unknown[0]
        if "quantization_config" in unknown:
            method = dict(self.hf["quantization_config"]).get("quant_method")
            raise ModelError(
                f"config.json: quantization_config.quant_method = {method!r} is not supported for model type {kind!r}; "
                "give the checkpoint that it was made from, or one in the form of compressed-tensors"
            )
        overrides = dict.fromkeys(unknown)
        if self.inside is not None:
            overrides = {self.inside: overrides}
        raise ModelError(
            f"config.json: {first} = {shown(self.hf[first])} is not understood for model type {kind!r}; it may change "
            f"the result, so the model is not loaded. If you know better: --hf-overrides '{json.dumps(overrides)}'"
        )


def shown(value: Any) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def same_kind(name: str, value: Any, default: Any) -> Any:
    """The value, if it is of the same JSON type as the default."""
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    kind = (int, float) if number else object if default in (None, ...) else type(default)
    if not isinstance(value, kind) or (number and isinstance(value, bool)):
        right = "a number" if number else {bool: "true or false", dict: "an object", list: "a list"}.get(kind, "text")
        raise ModelError(f"{name} = {value!r}; it must be {right}")
    return value
