"""LoRA and DoRA adapters, read from PEFT folders."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import local_shards
from ...sharding.mesh import Mesh, sharding
from ...sharding.spec import ArraySpec
from ..config import ModelConfig, ModelError
from .adapter_targets import AdaptedMatrix, AdapterTarget, all_targets
from .folder import ADAPTER, read_json
from .loader import canonical_name, family_module, find_sources, with_model_prefix
from .safetensors import Tensor, read_header

FILE = "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256)  # ranks of adapter stacks
MAX_RANK = 1 << 12  # the largest rank accepted in adapter_config.json
STRIP = 256  # rows of a weight whose norms are computed together
NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:(?P<half>A|B)(?:\.default)?\.weight|"
    r"(?P<lengths>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
# The base model's head, saved beside its adapter.
HEAD = re.compile(r"(?:base_model\.model\.)?((?:.+\.)?lm_head)\.base_layer\.weight")
REFUSED = {  # keys of adapter_config.json that are not supported, and why
    "modules_to_save": "it brings whole weights of its own; merge it into the model",
    "layer_replication": "it repeats layers",
    "trainable_token_indices": "it brings rows of the embedding; merge it into the model",
    "target_parameters": (
        "it adapts experts all in one tensor, not each one's projections; merge it into the model"
    ),
    "lora_bias": "its matrices have biases; merge it into the model",
    "fan_in_fan_out": "its matrices are transposed",
    "use_qalora": "it pools its inputs",
    "alora_invocation_tokens": "it begins within a prompt",
}
REBASED = ("pissa", "olora", "corda")  # initialisations that change the base model's weights


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's matrices for each target weight, on the host."""

    key: str  # digest of its files; separates cached prefixes of different adapters
    has_head: bool  # whether it adapts the head
    targets: tuple[AdapterTarget, ...]
    matrices: list[tuple[np.ndarray, ...]]  # (down, up, dora_gain) for each target, see `Adapted`


def stack_rank(rank: int) -> int:
    """The smallest stack rank that holds adapters of this rank."""
    return next(bucket for bucket in RANKS if bucket >= rank)


def shard_adapter(adapter: Adapter, mesh: Mesh) -> list[tuple[Any, ...]]:
    """Place an adapter's matrices on the mesh, sharded like the stacks."""

    def place(matrix: np.ndarray, spec: ArraySpec) -> jax.Array:
        return local_shards.shard(matrix, spec, mesh, sharding(spec, mesh))

    pairs = zip(adapter.targets, adapter.matrices, strict=True)
    specs = [target.specs(up.dtype, up.shape[len(target.stack)]) for target, (_, up, _) in pairs]
    return jax.tree.map(place, adapter.matrices, specs)


def read_adapter(
    folder: Path,
    config: ModelConfig,
    targets: tuple[AdapterTarget, ...],
    max_rank: int,
    model: Path | None = None,
) -> Adapter:
    """Read a PEFT folder, padded to the stack rank for `max_rank`; reject unsupported contents.

    `model` is the folder of the base weights, whose row norms a DoRA adapter needs.
    """
    file = folder / FILE
    about_bytes, content = read_files(folder)
    about = parse_config(folder / ADAPTER, about_bytes)
    places = {
        matrix.source.name: (index, matrix)
        for index, target in enumerate(targets)
        for matrix in target.matrices
    }
    rank = stack_rank(max_rank)
    dtype = np.dtype(jnp.dtype(config.dtype))
    family = family_module(config)
    specs = [target.specs(dtype, rank) for target in targets]
    matrices: list[Any] = [None] * len(targets)
    # The same for all elements of a stack.
    permutations: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    weights = find_weights(model, config) if about.dora and model is not None else {}
    for module, tensors in collect_tensors(file, content, about).items():
        name = canonical_name(family, f"{module}.weight")
        place = places.get(name) or places.get(with_model_prefix(name))
        if place is None:
            raise ModelError(
                f"{file} adapts {module!r}, which cannot be adapted: "
                f"{unsupported_reason(config, name)}"
            )
        index, matrix = place
        module_rank = check_shapes(file, tensors, matrix, about, module, max_rank)
        target = targets[index]
        if matrices[index] is None:
            matrices[index] = zeros(specs[index])
        if (index, matrix.number) not in permutations:
            permutations[index, matrix.number] = matrix.permutations(target.into)
        in_I, out_O = permutations[index, matrix.number]
        down_RI, up_OR, *lengths = (tensor.read().astype(np.float32) for tensor in tensors)
        up_OR *= np.float32(about.scale(module, module_rank))
        longer_O = np.zeros(len(up_OR), np.float32)
        if lengths:
            if (weight := weights.get(matrix.source.name)) is None:
                raise ModelError(
                    f"{file}: use_dora is set, and the model's files hold no "
                    f"{matrix.source.name!r} by itself, whose rows it rescales; merge it into the "
                    "model's weights"
                )
            with np.errstate(all="ignore"):  # non-finite results are rejected below
                times_O = lengths[0] / row_norms(weight.read(), down_RI, up_OR)
                up_OR = up_OR * times_O[:, None]
                longer_O = times_O - 1
        if not (np.isfinite(down_RI).all() and np.isfinite(up_OR).all()):
            raise ModelError(f"{file}: the matrices of {module!r} have values that are not finite")
        down, up, longer = (array[matrix.stack_index] for array in matrices[index])
        down.reshape(target.inputs, -1)[:, matrix.number * rank :][:, :module_rank] = down_RI.T[
            in_I
        ]
        up.reshape(rank, -1)[:module_rank, matrix.first : matrix.last] = up_OR.T[:, out_O]
        longer.reshape(-1)[matrix.first : matrix.last] = longer_O[out_O]
    zeros_by_spec = {spec: zeros(spec) for spec in {*specs}}
    all_matrices = [
        zeros_by_spec[spec] if value is None else value
        for spec, value in zip(specs, matrices, strict=True)
    ]
    has_head = any(
        target.is_head and value is not None
        for target, value in zip(targets, matrices, strict=True)
    )
    return Adapter(digest_files(about_bytes, content), has_head, targets, all_matrices)


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """Read both files of an adapter once.

    The matrices and the digest come from the same bytes, even if the files are replaced meanwhile.
    """
    for name, remedy in (
        (ADAPTER, ": it must be a folder that PEFT has written"),
        (FILE, "; adapters are read from safetensors alone"),
    ):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} holds no {name}{remedy}")
    try:
        return (folder / ADAPTER).read_bytes(), (folder / FILE).read_bytes()
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from None


def zeros(specs: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(spec.shape, spec.dtype) for spec in specs)


def find_weights(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The tensors of a model folder, by the names that adapters use for them."""
    tensors, sources = find_sources(folder, config)
    if config.tied and config.writes:
        tensors["lm_head.weight"] = tensors[sources.embed_VD[0].name]
    return tensors


def row_norms(weight_OI: np.ndarray, down_RI: np.ndarray, up_OR: np.ndarray) -> np.ndarray:
    """The norm of each row of a weight with an adapter added."""
    norms = np.empty(len(weight_OI), np.float32)
    for at in range(0, len(norms), STRIP):  # a whole matrix in float32 would leave every cache
        rows = slice(at, at + STRIP)
        norms[rows] = np.linalg.norm(
            weight_OI[rows].astype(np.float32) + up_OR[rows] @ down_RI, axis=1
        )
    return norms


def unsupported_reason(config: ModelConfig, name: str) -> str:
    """Explain why an adapter of a tensor cannot be served, and the remedy."""
    for target in jax.tree.leaves(all_targets(config)):
        if {matrix.source.name for matrix in target.matrices} & {name, with_model_prefix(name)}:
            return f"name it in lora_target_modules, as {' or '.join(sorted(target.modules))}"
    return (
        f"of {config.family} models neither the embedding nor fused experts do; merge it into "
        "the model's weights"
    )


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales from adapter_config.json."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # rank_pattern: by module name or pattern
    alphas: Mapping[str, float]  # alpha_pattern
    by_root: bool  # use_rslora: divide by the root of the rank
    dora: bool

    def module_rank(self, module: str) -> int:
        return int(match_module(self.ranks, module, self.rank))

    def scale(self, module: str, rank: int) -> float:
        alpha = match_module(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


def match_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value for the first pattern that matches the end of a module's name."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def parse_config(path: Path, content: bytes) -> AdapterConfig:
    """Parse adapter_config.json; unsupported adapters raise an error."""
    settings = read_json(path, content)
    if (kind := settings.get("peft_type")) != "LORA":
        raise ModelError(f"{path}: peft_type = {kind!r:.80}; it must be 'LORA'")
    for key, reason in REFUSED.items():
        if settings.get(key):
            raise ModelError(f"{path}: {key} = {settings[key]!r:.80} is not served: {reason}")
    if (bias := settings.get("bias", "none")) != "none":
        raise ModelError(
            f"{path}: bias = {bias!r:.80}; it must be 'none': biases are the model's own"
        )
    if str(initialisation := settings.get("init_lora_weights")).lower().startswith(REBASED):
        raise ModelError(
            f"{path}: init_lora_weights = {initialisation!r:.80} changes the model's weights too; "
            "save it with PEFT's path_initial_model_for_weight_conversion"
        )
    ranks, alphas = (
        checked_pattern(path, settings.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")
    )
    rank = checked_rank(path, "r", settings.get("r"))
    alpha = checked_number(path, "lora_alpha", settings.get("lora_alpha"))
    for key, value in ranks.items():
        checked_rank(path, f"rank_pattern[{key}]", value)
    for key, value in alphas.items():
        checked_number(path, f"alpha_pattern[{key}]", value)
    for key in ("use_rslora", "use_dora"):
        if not isinstance(settings.get(key) or False, bool):
            raise ModelError(f"{path}: {key} = {settings[key]!r:.80}; it must be true or false")
    return AdapterConfig(
        rank, alpha, ranks, alphas, bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
    )


def checked_rank(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelError(
            f"{path}: {name} = {value!r:.80}; it must be a whole number from 1 to {MAX_RANK}"
        )
    return value


def checked_number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{path}: {name} = {value!r:.80}; it must be a number")
    return value


def checked_pattern(path: Path, patterns: Any) -> dict[str, Any]:
    """Check a table of module patterns, which may be regular expressions without repetition."""
    if not isinstance(patterns, dict):
        raise ModelError(
            f"{path}: a pattern is {patterns!r:.80}; it must map names of modules to numbers"
        )
    for name in patterns:
        if len(name) > 256 or not re.fullmatch(r"\^?[\w.\\|]+\$?", name):
            remedy = "it must be the name of a module, or its end"
            raise ModelError(f"{path}: the pattern {name!r:.80} is not read; {remedy}")
    return patterns


def collect_tensors(
    file: Path, content: bytes, about: AdapterConfig
) -> dict[str, tuple[Tensor, ...]]:
    """(down, up) and DoRA's magnitudes for each module; other tensors are an error."""
    names = ("A", "B", "magnitude_vector")[: 3 if about.dora else 2]
    modules: dict[str, dict[str, Tensor]] = {}
    other_names: list[str] = []
    for name, tensor in read_header(file, content).items():
        if (match := NAME.fullmatch(name)) and (kind := match["half"] or match["lengths"]) in names:
            modules.setdefault(match[1], {})[kind] = tensor
        else:
            other_names.append(name)
    for name in other_names:
        if not (match := HEAD.fullmatch(name)) or match[1] not in modules:
            raise ModelError(
                f"{file} holds the tensor {name!r}, which is no "
                f"{' or '.join(f'lora_{suffix}' for suffix in names)} of a linear layer; merge the "
                "adapter into the model's weights"
            )
    for module, tensors in modules.items():
        if lost := [name for name in names if name not in tensors]:
            raise ModelError(f"{file} lacks lora_{lost[0]} of {module!r}")
    if not modules:
        raise ModelError(f"{file} holds no tensors")
    return {module: tuple(tensors[name] for name in names) for module, tensors in modules.items()}


def check_shapes(
    file: Path,
    tensors: tuple[Tensor, ...],
    matrix: AdaptedMatrix,
    about: AdapterConfig,
    module: str,
    max_rank: int,
) -> int:
    """Check a module's matrices against weight, configuration and max_rank; return their rank."""
    (down, up, *lengths) = tensors
    outputs, inputs = matrix.shape
    rank = about.module_rank(module)
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ModelError(
            f"{file}: lora_A and lora_B of {module!r} have shapes {list(down.shape)} and "
            f"{list(up.shape)}; the model and {ADAPTER} want {[rank, inputs]} and {[outputs, rank]}"
        )
    if lengths and lengths[0].shape != (outputs,):
        raise ModelError(
            f"{file}: lora_magnitude_vector of {module!r} has shape {list(lengths[0].shape)}; the "
            f"model wants {[outputs]}"
        )
    if rank > max_rank:
        raise ModelError(f"{file}: {module!r} has rank {rank}; max_lora_rank is {max_rank}")
    return rank


def digest_files(*contents: bytes) -> str:
    """A digest of the contents of an adapter's files."""
    hasher = hashlib.blake2b(digest_size=16)
    for content in contents:
        hasher.update(content)
    return hasher.hexdigest()
