"""Read and check a model folder's config.json, and diagnose folders that cannot be served."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import ModelError
from ..errors import refuse_pointer

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
OTHER_SUFFIXES = ("bin", "pt", "pth", "pkl")
HEADS = {  # endings of unsupported architectures, and what such models do
    "RewardModel": "scores texts",
    "ForTokenClassification": "labels tokens",
    "ForQuestionAnswering": "finds answers in a text",
    "ForMultipleChoice": "chooses among texts",
    "ForMaskedLM": "fills gaps",
    "Model": "makes hidden states",
}
GENERATES = ("LMHeadModel",)  # architectures that end in "Model" and generate text
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")  # model types that make embeddings
REWARDS = "Qwen2ForRewardModel"
STEP_REWARDS = "Qwen2ForProcessRewardModel"


def read_config_json(
    folder: Path, overrides: Mapping[str, Any] | None = None, embeds: bool = False
) -> dict[str, Any]:
    """Read config.json with `overrides` applied; reject architectures without a supported head.

    An architecture without a head is accepted if the model makes embeddings (`embeds`).
    """
    check_folder(folder)
    hf = merge_overrides(read_json(folder / CONFIG), overrides or {})
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else ():
        ending = next((ending for ending in HEADS if str(name).endswith(ending)), None)
        if name in (REWARDS, STEP_REWARDS) or (embeds and ending == "Model"):
            continue
        if is_encoder(hf) and ending in ("Model", "ForMaskedLM"):
            continue
        if ending and not str(name).endswith(GENERATES):
            remedy = json.dumps({"architectures": [f"{str(name).removesuffix(ending)}ForCausalLM"]})
            raise ModelError(
                f"{folder / CONFIG}: architectures = {names!r:.200}: this model {HEADS[ending]} "
                "and has no head that generates text; such models are not read yet. If the "
                f"checkpoint does have one: --hf-overrides '{remedy}'"
            )
    return hf


def is_encoder(hf: Mapping[str, Any]) -> bool:
    """Whether attention is bidirectional: the model makes embeddings and cannot generate."""
    return hf.get("model_type") in ENCODERS or hf.get("use_bidirectional_attention") is True


def architecture(hf: Mapping[str, Any]) -> str:
    """The first name in `architectures`; empty if there is none."""
    names = hf.get("architectures")
    return str(next(iter(names), "")) if isinstance(names, list) else ""


def merge_overrides(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`hf` with overrides applied; objects are merged key by key."""
    result = dict(hf)
    for name, value in overrides.items():
        current = result.get(name)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            value = merge_overrides(current, value)
        result[name] = value
    return result


def check_folder(folder: Path) -> None:
    """Reject a folder that holds no readable model, with a diagnosis and a remedy."""
    weights = [path.name for path in folder.glob("*.safetensors")]
    if (folder / ADAPTER).exists() and not [
        name for name in weights if not name.startswith("adapter_model")
    ]:
        about = read_json(folder / ADAPTER)
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}: {about.get('peft_type')!r:.20}) of "
            f"{about.get('base_model_name_or_path')!r:.200}: serve that model with --enable-lora "
            "and --lora-modules NAME=FOLDER, or merge it (peft: merge_and_unload, then "
            "save_pretrained) and give the folder of the result"
        )
    if (folder / CONFIG).exists() or not folder.is_dir():
        return
    refuse_other_weights(folder, [path.name for path in folder.iterdir()])
    if not any(folder.iterdir()):
        raise ModelError(
            f"{folder} is empty: {CONFIG} does not exist; was the model downloaded to another "
            "place?"
        )


def refuse_other_weights(place: object, names: Iterable[str]) -> None:
    """Reject weights in other formats, in a place without *.safetensors, with a remedy."""
    for ending in ("gguf", *OTHER_SUFFIXES):
        if not (matches := sorted(name for name in names if name.endswith(f".{ending}"))):
            continue
        if ending == "gguf":
            raise ModelError(
                f"{place} holds GGUF files: name one, by its path, or on the Hub by what its name "
                f"ends in: owner/name:{quant_suffix(matches[0])}"
            )
        raise ModelError(
            f"{place} holds {matches[0]} but no *.safetensors; weights are read from safetensors "
            "alone: the older formats can run code. transformers' from_pretrained and then "
            "save_pretrained writes them anew"
        )


def quant_suffix(name: str) -> str:
    """The end of a GGUF file's name, which by convention is its quantisation."""
    return re.split(r"[-.]", re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name.rpartition("/")[2]))[-1]


def read_json(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """Parse the object in a JSON file, or in `data` if the file has been read."""
    value = read_value(path, data)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def read_value(path: Path, data: bytes | None = None) -> Any:
    """Parse a JSON file, or `data` if the file has been read."""
    try:
        data = path.read_bytes() if data is None else data
        refuse_pointer(path, data)
        return json.loads(data, parse_constant=parse_constant)
    except FileNotFoundError:
        raise ModelError(
            f"{path} does not exist; a model folder holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None


def parse_constant(name: str):
    """Parse Infinity as transformers 5 represents it, which no key accepts; reject NaN."""
    if name == "Infinity":
        return {"__float__": name}
    raise ValueError(f"{name} is no JSON number")
