"""`quire build-kernels`: compile the CPU kernels ahead of time, for container images that are
read-only or have no compiler.
"""

from pathlib import Path
from typing import Annotated

import typer

from . import options as o


def main(
    out: Annotated[
        Path,
        typer.Option(
            help="Output folder; set QUIRE_KERNELS to its path on the machine that runs Quire."
        ),
    ],
    isa: Annotated[
        list[str] | None,
        typer.Option(
            help="Target instruction set; may be given several times.",
            show_default="the best that this machine supports",
        ),
    ] = None,
) -> None:
    """Compile the CPU kernels ahead of time and print the path of each library."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    from ..ops.native import build

    # Instruction sets of all architectures: $CXX may be a cross compiler.
    isas = [name for kind in build.ISAS.values() for name in kind]
    for name in isa or []:
        if name not in isas:
            raise o.UsageError(f"--isa is {name!r}; it can be {', '.join(isas)}")
    try:
        command = build.compiler()
        folder = build.private(out)

        def make(name_and_variant: tuple[str, str]) -> Path:
            return build.built(
                command, *name_and_variant, build.prebuilt(folder, name_and_variant[0])
            )

        libraries = [
            (name, variant) for name in isa or build.choices()[:1] for variant in build.VARIANTS
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for path in threads.map(make, libraries):
                print(path)
    except NotImplementedError as error:
        raise o.UsageError(str(error)) from None
