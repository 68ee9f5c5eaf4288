"""Pure Mamba 2: every layer is recurrent, without attention, MLP or positions."""

from ..config import Layer, Mamba2, ModelConfig
from .common import Keys, model_config
from .nemotron_h import canonical as canonical
from .nemotron_h import sources as sources

DEFAULT_MAX_LEN = 1 << 15  # tokens; the state has the same size at any length


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    heads = keys.count("num_heads", 128)
    inner = keys.count("expand", 2) * keys.count("hidden_size")
    mamba = Mamba2(
        heads=heads,
        groups=keys.count("n_groups", 8),
        key_dim=keys.count("state_size", 128),
        value_dim=keys.count("head_dim", inner // heads),
        width=keys.count("conv_kernel", 4),
        conv_bias=keys("use_conv_bias", True),
        bias=keys("use_bias", False),
        activation=keys.activation("hidden_act"),
    )
    # Residuals are summed in the model's dtype; the other keys concern training or the algorithm.
    keys.ignore(
        "residual_in_fp32",
        "rescale_prenorm_residual",
        "chunk_size",
        "time_step_rank",
        "time_step_min",
    )
    keys.ignore(
        "time_step_max", "time_step_floor", "layer_norm_epsilon", "rms_norm", "norm_before_gate"
    )
    keys.ignore("intermediate_size", "time_step_init_scheme", "time_step_scale")
    keys.refuse("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    context_length = max(max_len or 0, keys.count("max_position_embeddings", DEFAULT_MAX_LEN))
    eps = keys.positive("layer_norm_epsilon", 1e-5)
    return model_config(
        keys,
        "mamba2",
        (Layer(mamba),) * keys.count("num_hidden_layers", 64),
        context_length,
        norm_eps=eps,
    )
