"""Reference of published draft heads in numpy and float64, by the names of their tensors."""

import numpy as np

Tensors = dict[str, np.ndarray]


def norm(x, scale, eps: float):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x_THP, theta: float, is_neox: bool = True):
    """RoPE: pairs are half the width apart (`is_neox`) or adjacent."""
    T, _, H = x_THP.shape
    angle = np.arange(T)[:, None] * theta ** -(np.arange(0, H, 2) / H)
    cos = np.cos(angle)[:, None]
    sin = np.sin(angle)[:, None]
    if is_neox:
        a = x_THP[..., : H // 2]
        b = x_THP[..., H // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a = x_THP[..., ::2]
    b = x_THP[..., 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x_THP.shape)


def attend(q_TNH, k_TNH, v_TNH, scale: float):
    """Causal attention of each head."""
    out = np.zeros((*q_TNH.shape[:2], v_TNH.shape[-1]))
    for t in range(len(q_TNH)):
        for n in range(q_TNH.shape[1]):
            score = k_TNH[: t + 1, n] @ q_TNH[t, n] * scale
            weight = np.exp(score - score.max())
            out[t, n] = weight @ v_TNH[: t + 1, n] / weight.sum()
    return out.reshape(len(out), -1)


def self_attention(w: Tensors, prefix: str, x, config: dict):
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    H = config.get("head_dim") or config["hidden_size"] // N
    eps = config["rms_norm_eps"]
    q, k, v = (
        (x @ w[f"{prefix}.{name}_proj.weight"].T + w.get(f"{prefix}.{name}_proj.bias", 0)).reshape(
            len(x), -1, H
        )
        for name in "qkv"
    )
    if f"{prefix}.q_norm.weight" in w:
        q = norm(q, w[f"{prefix}.q_norm.weight"], eps)
        k = norm(k, w[f"{prefix}.k_norm.weight"], eps)
    theta = config.get("rope_theta", 10000.0)
    q = rotate(q, theta)
    k = rotate(k, theta)
    out = attend(q, k.repeat(N // K, 1), v.repeat(N // K, 1), H**-0.5)
    return out @ w[f"{prefix}.o_proj.weight"].T + w.get(f"{prefix}.o_proj.bias", 0)


def mlp(w: Tensors, prefix: str, x):
    gate, up = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (silu(gate) * up) @ w[f"{prefix}.down_proj.weight"].T


def medusa(w: Tensors, c: int, depth: int, hidden, table):
    """Logits of Medusa head c, with tensors by vLLM's names."""
    for j in range(depth):
        prefix = f"blocks.{c}.layers.{j}"
        hidden = hidden + silu(hidden @ w[f"{prefix}.weight"].T + w.get(f"{prefix}.bias", 0))
    return hidden @ table.T


def eagle(w: Tensors, config: dict, embed, tokens, features):
    """The next feature, which is also the hidden state."""
    eps = config["rms_norm_eps"]
    x = np.concatenate([embed[tokens], features], axis=-1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    for i in range(config["num_hidden_layers"]):
        prefix = f"layers.{i}"
        y = x if i == 0 else norm(x, w[f"{prefix}.input_layernorm.weight"], eps)
        x = x + self_attention(w, f"{prefix}.self_attn", y, config)
        x = x + mlp(
            w, f"{prefix}.mlp", norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
        )
    return x


def eagle3(w: Tensors, config: dict, embed, tokens, features):
    """(next feature, hidden state)."""
    eps = config["rms_norm_eps"]
    prefix = "midlayer"
    normed = norm(features, w[f"{prefix}.hidden_norm.weight"], eps)
    attention_input = np.concatenate(
        [norm(embed[tokens], w[f"{prefix}.input_layernorm.weight"], eps), normed], axis=-1
    )
    x = normed if config.get("norm_before_residual") else features
    x = x + self_attention(w, f"{prefix}.self_attn", attention_input, config)
    x = x + mlp(w, f"{prefix}.mlp", norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps))
    return x, norm(x, w["norm.weight"], eps)


def latent_attention(w: Tensors, prefix: str, x, config: dict):
    """DeepSeek's latent attention, with the keys and values of every head expanded."""
    N, nope, rope = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    rank = config["kv_lora_rank"]
    V = config["v_head_dim"]
    T = len(x)
    low = norm(x @ w[f"{prefix}.q_a_proj.weight"].T, w[f"{prefix}.q_a_layernorm.weight"], 1e-6)
    q = (low @ w[f"{prefix}.q_b_proj.weight"].T).reshape(T, N, nope + rope)
    down = x @ w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    latent = norm(down[:, :rank], w[f"{prefix}.kv_a_layernorm.weight"], 1e-6)
    kv = (latent @ w[f"{prefix}.kv_b_proj.weight"].T).reshape(T, N, nope + V)
    theta = config["rope_theta"]
    q = np.concatenate([q[..., :nope], rotate(q[..., nope:], theta, False)], axis=-1)
    shared = rotate(down[:, None, rank:], theta, False).repeat(N, 1)
    k = np.concatenate([kv[..., :nope], shared], axis=-1)
    return attend(q, k, kv[..., nope:], (nope + rope) ** -0.5) @ w[f"{prefix}.o_proj.weight"].T


def experts(w: Tensors, prefix: str, x, config: dict):
    """DeepSeek-V3's experts: one group, sigmoid scores and shared experts."""
    out = mlp(w, f"{prefix}.shared_experts", x)
    for t, row in enumerate(x):
        score = 1 / (1 + np.exp(-w[f"{prefix}.gate.weight"] @ row))
        chosen = np.argsort(-(score + w[f"{prefix}.gate.e_score_correction_bias"]))[
            : config["num_experts_per_tok"]
        ]
        weight = score[chosen] / score[chosen].sum() * config["routed_scaling_factor"]
        for e, expert_weight in zip(chosen, weight, strict=True):
            out[t] += expert_weight * mlp(w, f"{prefix}.experts.{e}", row[None])[0]
    return out


def mtp(w: Tensors, config: dict, embed, tokens, features):
    """(next feature, hidden state); the feature is before the norm of the layer's head."""
    eps = config["rms_norm_eps"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    token = norm(embed[tokens], w[f"{prefix}.enorm.weight"], eps)
    feature = norm(features, w[f"{prefix}.hnorm.weight"], eps)
    x = np.concatenate([token, feature], axis=-1) @ w[f"{prefix}.eh_proj.weight"].T
    x = x + latent_attention(
        w, f"{prefix}.self_attn", norm(x, w[f"{prefix}.input_layernorm.weight"], eps), config
    )
    x = x + experts(
        w, f"{prefix}.mlp", norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps), config
    )
    return x, norm(x, w[f"{prefix}.shared_head.norm.weight"], eps)


def gated_attention(w: Tensors, prefix: str, x, config: dict):
    """Qwen3-Next's attention: partial RoPE and a gate on each head's output."""
    N, K, H = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps = config["rms_norm_eps"]
    rotary_dim = int(H * config["partial_rotary_factor"])
    q, gate = np.split((x @ w[f"{prefix}.q_proj.weight"].T).reshape(len(x), N, 2 * H), 2, axis=-1)
    k, v = ((x @ w[f"{prefix}.{name}_proj.weight"].T).reshape(len(x), K, H) for name in "kv")
    q, k = (norm(y, 1 + w[f"{prefix}.{name}_norm.weight"], eps) for name, y in (("q", q), ("k", k)))
    q, k = (
        np.concatenate(
            [rotate(y[..., :rotary_dim], config["rope_theta"]), y[..., rotary_dim:]], axis=-1
        )
        for y in (q, k)
    )
    out = attend(q, k.repeat(N // K, 1), v.repeat(N // K, 1), H**-0.5)
    return (out / (1 + np.exp(-gate.reshape(len(x), -1)))) @ w[f"{prefix}.o_proj.weight"].T


def gated_experts(w: Tensors, prefix: str, x, config: dict):
    """Qwen3-Next's experts: softmax scores and a gated shared expert."""
    out = mlp(w, f"{prefix}.shared_expert", x) / (
        1 + np.exp(-x @ w[f"{prefix}.shared_expert_gate.weight"].T)
    )
    for t, row in enumerate(x):
        score = np.exp(w[f"{prefix}.gate.weight"] @ row)
        chosen = np.argsort(-score)[: config["num_experts_per_tok"]]
        for e, expert_weight in zip(chosen, score[chosen] / score[chosen].sum(), strict=True):
            out[t] += expert_weight * mlp(w, f"{prefix}.experts.{e}", row[None])[0]
    return out


def qwen_mtp(w: Tensors, config: dict, embed, tokens, features):
    """The next feature, which is also the hidden state."""
    eps = config["rms_norm_eps"]
    prefix = "mtp.layers.0"
    token = norm(embed[tokens], 1 + w["mtp.pre_fc_norm_embedding.weight"], eps)
    feature = norm(features, 1 + w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = np.concatenate([token, feature], axis=-1) @ w["mtp.fc.weight"].T
    x = x + gated_attention(
        w, f"{prefix}.self_attn", norm(x, 1 + w[f"{prefix}.input_layernorm.weight"], eps), config
    )
    x = x + gated_experts(
        w, f"{prefix}.mlp", norm(x, 1 + w[f"{prefix}.post_attention_layernorm.weight"], eps), config
    )
    return norm(x, 1 + w["mtp.norm.weight"], eps)
