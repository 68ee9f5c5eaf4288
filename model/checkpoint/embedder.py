"""Read a sentence-transformers folder: modules, pooling, text length and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ..config import Dense, ModelError
from .folder import read_json, read_value

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
Pooling = Literal["last", "mean", "cls", "steps"]  # "steps" is for process reward models only
POOLINGS: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "cls_token": "cls",
}  # pooling_mode_* keys
POOLING_VALUES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}  # of pooling_mode, a newer key

ACTIVATIONS = {"Identity": None, "Tanh": "tanh"}  # of Dense modules
HEAD = ["Transformer", "Pooling"]
LENGTHS = tuple(  # files that may hold max_seq_length; the first that exists is used
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
RERANKER = ["Transformer", "LogitScore"]  # the modules of a generative reranker


@dataclass(frozen=True)
class Embedder:
    """How a text becomes an embedding, and the prompts that can precede it."""

    pooling: Pooling = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str | None = None  # the name of the prompt used if a request names none
    dense: tuple[tuple[str, Dense], ...] = ()  # (folder, module) of each Dense after the pooling
    is_reranker: bool = False  # it scores text pairs and makes no embeddings
    max_tokens: int | None = None  # longer texts are truncated; None: they are rejected


def read(folder: Path) -> Embedder | None:
    """Read the embedder of a folder; None if it is no sentence-transformers model."""
    modules, kinds = read_modules(folder)
    if not modules:
        return None
    prompts, default = read_prompts(folder)
    if kinds == RERANKER:
        return Embedder(prompts=MappingProxyType(prompts), default_prompt=default, is_reranker=True)
    dense_modules = [kind for kind in kinds[2:] if kind == "Dense"]
    if kinds not in ([*HEAD, *dense_modules], [*HEAD, *dense_modules, "Normalize"]):
        raise ModelError(
            f"{folder / MODULES} names the modules {', '.join(kinds)[:200]}; supported are "
            "Transformer, Pooling and, after them, Dense and Normalize"
        )
    pooling_file = config_path(folder, modules[1].get("path"), "1_Pooling")
    dense = tuple(
        read_dense(folder, modules[number].get("path"), number)
        for number in range(2, 2 + len(dense_modules))
    )
    length = read_max_tokens(folder, modules[0].get("path"))
    return Embedder(
        read_pooling(pooling_file),
        "Normalize" in kinds,
        MappingProxyType(prompts),
        default,
        dense=dense,
        max_tokens=length,
    )


def read_max_tokens(folder: Path, path: Any) -> int | None:
    """The number of tokens, with special ones, to which texts are truncated; None if not given."""
    module_folder = config_path(folder, path, "").parent
    file = next((module_folder / name for name in LENGTHS if (module_folder / name).exists()), None)
    length = None if file is None else read_json(file).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{file}: max_seq_length = {length!r:.80}; it must be 1 or more, or null")
    return length


def read_dense(folder: Path, path: Any, number: int) -> tuple[str, Dense]:
    """Read a Dense module: (its folder relative to the model's, its shape and activation)."""
    file = config_path(folder, path, f"{number}_Dense")
    hf = read_json(file)
    module_folder = file.parent.relative_to(folder).as_posix()
    into = hf.get("in_features")
    out = hf.get("out_features")
    bias = hf.get("bias", True)
    if not (
        type(into) is int and type(out) is int and min(into, out) > 0 and isinstance(bias, bool)
    ):
        raise ModelError(
            f"{file}: in_features and out_features must be numbers, and bias true or false"
        )
    activation = str(hf.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(
        "."
    )[2]
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{file}: activation_function = {activation!r:.80}; supported is "
            f"{' or '.join(ACTIVATIONS)}"
        )
    return module_folder, Dense(f"{module_folder}.linear", into, out, ACTIVATIONS[activation], bias)


def read_modules(folder: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The entries of modules.json and their class names; both empty if there is no such file."""
    if not (folder / MODULES).exists():
        return [], []
    modules = read_value(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise ModelError(f"{folder / MODULES} must hold a list of objects, one for each module")
    return modules, [str(module.get("type")).rpartition(".")[2] for module in modules]


def logit_score_config(folder: Path) -> Path | None:
    """The config.json of a generative reranker's LogitScore module; None for other models."""
    modules, kinds = read_modules(folder)
    return (
        config_path(folder, modules[1].get("path"), "1_LogitScore") if kinds == RERANKER else None
    )


def config_path(folder: Path, path: Any, default: str) -> Path:
    """The config.json of a module, which must be inside of the model's folder."""
    relative = Path(default if path is None else str(path))
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelError(
            f"{folder / MODULES} has the path {path!r:.80}; it must be inside of the folder"
        )
    return folder / relative / "config.json"


def read_pooling(file: Path) -> Pooling:
    """The pooling that a module's config.json selects; it must select one."""
    hf = read_json(file)
    if hf.get("include_prompt", True) is not True:
        raise ModelError(
            f"{file}: include_prompt = {hf['include_prompt']!r:.80} is not supported; "
            "supported is true"
        )
    chosen = [name for name, value in hf.items() if name.startswith("pooling_mode_") and value]
    pooling_by_name: dict[str, Pooling] = {
        f"pooling_mode_{name}": pooling for name, pooling in POOLINGS.items()
    }
    if "pooling_mode" in hf:
        chosen = [hf["pooling_mode"]]
        pooling_by_name = POOLING_VALUES
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in pooling_by_name:
        raise ModelError(
            f"{file} chooses {chosen!r:.200}; supported is one of {', '.join(pooling_by_name)}"
        )
    return pooling_by_name[chosen[0]]


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default one."""
    file = folder / PROMPTS
    hf = read_json(file) if file.exists() else {}
    prompts = hf.get("prompts") or {}
    default = hf.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(
        isinstance(text, str) for text in prompts.values()
    ):
        raise ModelError(f"{file}: prompts = {prompts!r:.80}; it must be an object of texts")
    if default is not None and default not in list(prompts):
        raise ModelError(
            f"{file}: default_prompt_name = {default!r:.80}; it must be null or one of "
            f"{sorted(prompts)}"
        )
    return dict(prompts), default
