"""Vision towers as published checkpoints describe them."""

import jax

from quire.model.towers import module_of
from quire.model.towers.weights import abstract

GENERIC = {  # keys that transformers writes into every part of a config.json
    "_name_or_path": "",
    "architectures": None,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "output_attentions": False,
    "output_hidden_states": False,
    "problem_type": None,
    "return_dict": True,
}
GEMMA4_E4B = GENERIC | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "default_output_length": 280,
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_vision",
    "num_attention_heads": 12,
    "num_hidden_layers": 16,
    "num_key_value_heads": 12,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": False,
    "use_clipped_linears": True,
}


def test_published_tower_of_gemma4_has_its_size():
    hf = {"text_config": {"hidden_size": 2560}}
    tower = module_of("gemma4_vision").config(GEMMA4_E4B, hf)
    num_weights = sum(spec.size for spec in jax.tree.leaves(abstract(tower)))
    matrices = 16 * (4 * 768 * 768 + 3 * 768 * 3072)  # of the layers
    others = 3 * 16 * 16 * 768 + 2 * 10240 * 768 + 768 * 2560  # patches, positions, merger
    norms_and_bounds = 16 * (4 * 768 + 2 * 64 + 7 * 4)
    assert num_weights == matrices + others + norms_and_bounds
    assert (tower.clips, tower.group, tower.merger.standardizes) == (True, 9, False)
