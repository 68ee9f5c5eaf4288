"""Models over several devices need a process that has them: it runs eight_devices*.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.tests.support import quick

FILES = sorted(path.name for path in Path(__file__).parent.glob("eight_devices*.py"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("file", FILES)
def test_over_eight_devices(file, pytestconfig):
    here = Path(__file__).parent
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *quick.FLAGS,
    ]
    # The scheduler for CPUs would bring the weights of all layers at once, for the sake of its
    # threads.
    flags.append("--xla_cpu_enable_concurrency_optimized_scheduler=false")
    which = ["-m", "not nightly"] if "not nightly" in pytestconfig.option.markexpr else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *which, str(here / file)]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some take long to load
    done = subprocess.run(
        command,
        cwd=here.parents[1],
        env=os.environ | alone | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
