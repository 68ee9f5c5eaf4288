"""`quire.scripts.serve.ray:app`: `quire serve` as the application that `serve deploy` and
RayService import.
"""

import shlex
from typing import Any

import typer

from . import command


def app(args: dict[str, str]) -> Any:
    """For `serve deploy` and RayService: `args: {command: MODEL --replicas 3}` holds what follows
    `quire serve`.
    """
    from ...serving.ray import deploy  # not at the top: it needs the extra `ray`

    application = typer.Typer(add_completion=False)
    application.command()(command.main)
    words = [*shlex.split(args["command"]), "--engine", "ray"]
    return deploy.application(
        command.plan(**typer.main.get_command(application).make_context("serve", words).params)
    )
