"""Models over several devices need a process that has them: it runs eight_devices*.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick

PARTS = [
    ("eight_devices.py", "logits"), ("eight_devices.py", "not logits"), ("eight_devices_axes.py", ""),
    ("eight_devices_moe.py", ""), ("eight_devices_rounded.py", ""),
    ("eight_devices_ahead.py", ""), ("eight_devices_states.py", ""), ("eight_devices_encoders.py", ""),
    *(("eight_devices_drafts.py", f"plain_decoding[{mesh}") for mesh in ("tensor", "replicas", "context", "stages")),
    ("eight_devices_drafts.py", "plain_decoding[three"), ("eight_devices_drafts.py", "not plain_decoding"),
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("file", "part"), PARTS)
def test_over_eight_devices(file, part):
    here = Path(__file__).parent
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *quick.FLAGS]
    # The scheduler for CPUs would bring the weights of all layers at once, for the sake of its threads.
    flags.append("--xla_cpu_enable_concurrency_optimized_scheduler=false")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib", "-k", part]
    done = subprocess.run(
        [*command, str(here / file)],
        cwd=here.parents[1], env=os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
