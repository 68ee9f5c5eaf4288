"""The options that commands share: their names, units and places in the help, and sizes as people write them."""

import functools
import inspect
from pathlib import Path
from typing import Annotated

import typer

from .devices import DEVICE_OPTIONS
from .sizes import ENGINE, MODEL, OUTPUT, SAMPLING, sampled, sized


class UsageError(typer.TyperException):
    """A command line that asks for what cannot be done."""

    exit_code = 2


def given(**values) -> dict:
    """The options that were given; the rest are left to the engine's own defaults."""
    return {name: value for name, value in values.items() if value is not None}


Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A folder or Hugging Face id.", show_default="the bundled model, quill"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="A folder or Hugging Face id.", show_default="the model's own", rich_help_panel=MODEL),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or auto.", show_default="auto: the model's", rich_help_panel=MODEL),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Round the weights while loading: int8, int8-weights, int4, int4-128, int4-64-zero and so on.",
        show_default="as they are",
        rich_help_panel=MODEL,
    ),
]
Rounding = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="What to round the weights to: int8, int8-weights, int4, int4-128, int4-64-zero and so on.",
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    sized(
        "--max-model-len",
        "Longest prompt and answer together; -1: the longest that fits.",
        "TOKENS",
        MODEL,
        "the model's own",
    ),
]
BlockSize = Annotated[int | None, sized("--block-size", "Tokens a page of the KV cache.", "TOKENS", ENGINE, "16")]
CacheBytes = Annotated[
    int | None,
    sized("--kv-cache-memory-bytes", "Memory for the KV cache, as in 2G.", "BYTES", ENGINE, "a part of what is free"),
]
MemoryShare = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Of the device's memory, for weights, cache and all else; the cache gets what the others leave.",
        show_default="0.9; on a CPU the cache gets a quarter of what is free, at most 8G",
        rich_help_panel=ENGINE,
    ),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help="What keys and values are kept in: auto, bfloat16, int8 or fp8.",
        show_default="auto: the model's dtype",
        rich_help_panel=ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep computed pages for prompts that begin alike.",
        show_default="on",
        rich_help_panel=ENGINE,
    ),
]
HostBytes = Annotated[
    int | None,
    sized(
        "--kv-cache-host-bytes",
        "Host memory for computed pages that the KV cache has no room for.",
        "BYTES",
        ENGINE,
        "0, or 256M with --kv-cache-disk",
    ),
]
CacheDisk = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A folder for those that the host has no room for; they are found again by the next process.",
        show_default="none",
        rich_help_panel=ENGINE,
    ),
]
DiskBytes = Annotated[
    int | None, sized("--kv-cache-disk-bytes", "The most that folder may hold.", "BYTES", ENGINE, "8G")
]
MaxNumSeqs = Annotated[int | None, sized("--max-num-seqs", "Most sequences in one step.", "N", ENGINE, "32")]
MaxBatchedTokens = Annotated[
    int | None, sized("--max-num-batched-tokens", "Most tokens in one step.", "TOKENS", ENGINE, "512")
]
Pooling = Annotated[
    str | None,
    typer.Option(
        help="What an embedding is made of: the last hidden state, or the mean of all.",
        metavar="last|mean",
        show_default="last",
        rich_help_panel=MODEL,
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write what each step did when; ui.perfetto.dev and chrome://tracing show it.",
        rich_help_panel=OUTPUT,
    ),
]

MaxTokens = Annotated[int | None, sized("--max-tokens", "Longest answer.", "TOKENS", SAMPLING)]
Temperature = Annotated[float | None, sampled("--temperature", "0 takes the likeliest token each time.")]
TopP = Annotated[float | None, sampled("--top-p", "Keep the likeliest tokens that sum to this probability, 0 to 1.")]
TopK = Annotated[int | None, sampled("--top-k", "Keep this many of the likeliest tokens.")]
MinP = Annotated[float | None, sampled("--min-p", "Drop tokens below this fraction of the likeliest's probability.")]
Seed = Annotated[int | None, sampled("--seed", "The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, sampled("--stop", "End before this text; may be given several times.")]
RepetitionPenalty = Annotated[float | None, sampled("--repetition-penalty", "Above 1 makes seen tokens less likely.")]
PresencePenalty = Annotated[float | None, sampled("--presence-penalty", "Taken from the logit of each written token.")]
FrequencyPenalty = Annotated[
    float | None, sampled("--frequency-penalty", "The same, once for each time it was written.")
]

ENGINE_OPTIONS = {
    "tokenizer": Tokenizer,
    "dtype": Dtype,
    "quantization": Quantization,
    "max_model_len": MaxModelLen,
    "block_size": BlockSize,
    **DEVICE_OPTIONS,
    "kv_cache_dtype": CacheDtype,
    "kv_cache_memory_bytes": CacheBytes,
    "gpu_memory_utilization": MemoryShare,
    "enable_prefix_caching": PrefixCaching,
    "kv_cache_host_bytes": HostBytes,
    "kv_cache_disk": CacheDisk,
    "kv_cache_disk_bytes": DiskBytes,
    "max_num_seqs": MaxNumSeqs,
    "max_num_batched_tokens": MaxBatchedTokens,
    "pooling": Pooling,
    "trace": Trace,
}


def takes_engine(without: tuple[str, ...] = ()):
    """A command with the engine's options in the place of its parameter `engine`, which gets those that were given."""
    return takes("engine", {name: option for name, option in ENGINE_OPTIONS.items() if name not in without})


def takes(place: str, added: dict):
    """The same for any options, in the place of any parameter."""

    def decorate(main):
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(main, eval_str=True).parameters.values():
            if parameter.name == place:
                kind = parameter.kind
                parameters += [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in added.items()]
            else:
                parameters.append(parameter)

        @functools.wraps(main)
        def command(**values):
            chosen = given(**{name: values.pop(name) for name in added})
            return main(**values, **{place: chosen})

        command.__signature__ = inspect.Signature(parameters)  # where Typer looks
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def read_text(path: Path) -> str:
    """A UTF-8 file, or stdin where the path is `-`."""
    source = "stdin" if str(path) == "-" else str(path)
    try:
        return (typer.get_binary_stream("stdin").read() if source == "stdin" else path.read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from None
