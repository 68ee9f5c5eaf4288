"""The sampling parameters of requests that leave them out: those of the model's generation_config.json."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..model.checkpoint.folder import read_json
from ..model.config import ModelError
from .api.errors import RequestError
from .api.options import EngineOptions
from .api.params import OF_MODEL, SAMPLING, SamplingParams
from .api.validation import boolean, refuse_unknown, shown
from .engine.engine import Engine

log = logging.getLogger("quire")

FILE = "generation_config.json"
NAMES = {"max_new_tokens" if name == "max_tokens" else name: name for name in OF_MODEL}  # in the file, and here
NOT_APPLIED = {  # what would change answers too and has no counterpart here, with the value that changes nothing
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": None, "guidance_scale": 1.0,
    "num_beams": 1, "no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "min_length": 0,
    "min_new_tokens": None, "suppress_tokens": None, "begin_suppress_tokens": None, "bad_words_ids": None,
    "sequence_bias": None, "stop_strings": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "mirostat": 0, "xtc_probability": 0.0, "repetition_penalty_last_n": -1, "sampler_sequence": None,  # GGUF files'
}  # fmt: skip
NEUTRAL = SamplingParams(max_tokens=None)
SHAPING = ("temperature", "top_p", "top_k", "min_p")  # parameters that decide how tokens are drawn
LLAMA_CPP = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}  # llama.cpp's defaults


@dataclass(frozen=True)
class ModelDefaults:
    """Defaults by the names of `SamplingParams`; values that change nothing are left out."""

    requests: dict[str, Any]  # of every interface: what the model or the user recommends
    chat: dict[str, Any]  # of `quire chat`, `quire run`, the page and Ollama's routes


def generation_folder(folder: Path, options: EngineOptions) -> Path | None:
    """The folder whose generation_config.json holds; None: there is to be none."""
    source = options.generation_config
    if source in ("auto", "vllm"):
        return folder if source == "auto" else None
    found = Path(source).expanduser()
    if not (found / FILE).is_file():
        raise ModelError(
            f"generation_config is {source!r}; it can be auto (the model's folder), vllm (no defaults of a model), or "
            f"a folder with {FILE}"
        )
    return found


def model_defaults(folder: Path, options: EngineOptions, longest: int) -> ModelDefaults:
    """Read the defaults; the log says what they are, and what is not applied.

    Where nothing recommends how tokens are drawn, conversations use llama.cpp's defaults: at temperature 1 over the
    whole vocabulary most models lose the thread. `generation_config="vllm"` asks for neutral parameters everywhere.
    """
    place, own = generation_folder(folder, options), dict(options.override_generation_config or {})
    known = [*NAMES, "do_sample"]
    try:
        refuse_unknown(own, known)
        chosen = checked(own)
    except RequestError as error:
        raise ModelError(f"override_generation_config: {error}") from None
    file: dict[str, Any] = {}
    if place is not None and (place / FILE).is_file():
        file = read_json(place / FILE)
    try:
        found = checked(file)
    except RequestError as error:
        raise ModelError(f"{FILE} of the model: {error}; --generation-config vllm leaves it out") from None
    found |= chosen
    if not sampled(file, own):
        found["temperature"] = 0.0
    name = options.model or "quill"
    note_what_is_not_applied(name, file, longest)
    found = {name: value for name, value in found.items() if value != getattr(NEUTRAL, name)}
    if found:
        named = ", ".join(f"{parameter}={value:g}" for parameter, value in found.items())
        log.info("%s: defaults of sampling parameters (--generation-config vllm for none of its own): %s", name, named)
    if place is None or recommends_sampling(file) or recommends_sampling(own):
        return ModelDefaults(found, found)
    named = ", ".join(f"{parameter}={value:g}" for parameter, value in LLAMA_CPP.items())
    log.info(
        "%s recommends no sampling: quire chat, quire run, the page and Ollama's routes use %s (llama.cpp's); the "
        "other interfaces keep temperature=1",
        name, named,
    )  # fmt: skip
    return ModelDefaults(found, LLAMA_CPP | found)


def recommends_sampling(recommended: Mapping[str, Any]) -> bool:
    """Whether a file or the user says how tokens are drawn; 1.0 is an answer too."""
    return recommended.get("do_sample") is False or any(recommended.get(name) is not None for name in SHAPING)


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a file or of the user, under their names here."""
    if given.get("do_sample") is not None:
        boolean("do_sample", given["do_sample"])
    return {
        name: SAMPLING[name].rule.check(theirs, given[theirs])
        for theirs, name in NAMES.items()
        if given.get(theirs) is not None
    }


def sampled(file: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn: `do_sample: false` is greedy, unless the user gives a temperature."""
    if own.get("do_sample") is not None:
        return own["do_sample"]
    return own.get("temperature") is not None or file.get("do_sample") is not False


def note_what_is_not_applied(name: str, file: Mapping[str, Any], longest: int) -> None:
    """Name what the file asks for in vain."""
    missed = {
        theirs: file[theirs]
        for theirs, nothing in NOT_APPLIED.items()
        if file.get(theirs) not in (None, nothing, [], {}, False)
    }
    if missed:
        named = ", ".join(f"{theirs} = {shown(value)}" for theirs, value in missed.items())
        log.warning("%s: %s asks for what is not applied here: %s", name, FILE, named)
    length = file.get("max_length")
    if type(length) is int and length < longest and length != 20 and file.get("max_new_tokens") is None:
        log.warning(
            "%s: %s: max_length = %d counts the prompt too and is not applied; --max-model-len %d is the same for all "
            "requests, --override-generation-config '{\"max_new_tokens\": N}' limits answers",
            name, FILE, length, length,
        )  # fmt: skip


def default_params(engine: Engine) -> SamplingParams:
    """The parameters of a request that gives none."""
    return with_defaults(SamplingParams(), (), engine.defaults)


def with_defaults(params: SamplingParams, given: Collection[str], defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters with the defaults of those that were not given."""
    missing = {name: value for name, value in defaults.items() if name not in given}
    if "max_tokens" in missing:  # it limits nobody who asks for more
        missing["max_tokens"] = max(missing["max_tokens"], params.min_tokens)
    return replace(params, **missing) if missing else params
