"""A chat template: a conversation in, the prompt that the model was trained on out, in bounded time and memory."""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("template_worker.py")


class PromptError(ValueError):
    """A text or a conversation that cannot become a prompt; one line says why."""


class ChatTemplate:
    """A Jinja template with the variables that do not change between conversations (the special tokens).

    The template runs in a process of its own, started by the first `render` and ended with this object:
    template_worker.py says why.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None):
        self.source = source
        self.variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one conversation at a time goes through the pipe

    def render(self, messages: Sequence[Any], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt of a conversation; `variables` (tools, enable_thinking, ...) are the template's own."""
        context = {
            "tools": None,
            "documents": None,
            **self.variables,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps([self.source, context], ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"chat template: the conversation must be plain JSON: {error}") from None
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise PromptError(f"chat template: {answer['error']}")
        return answer["text"]

    def _ask(self, request: bytes) -> dict[str, str]:
        process = self._worker()
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        try:
            process.stdin.write(request)
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
        return {"error": "the template was stopped: it used too much time or memory"}

    def _worker(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            # -P: the worker's folder is not a place to import from. A session of its own: Ctrl-C is not for it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # unwritten bytes for a worker that is gone
            assert pipe is not None
            pipe.close()
    process.wait()
