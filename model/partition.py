"""Model parallelism: checks that a model can be sharded over a mesh, pipeline stages, and the local
config of each device.
"""

import math
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, Mesh

from ..ops import quant
from ..ops.quant.compressed import Rounded
from ..sharding.mesh import AXES, shardings
from .config import Layer, ModelConfig, ModelError, StatefulMixer
from .weights import ModelWeights, abstract, dense_specs

SPLITS = {"tensor": "the heads, key-value heads and columns", "expert": "the experts"}


@dataclass(frozen=True)
class Stage:
    """A pipeline stage."""

    layers: range
    is_first: bool  # has the embedding
    is_last: bool  # has the head


def whole_model(config: ModelConfig) -> Stage:
    """The only stage of a model without pipeline parallelism."""
    return stages(config, 1)[0]


def stages(config: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Divide the layers into `count` pipeline stages, as evenly as possible."""
    boundaries = [len(config.layers) * number // count for number in range(count + 1)]
    return tuple(
        Stage(range(first, last), first == 0, last == boundaries[-1])
        for first, last in zip(boundaries, boundaries[1:], strict=False)
    )


def can_stage(config: ModelConfig, count: int) -> bool:
    """Whether `count` pipeline stages are possible: each has a layer, and no layer reads the KV
    cache or an indexer's selection from a layer of another stage.
    """
    indexers = [getattr(layer.attention, "indexer", None) for layer in config.layers]
    return all(
        stage.layers and all(config.kv_owner[index] in stage.layers for index in stage.layers)
        for stage in stages(config, count)
    ) and not any(
        indexer and not indexer.heads
        for indexer in (indexers[stage.layers.start] for stage in stages(config, count))
    )


def no_context_parallelism_reason(config: ModelConfig) -> str | None:
    """The reason that context parallelism is unsupported, or None if it is supported."""
    if config.encodes:
        return "has no KV cache that could be split"
    if config.state_layers:
        return "has recurrent layers, whose tokens cannot be split"
    if any(getattr(layer.attention, "indexer", None) for layer in config.layers):
        return "selects the positions that each token reads among all of them"
    return None


def stage_weights(weights: ModelWeights, stage: Stage) -> ModelWeights:
    """The weights of one stage."""
    stage_tree = weights.replace(layers=weights.layers[stage.layers.start : stage.layers.stop])
    if not stage.is_first:
        stage_tree = stage_tree.replace(
            embed_VD=None, embed_norm_D=None, position_embed_PD=None, type_embed_ID=None
        )
        stage_tree = stage_tree.replace(
            per_layer_embed_VLA=None, per_layer_proj_DLA=None, per_layer_norm_A=None
        )
    return (
        stage_tree
        if stage.is_last
        else stage_tree.replace(
            final_norm_D=None,
            head_VD=None,
            head_bias_V=None,
            classes_DC=None,
            classes_bias_C=None,
            classes_up_DF=None,
            classes_up_bias_F=None,
            head=(),
        )
    )


def check_groups(config: ModelConfig, name: str, tensor: int) -> None:
    """Raise ModelError if tensor parallelism would split a quantisation group, whose inputs share a
    scale.
    """
    for node in jax.tree.leaves(
        abstract(replace(config, quant=name)), is_leaf=lambda x: isinstance(x, Rounded)
    ):
        group_size = node.inputs_per_shard() if isinstance(node, Rounded) else 1
        if group_size == 1:
            continue
        inputs = math.prod(node.into)
        if inputs % (group_size * tensor):
            raise ModelError(
                f"tensor_parallel_size is {tensor}, and a matrix of {inputs} inputs is kept as "
                f"{name!r}, whose groups of {group_size} it would cut; it can be a number that "
                f"divides {inputs} / {group_size}, or 1"
            )


def check(
    config: ModelConfig, tensor: int, expert: int, pipe: int, data: int = 1, context: int = 1
) -> None:
    """Raise ModelError if the model cannot be sharded over a mesh of these sizes; the message lists
    the possible sizes.
    """
    if not can_stage(config, pipe):
        valid_sizes = [str(n) for n in range(1, 2 * pipe + 1) if can_stage(config, n)]
        raise ModelError(
            f"pipeline_parallel_size is {pipe}, and this model's {len(config.layers)} layers, each "
            "with the one whose cache or picks it reads, do not fall into so many stages; it can "
            f"be {', '.join(valid_sizes)}"
        )
    expert_formats = {
        layer.moe.quant
        for layer in config.layers
        if layer.moe is not None and layer.moe.quant is not None
    }
    if tensor > 1 and (unsplittable := [name for name in expert_formats if not quant.splits(name)]):
        raise ModelError(
            f"experts in {unsplittable[0]} cannot be split by columns: use expert_parallel_size"
        )
    groups = () if config.stored is None else config.stored.groups
    weight_formats = {config.quant, *(group.quant for group in groups)}
    for name in sorted(filter(None, weight_formats)) if tensor > 1 else ():
        if not quant.splits(name):
            alternatives = [
                name for name in quant.FORMATS if quant.splits(name) and quant.is_choice(name)
            ]
            raise ModelError(
                f"quantization is {name!r}, whose weights cannot be split by columns: use "
                f"{' or '.join(alternatives)} with tensor_parallel_size {tensor}, or 1"
            )
        check_groups(config, name, tensor)
    for name, size in (("tensor", tensor), ("expert", expert)):
        if not splits(config, **{name: size}):
            valid_sizes = [str(n) for n in range(1, 2 * size + 1) if splits(config, **{name: n})]
            raise ModelError(
                f"{name}_parallel_size is {size}, which does not divide {SPLITS[name]} of this "
                f"model; it can be {', '.join(valid_sizes)}"
            )
    if context > 1 and (reason := no_context_parallelism_reason(config)):
        raise ModelError(
            f"context_parallel_size is {context}, and this model {reason}: it can only be 1; "
            "use tensor_parallel_size or pipeline_parallel_size"
        )
    sharing = {"expert": expert}
    for name, size in (("context", context), ("data", data)):
        if not splits(config, **sharing, **{name: size}):
            valid_sizes = [
                str(n) for n in range(1, 2 * size + 1) if splits(config, **sharing, **{name: n})
            ]
            alternatives = " and ".join(f"{axis}_parallel_size {n}" for axis, n in sharing.items())
            raise ModelError(
                f"{name}_parallel_size is {size}, and with {alternatives} its "
                f"{size * math.prod(sharing.values())} devices do not divide the experts, which "
                f"they share; it can be {', '.join(valid_sizes)}"
            )
        sharing[name] = size


def splits(config: ModelConfig, **sizes: int) -> bool:
    """Whether every array can be sharded over mesh axes of these sizes."""
    mixers = [layer.attention for layer in config.layers]
    if sizes.get("context", 1) > 1 and no_context_parallelism_reason(config):
        return False
    if not all(a.divides(sizes.get("tensor", 1)) for a in mixers if isinstance(a, StatefulMixer)):
        return False
    if sizes.get("expert", 1) > 1 and all(layer.moe is None for layer in config.layers):
        return False
    try:
        shardings(
            dense_specs(config), AbstractMesh(tuple(sizes.get(name, 1) for name in AXES), AXES)
        )
    except ValueError:
        return False
    return True


def local_config(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The config of one device's computation: its local heads and columns, and all experts, over
    which every device routes.
    """
    return split_config(config, 1 if mesh is None else mesh.shape["tensor"])


def split_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """The config of one device's computation with `tensor`-way tensor parallelism."""
    if tensor == 1:
        return config

    def local(layer: Layer) -> Layer:
        mlp, moe = (
            block and replace(block, dim=block.dim // tensor) for block in (layer.mlp, layer.moe)
        )
        return replace(layer, attention=layer.attention.split(tensor), mlp=mlp, moe=moe)

    return replace(config, layers=tuple(local(layer) for layer in config.layers))
