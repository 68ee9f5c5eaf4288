"""OLMo 2: norms after each block instead of before, and norms across all heads of queries and
keys.
"""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import POST_NORMS, Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads()
    bias = keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or context_length)
    attention = Attention(**heads, rope=rope, qk_norm="all", bias=bias, out_bias=bias)
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_act"))
    layers = (Layer(attention, mlp, pre_norm=False, post_norm=True),) * keys.count(
        "num_hidden_layers"
    )
    return model_config(
        keys, "olmo2", layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


sources = partial(model_sources, norms=POST_NORMS)
