"""Runs eight_devices*.py in processes with eight simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.tests.support import quick

FILES = sorted(path.name for path in Path(__file__).parent.glob("eight_devices*.py"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("file", FILES)
def test_run_over_eight_devices(file, pytestconfig):
    folder = Path(__file__).parent
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *quick.FLAGS,
    ]
    # XLA's CPU scheduler would fetch the weights of all layers at once for concurrency.
    flags.append("--xla_cpu_enable_concurrency_optimized_scheduler=false")
    markers = ["-m", "not nightly"] if "not nightly" in pytestconfig.option.markexpr else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *markers, str(folder / file)]
    pytest_environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some plugins take long to load
    process = subprocess.run(
        command,
        cwd=folder.parents[1],
        env=os.environ
        | pytest_environment
        | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
