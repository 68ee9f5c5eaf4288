"""What a sentence-transformers folder says of its vectors: modules.json, the pooling's config.json, length, prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import Dense, ModelError
from .folder import read_json, read_value

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}  # pooling_mode_...: as it is called here
NEWER = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # values of pooling_mode, as newer folders have it

ACTIVATIONS = {"Identity": None, "Tanh": "tanh"}  # of products behind the pooling
HEAD = ["Transformer", "Pooling"]
LENGTHS = tuple(  # files with max_seq_length: the first that is there holds, as in sentence-transformers
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
RANKS = ["Transformer", "LogitScore"]  # modules of a model that judges by the tokens that it would say


@dataclass(frozen=True)
class Embedder:
    """How a prompt becomes a vector, and the texts that come before it."""

    pooling: str = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str | None = None  # the name of the one that comes before texts of which none is said
    dense: tuple[tuple[str, Dense], ...] = ()  # products behind the pooling, each with its folder
    ranks: bool = False  # it makes no vectors, and judges pairs of texts
    max_tokens: int | None = None  # a longer text is truncated to so many tokens; None: it is refused


def read(folder: Path) -> Embedder | None:
    """The embedder of a folder; None where it holds no sentence-transformers model."""
    modules, kinds = modules_of(folder)
    if not modules:
        return None
    prompts, default = prompts_of(folder)
    if kinds == RANKS:
        return Embedder(prompts=MappingProxyType(prompts), default_prompt=default, ranks=True)
    between = [kind for kind in kinds[2:] if kind == "Dense"]
    if kinds not in ([*HEAD, *between], [*HEAD, *between, "Normalize"]):
        raise ModelError(
            f"{folder / MODULES} names the modules {', '.join(kinds)[:200]}; supported are Transformer, Pooling and, "
            "after them, Dense and Normalize"
        )
    where = inside(folder, modules[1].get("path"), "1_Pooling")
    dense = tuple(dense_of(folder, modules[number].get("path"), number) for number in range(2, 2 + len(between)))
    length = max_tokens_of(folder, modules[0].get("path"))
    return Embedder(
        pooling_of(where), "Normalize" in kinds, MappingProxyType(prompts), default, dense=dense, max_tokens=length
    )


def max_tokens_of(folder: Path, path: Any) -> int | None:
    """The number of tokens, special ones too, to which sentence-transformers truncates a text; None: none is named."""
    where = inside(folder, path, "").parent
    file = next((where / name for name in LENGTHS if (where / name).exists()), None)
    length = None if file is None else read_json(file).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{file}: max_seq_length = {length!r:.80}; it must be 1 or more, or null")
    return length


def dense_of(folder: Path, path: Any, number: int) -> tuple[str, Dense]:
    """(the folder of a product, what it is)."""
    file = inside(folder, path, f"{number}_Dense")
    hf, where = read_json(file), file.parent.relative_to(folder).as_posix()
    into, out, bias = hf.get("in_features"), hf.get("out_features"), hf.get("bias", True)
    if not (type(into) is int and type(out) is int and min(into, out) > 0 and isinstance(bias, bool)):
        raise ModelError(f"{file}: in_features and out_features must be numbers, and bias true or false")
    activation = str(hf.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelError(f"{file}: activation_function = {activation!r:.80}; supported is {' or '.join(ACTIVATIONS)}")
    return where, Dense(f"{where}.linear", into, out, ACTIVATIONS[activation], bias)


def modules_of(folder: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """(the modules that a folder names, their kinds); none where it is not of sentence-transformers."""
    if not (folder / MODULES).exists():
        return [], []
    modules = read_value(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise ModelError(f"{folder / MODULES} must hold a list of objects, one for each module")
    return modules, [str(module.get("type")).rpartition(".")[2] for module in modules]


def logit_score(folder: Path) -> Path | None:
    """The config.json that names the tokens by which a model ranks; None where it does not."""
    modules, kinds = modules_of(folder)
    return inside(folder, modules[1].get("path"), "1_LogitScore") if kinds == RANKS else None


def inside(folder: Path, path: Any, usual: str) -> Path:
    """The config.json of a module, which lies in the model's folder."""
    relative = Path(usual if path is None else str(path))
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelError(f"{folder / MODULES} has the path {path!r:.80}; it must be inside of the folder")
    return folder / relative / "config.json"


def pooling_of(file: Path) -> str:
    """The one way of pooling that its config names."""
    hf = read_json(file)
    if hf.get("include_prompt", True) is not True:
        raise ModelError(f"{file}: include_prompt = {hf['include_prompt']!r:.80} is not supported; supported is true")
    chosen = [name for name, value in hf.items() if name.startswith("pooling_mode_") and value]
    known = {f"pooling_mode_{name}": pooling for name, pooling in POOLINGS.items()}
    if "pooling_mode" in hf:
        chosen, known = [hf["pooling_mode"]], NEWER
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in known:
        raise ModelError(f"{file} chooses {chosen!r:.200}; supported is one of {', '.join(known)}")
    return known[chosen[0]]


def prompts_of(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by their names, and the name of the one that is taken where none is said."""
    file = folder / PROMPTS
    hf = read_json(file) if file.exists() else {}
    prompts, default = hf.get("prompts") or {}, hf.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{file}: prompts = {prompts!r:.80}; it must be an object of texts")
    if default is not None and default not in list(prompts):
        raise ModelError(f"{file}: default_prompt_name = {default!r:.80}; it must be null or one of {sorted(prompts)}")
    return dict(prompts), default
