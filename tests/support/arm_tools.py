"""A cross compiler and an emulator for ARM; tests that need them are skipped without them."""

import shutil

import pytest

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}


def needed(*names: str) -> None:
    for name in names:
        if not shutil.which(name):
            pytest.skip(f"there is no {name} (on Debian and Ubuntu: apt install {PACKAGES[name]})")
