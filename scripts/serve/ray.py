"""`quire.scripts.serve.ray:app`: the application builder that Ray's `serve deploy` and KubeRay's
RayService import.
"""

import shlex
from typing import Any

import typer

from . import command


def app(args: dict[str, str]) -> Any:
    """Build the Ray Serve application.

    Args:
        args: The application's `args` in the Serve config file; `command` holds the arguments of
            `quire serve`, as in `{command: MODEL --replicas 3}`.
    """
    from ...serving.ray import deploy  # not at the top: it needs the extra `ray`

    application = typer.Typer(add_completion=False)
    application.command()(command.main)
    words = [*shlex.split(args["command"]), "--engine", "ray"]
    return deploy.application(
        command.plan(**typer.main.get_command(application).make_context("serve", words).params)
    )
