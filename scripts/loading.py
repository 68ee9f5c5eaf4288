"""Loading of the engine by commands, which Ctrl-C interrupts."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHOW_CURSOR = "\x1b[?25h\n"


def load(model: str | None, **options):
    """An `LLM`, which shows its loading progress in a terminal."""
    # Includes the import of JAX, during which Ctrl-C can be lost or crash.
    with immediate_interrupt():
        from .. import LLM  # not at the top: `--help` must not wait for JAX

        return LLM(model, **options)


@contextmanager
def immediate_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once. Python alone would wait until a compilation ends; a thread
    does not.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait() -> None:
        while numbers := receiver.recv(16):
            if signal.SIGINT in numbers:
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR.encode())  # the progress display hides it
                os._exit(130)

    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="ctrl-c", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        sender.close()
        thread.join()
        receiver.close()
