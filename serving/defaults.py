"""Default sampling parameters, from the model's generation_config.json."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..model.checkpoint.folder import read_json
from ..model.config import ModelError
from .api.errors import RequestError
from .api.options import EngineOptions
from .api.params import MODEL_DEFAULTS, SAMPLING, SamplingParams
from .api.validation import boolean, refuse_unknown, shown
from .engine.engine import Engine

log = logging.getLogger("quire")

FILE = "generation_config.json"
NAMES = {
    "max_new_tokens" if name == "max_tokens" else name: name for name in MODEL_DEFAULTS
}  # key in the file -> parameter
IGNORED_KEYS = {  # keys that change answers and are not supported -> their neutral value
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "stop_strings": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    # GGUF files'.
    "mirostat": 0,
    "xtc_probability": 0.0,
    "repetition_penalty_last_n": -1,
    "sampler_sequence": None,
}
NEUTRAL = SamplingParams(max_tokens=None)
SHAPING = ("temperature", "top_p", "top_k", "min_p")  # parameters of the sampling distribution
LLAMA_CPP = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}  # llama.cpp's defaults


@dataclass(frozen=True)
class ModelDefaults:
    """Defaults by the names of `SamplingParams`; values that change nothing are left out."""

    requests: dict[str, Any]  # for all interfaces: recommended by the model or the user
    chat: dict[str, Any]  # for `quire chat`, `quire run`, the page and Ollama's routes


def generation_folder(folder: Path, options: EngineOptions) -> Path | None:
    """Return the folder whose generation_config.json applies, or None."""
    source = options.generation_config
    if source in ("auto", "vllm"):
        return folder if source == "auto" else None
    folder_of_defaults = Path(source).expanduser()
    if not (folder_of_defaults / FILE).is_file():
        raise ModelError(
            f"generation_config is {source!r}; it can be auto (the model's folder), vllm (no "
            f"defaults of a model), or a folder with {FILE}"
        )
    return folder_of_defaults


def model_defaults(folder: Path, options: EngineOptions, longest: int) -> ModelDefaults:
    """Read the defaults, and log them and the ignored keys.

    If nothing recommends sampling parameters, conversations use llama.cpp's defaults: at
    temperature 1 over the whole vocabulary, most models lose the thread. `generation_config="vllm"`
    selects neutral parameters everywhere.
    """
    defaults_folder = generation_folder(folder, options)
    overrides = dict(options.override_generation_config or {})
    known_names = [*NAMES, "do_sample"]
    try:
        refuse_unknown(overrides, known_names)
        chosen = checked_defaults(overrides)
    except RequestError as error:
        raise ModelError(f"override_generation_config: {error}") from None
    file: dict[str, Any] = {}
    if defaults_folder is not None and (defaults_folder / FILE).is_file():
        file = read_json(defaults_folder / FILE)
    try:
        defaults = checked_defaults(file)
    except RequestError as error:
        raise ModelError(
            f"{FILE} of the model: {error}; --generation-config vllm leaves it out"
        ) from None
    defaults |= chosen
    if not uses_sampling(file, overrides):
        defaults["temperature"] = 0.0
    name = options.model or "quill"
    log_ignored_keys(name, file, longest)
    defaults = {name: value for name, value in defaults.items() if value != getattr(NEUTRAL, name)}
    if defaults:
        named = ", ".join(f"{parameter}={value:g}" for parameter, value in defaults.items())
        log.info(
            "%s: defaults of sampling parameters (--generation-config vllm for none of its "
            "own): %s",
            name,
            named,
        )
    if defaults_folder is None or recommends_sampling(file) or recommends_sampling(overrides):
        return ModelDefaults(defaults, defaults)
    named = ", ".join(f"{parameter}={value:g}" for parameter, value in LLAMA_CPP.items())
    log.info(
        "%s recommends no sampling: quire chat, quire run, the page and Ollama's routes use %s "
        "(llama.cpp's); the other interfaces keep temperature=1",
        name,
        named,
    )
    return ModelDefaults(defaults, LLAMA_CPP | defaults)


def recommends_sampling(recommended: Mapping[str, Any]) -> bool:
    """Whether a file or the user sets how tokens are sampled; setting 1.0 counts too."""
    return recommended.get("do_sample") is False or any(
        recommended.get(name) is not None for name in SHAPING
    )


def checked_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of a file or of the user, by parameter."""
    if values.get("do_sample") is not None:
        boolean("do_sample", values["do_sample"])
    return {
        name: SAMPLING[name].rule.check(key, values[key])
        for key, name in NAMES.items()
        if values.get(key) is not None
    }


def uses_sampling(file: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether tokens are sampled: `do_sample: false` is greedy, unless the user sets a
    temperature.
    """
    if overrides.get("do_sample") is not None:
        return overrides["do_sample"]
    return overrides.get("temperature") is not None or file.get("do_sample") is not False


def log_ignored_keys(name: str, file: Mapping[str, Any], longest: int) -> None:
    """Log the keys of the file that are ignored."""
    ignored = {
        key: file[key]
        for key, neutral in IGNORED_KEYS.items()
        if file.get(key) not in (None, neutral, [], {}, False)
    }
    if ignored:
        named = ", ".join(f"{key} = {shown(value)}" for key, value in ignored.items())
        log.warning("%s: %s asks for what is not applied here: %s", name, FILE, named)
    length = file.get("max_length")
    if (
        type(length) is int
        and length < longest
        and length != 20
        and file.get("max_new_tokens") is None
    ):
        log.warning(
            "%s: %s: max_length = %d counts the prompt too and is not applied; --max-model-len %d "
            "is the same for all requests, --override-generation-config '{\"max_new_tokens\": N}' "
            "limits answers",
            name,
            FILE,
            length,
            length,
        )


def default_params(engine: Engine) -> SamplingParams:
    """Return the parameters of a request that sets none."""
    return with_defaults(SamplingParams(), (), engine.defaults)


def with_defaults(
    params: SamplingParams, given_names: Collection[str], defaults: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters with defaults for the names that were not given."""
    missing = {name: value for name, value in defaults.items() if name not in given_names}
    if "max_tokens" in missing:  # it does not limit requests that ask for more
        missing["max_tokens"] = max(missing["max_tokens"], params.min_tokens)
    return replace(params, **missing) if missing else params
