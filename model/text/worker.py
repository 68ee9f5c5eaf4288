"""A subprocess for work that may hang, exhaust memory or crash."""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any


class WorkerProcess:
    """Runs a Python program that reads one JSON request a line and writes one JSON answer a line.

    The first request starts the process, and it ends with this object. The program limits its own
    time and memory. If the operating system ends it, the next request starts another.

    Args:
        program: arguments for Python: a script's path, or "-m" and a module's name.
    """

    def __init__(self, *program: str | Path):
        self.program = tuple(map(str, program))
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # serialises requests

    def ask(self, request: bytes) -> Any:
        """The answer to a line of JSON; None if the process ended without one."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            try:
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # Ctrl-C: the pending answer would be read by the next request
                self._stop()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            self._stop()
            return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self._stop()
            # -P: do not import from the script's folder. start_new_session: no Ctrl-C.
            self.process = subprocess.Popen(
                [sys.executable, "-P", *self.program],
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
        with contextlib.suppress(BrokenPipeError):  # unread bytes
            assert pipe is not None
            pipe.close()
    process.wait()
