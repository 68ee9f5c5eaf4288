"""The engine of a command, which Ctrl-C ends while it loads."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHOW_CURSOR = "\x1b[?25h\n"


def load(model: str | None, **options):
    """An `LLM`, which shows each stage of its loading at a terminal."""
    with ending_at_once():  # also what is imported: JAX, where Ctrl-C can be lost, or end in a crash
        from .. import LLM  # not at the top: `--help` must not wait for JAX

        return LLM(model, **options)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process at once. Python would wait until a compilation is over; another thread need not."""
    heard, written = socket.socketpair()
    written.setblocking(False)

    def wait() -> None:
        while numbers := heard.recv(16):
            if signal.SIGINT in numbers:
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR.encode())  # the display of progress hides it
                os._exit(130)

    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="ctrl-c", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        written.close()
        thread.join()
        heard.close()
