"""`quire serve`: serve models over HTTP, with APIs compatible with OpenAI, Anthropic and Ollama."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ... import __version__
from ...serving.api.options import ADAPTERS, EngineOptions
from ...serving.http.settings import ACCESS, ANSWERS, LIMITS, LISTEN, Formats, ServerSettings
from .. import options as o
from ..loading import immediate_interrupt
from .checks import check_limits, read_keys
from .config import read_config
from .replicas import PANEL, SCALE_OPTIONS, make_plan
from .replicas import run as run_replicas

OBSERVABILITY = "Logs and traces"
SETTINGS = [field for field in fields(ServerSettings) if field.metadata]
SERVER_FLAGS = {
    field.name: o.field_flag(field, field.metadata["default_text"] or True) for field in SETTINGS
}


def repeatable_option(
    help: str, panel: str, metavar: str = "TEXT", default_text: str = "none"
) -> Any:
    return o.option(f"{help}; may be given several times.", panel, metavar, default_text)


def takes_flags(main):
    """Replace the parameters `settings`, `scale` and `engine` by the flags for them."""
    main = o.takes("settings", SERVER_FLAGS, {field.name: field.default for field in SETTINGS})(
        main
    )
    return o.takes_engine(adapters=True)(o.takes("scale", SCALE_OPTIONS)(main))


@takes_flags
def main(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folders or Hugging Face model IDs. With several, requests select one by "
            "their model field.",
            show_default="the bundled model, quill",
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with options by name; the command line takes precedence.",
            metavar="FILE",
            callback=read_config,
            is_eager=True,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        repeatable_option("Model name in the API", LISTEN, default_text="MODEL"),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        repeatable_option(
            "LoRA adapter to serve: the model name for requests, and the adapter's folder",
            ADAPTERS,
            "NAME=PATH",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        repeatable_option(
            "API key that clients must send; also read from QUIRE_API_KEY, separated by commas",
            ACCESS,
            "KEY",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, o.option("File with API keys, one per line.", ACCESS, "FILE")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        repeatable_option(
            "Accepted Host header", ACCESS, default_text="any; on loopback only its own names"
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, repeatable_option("Allowed CORS origin", ACCESS, "URL")
    ] = None,
    max_queued_requests: Annotated[
        int,
        o.size_option(
            "Maximum number of waiting requests; further ones get HTTP 429.", LIMITS, "N"
        ),
    ] = 2048,
    settings: dict[str, Any],
    tool_call_parser: Annotated[
        str,
        o.option(
            "Tool call parser, with vLLM's names (docs/tools.md); none; or auto: detected from "
            "the chat template.",
            ANSWERS,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        o.option(
            "Reasoning parser, with vLLM's names (docs/tools.md); none; or auto: detected from "
            "the chat template.",
            ANSWERS,
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        o.option("Parse tool calls in answers to requests with tools.", ANSWERS, default_text="on"),
    ] = True,
    chat_template: Annotated[
        Path | None,
        o.option("Chat template file (Jinja) that replaces the model's own.", ANSWERS, "FILE"),
    ] = None,
    seed: Annotated[
        int, o.option("Sampling seed for requests without one.", ANSWERS)
    ] = EngineOptions.seed,
    log_level: Annotated[
        str, o.option("Minimum log level: debug, info, warning or error.", OBSERVABILITY)
    ] = "info",
    log_json: Annotated[
        bool, o.option("Log in JSON Lines format.", OBSERVABILITY, name="--log-json")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        o.option(
            "OTLP endpoint for OpenTelemetry traces; needs the extra quire[otel].",
            OBSERVABILITY,
            "URL",
        ),
    ] = None,
    runs_on: Annotated[
        str | None,
        o.option(
            "ray: serve several replicas with Ray Serve; needs the extra quire[ray].",
            PANEL,
            "ray",
            "one replica in this process",
            "--engine",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        o.option(
            "Address of the Ray cluster to deploy to, or auto. Replaces an earlier deployment.",
            PANEL,
            "ADDRESS",
            "a local Ray instance that stops with the command",
        ),
    ] = None,
    scale: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve models over HTTP with APIs compatible with OpenAI, Anthropic and Ollama, Prometheus
    metrics and a chat page.
    """
    values = dict(locals())
    setup = make_setup(values)
    if not setup.settings.loopback and not setup.settings.api_keys:
        host = setup.settings.host
        print(
            f"note: whoever can reach {host} can use this server; --api-key makes it ask for a key",
            file=sys.stderr,
        )
    if runs_on is not None:
        run_replicas(make_plan(values, setup, scale), ray_address)
        return
    if setup.options.get("process_id"):
        follow((models or [None])[0], setup.options)
        return

    # Imports JAX; Python can lose a Ctrl-C during that import.
    with immediate_interrupt():
        from ...serving.http import models as _  # noqa: F401
        from ...serving.http import server
        from ...serving.http.logs import setup_logging

    setup_logging(log_json, log_level)
    server.run(run(setup))


class ServerSetup(NamedTuple):
    """Models, server settings and engine options from the command line."""

    models: list[str]  # folders or Hugging Face model IDs; empty: the bundled model
    served_names: list[tuple[str, ...]]  # for each model, the names that requests may use
    settings: ServerSettings
    options: dict[str, Any]  # engine options, the same for all models
    adapters: dict[str, str]  # name -> folder of each LoRA adapter


def make_setup(values: dict[str, Any]) -> ServerSetup:
    """Check the values of all options and make the setup from them."""
    keys = read_keys(values["api_key"] or [], values["api_key_file"])
    template = None if values["chat_template"] is None else o.read_text(values["chat_template"])
    parsers = (
        values["tool_call_parser"],
        values["reasoning_parser"],
        values["enable_auto_tool_choice"],
    )
    settings = ServerSettings(
        **values["settings"],
        version=__version__,
        api_keys=keys,
        allowed_hosts=tuple(values["allowed_host"] or ()),
        allowed_origins=tuple(values["allowed_origin"] or ()),
        formats=Formats(*parsers, template),
        otlp_traces_endpoint=values["otlp_traces_endpoint"],
    )
    check_limits(settings, values["max_queued_requests"])
    if values["runs_on"] not in (None, "ray"):
        raise o.UsageError(f"--engine is {values['runs_on']!r}; it can be ray, or is left out")
    if values["runs_on"] is not None and settings.state_dir is not None:
        raise o.UsageError(
            "--state-dir is of one server, and --engine ray runs several; leave one of them out"
        )
    for name in ("ray_address", *values["scale"]) if values["runs_on"] is None else ():
        if values.get(name) is not None or name in values["scale"]:
            raise o.UsageError(f"--{name.replace('_', '-')} needs --engine ray")
    models = values["models"] or []
    processes = values["engine"].get("num_processes", 1)
    if processes > 1 and (len(models) > 1 or values["runs_on"] is not None):
        raise o.UsageError(
            f"--num-processes is {processes}: several processes serve one model together, "
            "without Ray"
        )
    options = values["engine"] | {
        "max_queued_requests": values["max_queued_requests"],
        "seed": values["seed"],
    }
    served_names = names_by_model(models, values["served_model_name"] or [])
    adapters = parse_adapters(
        values["lora_modules"] or [], served_names, bool(options.get("enable_lora"))
    )
    return ServerSetup(models, served_names, settings, options, adapters)


@takes_flags
def plan(
    *, settings: dict[str, Any], scale: dict[str, Any], engine: dict[str, Any], **values: Any
) -> Any:
    """The Ray Serve deployment plan for the values of these options."""
    values |= {"settings": settings, "scale": scale, "engine": engine}
    return make_plan(values, make_setup(values), scale)


def follow(model: str | None, options: dict[str, Any]) -> None:
    """Run the steps that process 0 sends, without serving requests."""
    import logging

    from ...serving.follow import follow

    follow(model, progress=logging.getLogger("quire").info, **options)


async def run(setup: ServerSetup) -> None:
    from ...serving.http.models import Models
    from ...serving.http.server import serve
    from ...serving.http.service import Service

    models = [
        make_model(model, names, setup.options, setup.adapters)
        for model, names in zip(setup.models or [None], setup.served_names, strict=True)
    ]
    service = Service(Models(models, setup.settings.max_loaded), setup.settings)

    def report_ready(address: str) -> None:
        print(f"ready: {address}", file=sys.stderr, flush=True)

    await serve(service, report_ready)


def names_by_model(models: list[str], served: list[str]) -> list[tuple[str, ...]]:
    """For each model, the names that requests may use; responses use the first."""
    if len(models) <= 1:
        model = models[0] if models else "quill"
        return [tuple(served) or tuple(dict.fromkeys((model, Path(model).name)))]
    if served and len(served) != len(models):
        raise o.UsageError(
            f"--served-model-name is given {len(served)} times for {len(models)} models"
        )
    served_names = [(name,) for name in served] or [
        tuple(dict.fromkeys((model, Path(model).name))) for model in models
    ]
    flat_names = [name for names in served_names for name in names]
    if len(set(flat_names)) < len(flat_names):
        raise o.UsageError(
            "two models would have the same name: --served-model-name, once for each, tells "
            "them apart"
        )
    return served_names


def parse_adapters(
    lora_modules: list[str], served_names: list[tuple[str, ...]], enable_lora: bool
) -> dict[str, str]:
    """Parse `--lora-modules`: the folder of each adapter by name."""
    folders: dict[str, str] = {}
    for lora_module in lora_modules:
        name, _, path = lora_module.partition("=")
        if not name or not path:
            raise o.UsageError(f"--lora-modules is {lora_module!r}; it must be NAME=PATH")
        if name in folders or any(name in names for names in served_names):
            raise o.UsageError(
                f"--lora-modules names {name!r}, which is a model's or another adapter's name"
            )
        folders[name] = path
    if folders and not enable_lora:
        raise o.UsageError("--lora-modules needs --enable-lora")
    if folders and len(served_names) > 1:
        raise o.UsageError(
            "--lora-modules needs a single MODEL: it would not say whose the adapters are"
        )
    return folders


def make_model(
    model: str | None, names: tuple[str, ...], options: dict[str, Any], adapters: dict[str, str]
) -> Any:
    """A served model, whose engine is made when the server loads it."""
    from ...serving.api.lora import LoRARequest
    from ...serving.api.options import make_options
    from ...serving.build import make_engine
    from ...serving.http.models import Model

    engine_options = make_options(model, **options)  # reports invalid options before loading

    def log_progress(stage: str) -> None:
        import logging

        logging.getLogger("quire").info("%s: %s", names[0], stage)

    lora_requests = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(adapters.items(), 1)
    }

    def load() -> Any:
        engine = make_engine(engine_options, log_progress)
        for lora_request in lora_requests.values():  # reports an unreadable adapter at startup
            engine.adapters.get(lora_request)
        return engine

    return Model(names, load, adapters=lora_requests)
