"""Tiny models that read images, with random weights and a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.model import multimodal
from quire.model.checkpoint import loader
from quire.model.families.common import Source
from quire.model.towers import module_of

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
SPECIALS += ("[IMG_BREAK]", "[IMG_END]")
VOCAB = 256 + len(SPECIALS)
START, END, VISION_START, VISION_END, IMAGE, ROW_BREAK, IMAGE_END = range(256, VOCAB)
OTHERS = (
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "lm_head.",
)  # outside the text model and the tower
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT_TEXTS = {  # of an image in the templates of these models
    "gemma3": "<|vision_start|>",
    "gemma4": "<|image_pad|>",
    "gemma4_spans": "<|image_pad|>",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    f"{PLACEHOLDER}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_type": "default"}
HYBRID = TEXT | {
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": MROPE | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "max_position_embeddings": 4096,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "pad_token_id": 9,
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 80,
        "use_clipped_linears": True,
    },
    "audio_config": None,
    "boi_token_id": VISION_START,
    "eoi_token_id": VISION_END,
}
CONFIGS = {
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": MROPE | {"rope_theta": 10000.0},
        },
        "vision_config": VISION
        | {"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        "text_config": HYBRID | {"model_type": "qwen3_5_text"},
        "vision_config": VISION | {"model_type": "qwen3_5_vision"},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT
        | EXPERTS
        | {
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "rope_parameters": MROPE | {"rope_theta": 10000.0},
        },
        "vision_config": VISION
        | {"model_type": "qwen3_vl_moe_vision", "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5_moe": {
        "text_config": {key: value for key, value in HYBRID.items() if key != "intermediate_size"}
        | EXPERTS
        | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 48},
        "vision_config": VISION | {"model_type": "qwen3_5_moe_vision"},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 16, "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "head_dim": 16,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 64,
            "hidden_act": "silu",
        },
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "vision_feature_layer": -1,
    },
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "max_position_embeddings": 4096,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 64,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 16,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
    },
    "gemma4": GEMMA4,  # like E2B and E4B
    "gemma4_spans": GEMMA4  # like 31B
    | {
        "text_config": GEMMA4["text_config"]
        | {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 80,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": GEMMA4["vision_config"]
        | {"use_clipped_linears": False, "standardize": True},
    },
}
QWEN_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QWEN_PREPROCESSOR),
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": 4,
        "size": {"longest_edge": 64},
    },
    **dict.fromkeys(
        ("gemma4", "gemma4_spans"),
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    ),
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 64, "width": 64},
        "image_seq_length": 16,
    },
}


def write(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write the folder of a model, one of CONFIGS."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": kind,
        "image_token_id": IMAGE,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "torch_dtype": "float32",
        "tie_word_embeddings": kind.startswith("gemma"),
    } | CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[kind]))
    write_tokenizer(folder, PROMPT_TEXTS.get(kind, PLACEHOLDER))
    write_weights(folder, seed)
    return folder


def write_weights(folder: Path, seed: int) -> None:
    """Write random weights for the config of the folder."""
    rng = np.random.default_rng(seed)
    described = multimodal.read(folder)
    hf = json.loads((folder / "config.json").read_text())
    text_sources = loader.family_for(hf).sources(loader.read_config(folder))
    tower_sources = module_of(described.kind).sources(described.tower)
    leaves = jax.tree.leaves(
        (text_sources, tower_sources), is_leaf=lambda leaf: isinstance(leaf, Source)
    )
    tensors = {}
    for source in leaves:
        for part in source.whole or source.parts:
            name = part.name
            if not name.startswith((*module_of(described.kind).PREFIXES, *OTHERS)):
                name = "model.language_model." + name.removeprefix("model.")
            scale = 0.3 if len(part.shape) < 2 else 1.5 * part.shape[-1] ** -0.5
            is_norm = "norm" in name or "ln_" in name
            offset = 1 if is_norm and name.endswith("weight") else 0
            if hf["model_type"] == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
                offset = 0.5  # scores are not scaled: large ones would amplify rounding
            values = offset + scale * rng.standard_normal(part.shape)
            if name.endswith(("_min", "_max")):  # bounds, by which a part of the values is clipped
                values = (1 + rng.random()) * np.array(1 if name.endswith("_max") else -1)
            tensors[name] = np.asarray(values, np.float32)
    save_file(tensors, folder / "model.safetensors")


def write_tokenizer(folder: Path, placeholder: str = PLACEHOLDER) -> None:
    """Write a tokenizer with a token for each byte, and a template with this text for an image."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace(PLACEHOLDER, placeholder)
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_image(rng: np.random.Generator, width: int = 0, height: int = 0) -> np.ndarray:
    """A uint8 image [height, width, 3] of noise, of a random size unless it is given."""
    width = width or int(rng.integers(8, 90))
    height = height or int(rng.integers(8, 90))
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
