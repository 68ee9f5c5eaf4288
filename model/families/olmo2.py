"""OLMo 2: norms after each block in place of before, and one norm across all heads of queries and of keys."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig
from .common import POST_NORMS, Keys, model_config, model_sources


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    longest, heads, bias = keys.count("max_position_embeddings", 2048), keys.heads(), keys("attention_bias", False)
    rope = keys.rope(heads["head_dim"], max_len or longest)
    attention = Attention(**heads, rope=rope, qk_norm="all", bias=bias, out_bias=bias)
    mlp = Mlp(keys.count("intermediate_size"), keys.activation("hidden_act"))
    layers = (Layer(attention, mlp, pre_norm=False, post_norm=True),) * keys.count("num_hidden_layers")
    return model_config(keys, "olmo2", layers, longest, norm_eps=keys.positive("rms_norm_eps", 1e-5))


sources = partial(model_sources, norms=POST_NORMS)
