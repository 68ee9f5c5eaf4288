"""The tower of Gemma 4: positions by row and column, heads with norms, the mean of each group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops.linear.clipped import Clipped
from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Rope
from ..families.common import Source, SourceTensor, linear, scale, tensor, vector
from ..families.config_keys import Keys
from ..mixers.attention import AttentionWeights
from ..weights import LayerWeights, MlpWeights
from .config import Merger, Tower
from .weights import MergerWeights, TowerWeights

PREFIXES = ("model.vision_tower.", "vision_tower.")
THETA = 100.0
BOUNDS = (("input_min", "input_max"), ("output_min", "output_max"))


def config(vision_config: dict, hf: dict) -> Tower:
    keys = Keys(vision_config, "vision_config")
    keys.refuse("attention_bias", False)
    keys.ignore(
        "attention_dropout", "initializer_range", "max_position_embeddings", "global_head_dim",
        "default_output_length",
    )  # fmt: skip
    D = keys.count("hidden_size", 768)
    N = keys.count("num_attention_heads", 12)
    K = keys.count("num_key_value_heads", 12)
    H = keys.count("head_dim", 64)
    if H % 4:
        raise ModelError(
            f"vision_config: head_dim = {H}; half of a head's rotary pairs turn by the column and "
            "half by the row, so it must be a multiple of 4"
        )
    parameters = Keys(keys("rope_parameters", None) or {}, "vision_config.rope_parameters")
    if (kind := parameters("rope_type", "axial")) not in ("axial", "default"):
        raise ModelError(
            f"vision_config: rope_parameters.rope_type = {kind!r} is not supported; supported is "
            "'axial'"
        )
    theta = parameters.positive("rope_theta", THETA)
    parameters.done()
    pairs = H // 4
    frequencies = tuple(theta ** (-n / pairs) for n in range(pairs))
    rope = Rope(frequencies * 2, axes=(1,) * pairs + (0,) * pairs)
    attention = Attention(
        heads=N, kv_heads=K, head_dim=H, scale=1.0, rope=rope, qk_norm="head", v_norm=True,
        both_ways=True,
    )  # fmt: skip
    act = keys("hidden_activation", "gelu_pytorch_tanh")
    activation = Keys({"hidden_activation": act}).activation("hidden_activation")
    mlp = Mlp(keys.count("intermediate_size", 3072), activation)
    norm_eps = keys.positive("rms_norm_eps", 1e-6)
    tower = Tower(
        model=ModelConfig(
            family="gemma4_tower",
            vocab_size=1,
            dim=D,
            layers=(Layer(attention, mlp, post_norm=True),) * keys.count("num_hidden_layers", 16),
            max_len=1 << 16,
            norm_eps=norm_eps,
            dtype=keys.dtype(),
        ),
        patch=keys.count("patch_size", 16),
        merge=keys.count("pooling_kernel_size", 3),
        positions_per_axis=keys.count("position_embedding_size", 10 * 1024),
        centres_pixels=True,
        patch_bias=False,
        clips=keys("use_clipped_linears", False),
        merger=Merger(
            dim=0,
            out=Keys(hf["text_config"]).count("hidden_size", 2304),
            norm_eps=norm_eps,
            scaled_norm=False,
            pools=True,
            pool_scale=D**0.5,
            standardizes=keys("standardize", False),
            joins_first=True,
            bias=False,
        ),
    )
    keys.done()
    return tower


def rotary_order(H: int) -> np.ndarray:
    """A head's elements, with the first halves of all rotary pairs before the second ones: the
    checkpoint has those of the columns' pairs before those of the rows'.
    """
    return np.arange(H).reshape(2, 2, H // 4).swapaxes(0, 1).reshape(-1)


def sources(tower: Tower, prefix: str = PREFIXES[0]) -> TowerWeights:
    """The checkpoint's tensors of each leaf of the weight tree."""
    D = tower.model.dim
    embedder = f"{prefix}patch_embedder"
    standardizes = tower.merger.standardizes
    projection = f"{prefix.removesuffix('vision_tower.')}embed_vision.embedding_projection.weight"
    return TowerWeights(
        patch_VD=tensor(
            f"{embedder}.input_proj.weight",
            (D, tower.patch_values),
            linear((D,), (tower.patch_values,)),
        ),
        patch_bias_D=None,
        position_embed_PD=tensor(
            f"{embedder}.position_embedding_table",
            (2, tower.positions_per_axis, D),
            lambda tables: tables[::-1].reshape(-1, D),  # columns come first in checkpoints
        ),
        layers=tuple(layer_sources(tower, i, prefix) for i in range(len(tower.model.layers))),
        merger=MergerWeights(
            norm=None,
            bias_D=vector(f"{prefix}std_bias", D) if standardizes else None,
            scale_D=vector(f"{prefix}std_scale", D) if standardizes else None,
            down_FD=tensor(projection, (tower.merger.out, D), linear((tower.merger.out,), (D,))),
        ),
    )


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer, which may be clipped."""

    name: str
    shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray]
    width: int = 1  # along the axis on which matrices are joined

    def tensor(self, at: Any = ()) -> SourceTensor:
        return SourceTensor(f"{self.name}.linear.weight", self.shape, self.transform, at)


def joined(*matrices: Matrix, clips: bool) -> Any:
    """The sources of matrices of the same inputs."""
    if clips:
        bounds = [
            SourceTensor(
                f"{matrix.name}.{bound}",
                (),
                lambda x: x.reshape(1),
                np.s_[index, side, end : end + 1],
            )
            for index, matrix in enumerate(matrices)
            for side, names in enumerate(BOUNDS)
            for end, bound in enumerate(names)
        ]
        sources = tuple(Source((matrix.tensor(),)) for matrix in matrices)
        return Clipped(sources, Source(tuple(bounds)))
    if len(matrices) == 1:
        return Source((matrices[0].tensor(),))
    stops = np.cumsum([matrix.width for matrix in matrices]).tolist()
    return Source(
        tuple(
            matrix.tensor(np.s_[:, stop - matrix.width : stop])
            for matrix, stop in zip(matrices, stops, strict=True)
        )
    )


def layer_sources(tower: Tower, index: int, prefix: str) -> LayerWeights:
    layer = tower.model.layers[index]
    a = layer.attention
    assert isinstance(a, Attention) and layer.mlp is not None
    D, F = tower.model.dim, layer.mlp.dim
    N, K, H = a.heads, a.kv_heads, a.head_dim
    name = f"{prefix}encoder.layers.{index}"
    order = rotary_order(H)
    clips = tower.clips

    def heads(letter: str, count: int) -> Matrix:
        split = linear((count, H), (D,))
        reordered = split if letter == "v" else lambda x: split(x)[..., order]
        return Matrix(f"{name}.self_attn.{letter}_proj", (count * H, D), reordered, count)

    def head_norm(letter: str) -> Source:
        return tensor(
            f"{name}.self_attn.{letter}_norm.weight", (H,), lambda x: x.astype(np.float32)[order]
        )

    gate, up = (
        Matrix(f"{name}.mlp.{letter}_proj", (F, D), linear((1, F), (D,)))
        for letter in ("gate", "up")
    )
    down = Matrix(f"{name}.mlp.down_proj", (D, F), linear((D,), (F,)))
    out = Matrix(f"{name}.self_attn.o_proj", (D, N * H), linear((D,), (N, H)))
    return LayerWeights(
        attention=AttentionWeights(
            qkv_DGH=joined(heads("q", N), heads("k", K), heads("v", K), clips=clips),
            out_NHD=joined(out, clips=clips),
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
        ),
        mlp=MlpWeights(
            up_DGF=joined(gate, up, clips=clips),
            down_FD=joined(down, clips=clips),
        ),
        pre_attention_norm_D=scale(f"{name}.input_layernorm.weight", D),
        post_attention_norm_D=scale(f"{name}.post_attention_layernorm.weight", D),
        pre_mlp_norm_D=scale(f"{name}.pre_feedforward_layernorm.weight", D),
        post_mlp_norm_D=scale(f"{name}.post_feedforward_layernorm.weight", D),
    )
