"""A process that does what may hang, grow or crash: there it hurts nobody else."""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any


class WorkerProcess:
    """Runs a script that reads one JSON request a line and writes one JSON answer a line.

    It is started by the first request and ends with this object. The script bounds its own time and memory: the
    operating system then ends it, and the next request starts another.
    """

    def __init__(self, script: Path):
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one request at a time goes through the pipe

    def ask(self, request: bytes) -> Any:
        """The answer to a line of JSON; None if the worker was ended over it."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            try:
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # Ctrl-C: the answer that comes now belongs to nobody
                self._stop()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            self._stop()
            return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self._stop()
            # -P: the script's folder is not a place to import from. A session of its own: Ctrl-C is not for it.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self.process)
        return self.process

    def _stop(self) -> None:
        if self.process is not None:
            self._finalizer()
            self.process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # unwritten bytes for a worker that is gone
            assert pipe is not None
            pipe.close()
    process.wait()
