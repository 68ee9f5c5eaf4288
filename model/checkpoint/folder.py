"""A model folder before it is read: its config.json, and what the folder is where it is none that can be served."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import ModelError
from ..errors import refuse_pointer

CONFIG, ADAPTER = "config.json", "adapter_config.json"
OLDER = ("bin", "pt", "pth", "pkl")
HEADS = {  # endings of architectures, and what such a model does in place of generating
    "RewardModel": "scores texts",
    "ForTokenClassification": "labels tokens",
    "ForQuestionAnswering": "finds answers in a text",
    "ForMultipleChoice": "chooses among texts",
    "ForMaskedLM": "fills gaps",
    "Model": "makes hidden states",
}
GENERATES = ("LMHeadModel",)  # endings in "Model" that have a head for text
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")  # of which hidden states are what is wanted
REWARDS, STEP_REWARDS = "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"  # whose heads are known


def read_config_json(folder: Path, overrides: Mapping[str, Any] | None = None, embeds: bool = False) -> dict[str, Any]:
    """config.json with the keys of `overrides` in place of its own; a model whose head is not known is refused.

    One that `embeds` needs none.
    """
    check_folder(folder)
    hf = merged(read_json(folder / CONFIG), overrides or {})
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else ():
        ending = next((ending for ending in HEADS if str(name).endswith(ending)), None)
        if name in (REWARDS, STEP_REWARDS) or (embeds and ending == "Model"):
            continue
        if encodes(hf) and ending in ("Model", "ForMaskedLM"):
            continue
        if ending and not str(name).endswith(GENERATES):
            remedy = json.dumps({"architectures": [f"{str(name).removesuffix(ending)}ForCausalLM"]})
            raise ModelError(
                f"{folder / CONFIG}: architectures = {names!r:.200}: this model {HEADS[ending]} and has no head that "
                "generates text; such models are not read yet. If the checkpoint does have one: "
                f"--hf-overrides '{remedy}'"
            )
    return hf


def encodes(hf: Mapping[str, Any]) -> bool:
    """Whether rows see those after them, so that hidden states are all that is to be had."""
    return hf.get("model_type") in ENCODERS or hf.get("use_bidirectional_attention") is True


def architecture(hf: Mapping[str, Any]) -> str:
    """The class that wrote the checkpoint, by its first name in `architectures`; empty where none is named."""
    names = hf.get("architectures")
    return str(next(iter(names), "")) if isinstance(names, list) else ""


def merged(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`hf` with other values; of an object in both, the keys are merged."""
    found = dict(hf)
    for name, value in overrides.items():
        own = found.get(name)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        found[name] = merged(own, value) if both else value
    return found


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a model that can be read, with what it is and the remedy."""
    weights = [path.name for path in folder.glob("*.safetensors")]
    if (folder / ADAPTER).exists() and not [name for name in weights if not name.startswith("adapter_model")]:
        about = read_json(folder / ADAPTER)
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}: {about.get('peft_type')!r:.20}) of "
            f"{about.get('base_model_name_or_path')!r:.200}: serve that model with --enable-lora and --lora-modules "
            "NAME=FOLDER, or merge it (peft: merge_and_unload, then save_pretrained) and give the folder of the result"
        )
    if (folder / CONFIG).exists() or not folder.is_dir():
        return
    refuse_other_weights(folder, [path.name for path in folder.iterdir()])
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty: {CONFIG} does not exist; was the model downloaded to another place?")


def refuse_other_weights(place: object, names: Iterable[str]) -> None:
    """Refuse weights in another format, in a place without *.safetensors, with what to do about it."""
    for ending in ("gguf", *OLDER):
        if not (found := sorted(name for name in names if name.endswith(f".{ending}"))):
            continue
        if ending == "gguf":
            raise ModelError(
                f"{place} holds GGUF files: name one, by its path, or on the Hub by what its name ends in: "
                f"owner/name:{quant_of(found[0])}"
            )
        raise ModelError(
            f"{place} holds {found[0]} but no *.safetensors; weights are read from safetensors alone: the older "
            "formats can run code. transformers' from_pretrained and then save_pretrained writes them anew"
        )


def quant_of(name: str) -> str:
    """What the name of a GGUF file ends in: as a rule what its weights are kept in."""
    return re.split(r"[-.]", re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name.rpartition("/")[2]))[-1]


def read_json(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """The object in a JSON file, or in `data`, which was read from it before."""
    value = read_value(path, data)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def read_value(path: Path, data: bytes | None = None) -> Any:
    """What a JSON file holds, or `data`, which was read from it before."""
    try:
        data = path.read_bytes() if data is None else data
        refuse_pointer(path, data)
        return json.loads(data, parse_constant=not_a_number)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model folder holds config.json and *.safetensors") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None


def not_a_number(name: str):
    """Infinity as transformers 5 writes it, which no key takes for a number; transformers 4 wrote what is no JSON."""
    if name == "Infinity":
        return {"__float__": name}
    raise ValueError(f"{name} is no JSON number")
