"""`quire serve`: models behind OpenAI's and Anthropic's HTTP APIs."""

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
from .replicas import PANEL, SCALE_OPTIONS, plan_of
from .replicas import run as run_replicas

WATCH = "Logs and traces"
SETTINGS = [field for field in fields(ServerSettings) if field.metadata]
SERVER_FLAGS = {
    field.name: o.field_flag(field, field.metadata["default_text"] or True) for field in SETTINGS
}


def listed(help: str, panel: str, metavar: str = "TEXT", default_text: str = "none") -> Any:
    return o.option(f"{help}; may be given several times.", panel, metavar, default_text)


def takes_flags(main):
    """A command with the flags of the server, of replicas and of engines as `settings`, `scale` and
    `engine`.
    """
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
            help="Folders or Hugging Face ids. With several, a request's model field chooses.",
            show_default="the bundled model, quill",
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of these options, by their names; the command line overrides it.",
            metavar="FILE",
            callback=read_config,
            is_eager=True,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        listed("Name that clients call the model", LISTEN, default_text="the MODEL itself"),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        listed("Adapter that requests name as their model, and its folder", ADAPTERS, "NAME=PATH"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        listed("Key that clients must send, here or with commas in QUIRE_API_KEY", ACCESS, "KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None, o.option("File of keys, one a line.", ACCESS, "FILE")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        listed("Host header to accept", ACCESS, default_text="any; on loopback only its own names"),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, listed("Site whose pages may send requests (CORS)", ACCESS, "URL")
    ] = None,
    max_queued_requests: Annotated[
        int, o.sized("Requests that may wait; a further one gets a 429.", LIMITS, "N")
    ] = 2048,
    settings: dict[str, Any],
    tool_call_parser: Annotated[
        str,
        o.option(
            "Format of tool calls by vLLM's name for it (docs/tools.md), none, or auto: as the "
            "chat template shows.",
            ANSWERS,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        o.option(
            "Format of reasoning by vLLM's name for it (docs/tools.md), none, or auto: as the "
            "chat template shows.",
            ANSWERS,
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        o.option(
            "Parse tool calls in answers to requests that bring tools.", ANSWERS, default_text="on"
        ),
    ] = True,
    chat_template: Annotated[
        Path | None,
        o.option("File with a chat template to use instead of the model's own.", ANSWERS, "FILE"),
    ] = None,
    seed: Annotated[
        int, o.option("Seed of requests that bring none.", ANSWERS)
    ] = EngineOptions.seed,
    log_level: Annotated[
        str, o.option("Least severe level to log: debug, info, warning or error.", WATCH)
    ] = "info",
    log_json: Annotated[
        bool, o.option("Log one JSON object a line.", WATCH, name="--log-json")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        o.option("Where to send OpenTelemetry spans; needs the extra quire[otel].", WATCH, "URL"),
    ] = None,
    runs_on: Annotated[
        str | None,
        o.option(
            "ray: run several replicas on Ray Serve; needs the extra quire[ray].",
            PANEL,
            "ray",
            "one in this process",
            "--engine",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        o.option(
            "Ray cluster to deploy to, or auto. A second deployment replaces the first.",
            PANEL,
            "ADDRESS",
            "Ray on this machine, until the command ends",
        ),
    ] = None,
    scale: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve models over HTTP: the APIs of OpenAI, Anthropic and Ollama, metrics, and a page for
    people.
    """
    given = dict(locals())
    wanted = wanted_of(given)
    if not wanted.settings.loopback and not wanted.settings.api_keys:
        host = wanted.settings.host
        print(
            f"note: whoever can reach {host} can use this server; --api-key makes it ask for a key",
            file=sys.stderr,
        )
    if runs_on is not None:
        run_replicas(plan_of(given, wanted, scale), ray_address)
        return
    if wanted.options.get("process_id"):
        follow((models or [None])[0], wanted.options)
        return

    # JAX comes with the models, and Ctrl-C can be lost while it is imported
    with immediate_interrupt():
        from ...serving.http import models as _  # noqa: F401
        from ...serving.http import server
        from ...serving.http.logs import setup_logging

    setup_logging(log_json, log_level)
    server.run(run(wanted))


class ServerSetup(NamedTuple):
    """What the options of a command line set up."""

    names: list[str]  # of the models; empty: the bundled one
    called: list[tuple[str, ...]]  # what clients may call each of them
    settings: ServerSettings
    options: dict[str, Any]  # of every engine
    adapters: dict[str, str]  # their folders, by name


def wanted_of(given: dict[str, Any]) -> ServerSetup:
    """The setup from the values of all options."""
    keys = read_keys(given["api_key"] or [], given["api_key_file"])
    template = None if given["chat_template"] is None else o.read_text(given["chat_template"])
    parsers = given["tool_call_parser"], given["reasoning_parser"], given["enable_auto_tool_choice"]
    settings = ServerSettings(
        **given["settings"],
        version=__version__,
        api_keys=keys,
        allowed_hosts=tuple(given["allowed_host"] or ()),
        allowed_origins=tuple(given["allowed_origin"] or ()),
        formats=Formats(*parsers, template),
        otlp_traces_endpoint=given["otlp_traces_endpoint"],
    )
    check_limits(settings, given["max_queued_requests"])
    if given["runs_on"] not in (None, "ray"):
        raise o.UsageError(f"--engine is {given['runs_on']!r}; it can be ray, or is left out")
    if given["runs_on"] is not None and settings.state_dir is not None:
        raise o.UsageError(
            "--state-dir is of one server, and --engine ray runs several; leave one of them out"
        )
    for name in ("ray_address", *given["scale"]) if given["runs_on"] is None else ():
        if given.get(name) is not None or name in given["scale"]:
            raise o.UsageError(f"--{name.replace('_', '-')} needs --engine ray")
    names = given["models"] or []
    processes = given["engine"].get("num_processes", 1)
    if processes > 1 and (len(names) > 1 or given["runs_on"] is not None):
        raise o.UsageError(
            f"--num-processes is {processes}: several processes serve one model together, "
            "without Ray"
        )
    options = given["engine"] | {
        "max_queued_requests": given["max_queued_requests"],
        "seed": given["seed"],
    }
    called_by = called(names, given["served_model_name"] or [])
    adapters = adapters_of(given["lora_modules"] or [], called_by, bool(options.get("enable_lora")))
    return ServerSetup(names, called_by, settings, options, adapters)


@takes_flags
def plan(
    *, settings: dict[str, Any], scale: dict[str, Any], engine: dict[str, Any], **given: Any
) -> Any:
    """The deployment of these options; `quire.scripts.serve.ray` calls it."""
    given |= {"settings": settings, "scale": scale, "engine": engine}
    return plan_of(given, wanted_of(given), scale)


def follow(model: str | None, options: dict[str, Any]) -> None:
    """Serve nobody, and run the steps that process 0 sends."""
    import logging

    from ...serving.follow import follow

    follow(model, progress=logging.getLogger("quire").info, **options)


async def run(wanted: ServerSetup) -> None:
    from ...serving.http.models import Models
    from ...serving.http.server import serve
    from ...serving.http.service import Service

    which = zip(wanted.names or [None], wanted.called, strict=True)
    models = [entry(name, own, wanted.options, wanted.adapters) for name, own in which]
    service = Service(Models(models, wanted.settings.max_loaded), wanted.settings)

    def ready(address: str) -> None:
        print(f"ready: {address}", file=sys.stderr, flush=True)

    await serve(service, ready)


def called(names: list[str], served: list[str]) -> list[tuple[str, ...]]:
    """What clients may call each model; answers use the first."""
    if len(names) <= 1:
        own = names[0] if names else "quill"
        return [tuple(served) or tuple(dict.fromkeys((own, Path(own).name)))]
    if served and len(served) != len(names):
        raise o.UsageError(
            f"--served-model-name is given {len(served)} times for {len(names)} models"
        )
    found = [(name,) for name in served] or [
        tuple(dict.fromkeys((name, Path(name).name))) for name in names
    ]
    every = [name for own in found for name in own]
    if len(set(every)) < len(every):
        raise o.UsageError(
            "two models would have the same name: --served-model-name, once for each, tells "
            "them apart"
        )
    return found


def adapters_of(given: list[str], called: list[tuple[str, ...]], enabled: bool) -> dict[str, str]:
    """The folders of `--lora-modules`, by name."""
    found: dict[str, str] = {}
    for one in given:
        name, _, path = one.partition("=")
        if not name or not path:
            raise o.UsageError(f"--lora-modules is {one!r}; it must be NAME=PATH")
        if name in found or any(name in names for names in called):
            raise o.UsageError(
                f"--lora-modules names {name!r}, which is a model's or another adapter's name"
            )
        found[name] = path
    if found and not enabled:
        raise o.UsageError("--lora-modules needs --enable-lora")
    if found and len(called) > 1:
        raise o.UsageError(
            "--lora-modules needs a single MODEL: it would not say whose the adapters are"
        )
    return found


def entry(
    name: str | None, names: tuple[str, ...], options: dict[str, Any], adapters: dict[str, str]
) -> Any:
    from ...serving.api.lora import LoRARequest
    from ...serving.api.options import make_options
    from ...serving.build import make_engine
    from ...serving.http.models import Model

    chosen = make_options(name, **options)  # wrong options are reported before anything is loaded

    def note(stage: str) -> None:
        import logging

        logging.getLogger("quire").info("%s: %s", names[0], stage)

    wanted = {
        each: LoRARequest(each, number, path)
        for number, (each, path) in enumerate(adapters.items(), 1)
    }

    def make() -> Any:
        engine = make_engine(chosen, note)
        for each in wanted.values():  # one that cannot be read is told at the start
            engine.adapters.get(each)
        return engine

    return Model(names, make, adapters=wanted)
