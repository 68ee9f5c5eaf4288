"""`quire build-kernels`: compile the CPU kernels ahead of time, for an image that is read-only or lacks a compiler."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as o


def main(
    out: Annotated[Path, typer.Option(help="Folder to build into; set QUIRE_KERNELS to it where the kernels run.")],
    isa: Annotated[
        list[str] | None,
        typer.Option(
            help="Instruction set to build for; may be given several times.", show_default="the best of this machine"
        ),
    ] = None,
) -> None:
    """Compile the CPU kernels into a folder, and print the path of each library."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    from ..ops.native import build

    known = [name for kind in build.ISAS.values() for name in kind]  # any: $CXX may be a cross compiler
    for name in isa or []:
        if name not in known:
            raise o.UsageError(f"--isa is {name!r}; it can be {', '.join(known)}")
    try:
        command, folder = build.compiler(), build.private(out)

        def make(what: tuple[str, str]) -> Path:
            return build.built(command, *what, build.prebuilt(folder, what[0]))

        wanted = [(name, variant) for name in isa or build.choices()[:1] for variant in build.VARIANTS]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for path in threads.map(make, wanted):
                print(path)
    except NotImplementedError as error:
        raise o.UsageError(str(error)) from None
