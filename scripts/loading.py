"""Model loading for commands, which Ctrl-C interrupts at once."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHOW_CURSOR = "\x1b[?25h\n"


def load(model: str | None, **options):
    """Load an `LLM`, showing progress in a terminal."""
    # Covers the import of JAX too, during which Python can lose Ctrl-C or crash.
    with immediate_interrupt():
        from .. import LLM  # not at the top: `--help` must not wait for JAX

        return LLM(model, **options)


@contextmanager
def immediate_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process at once.

    Python's handler would wait until a running compilation returns; a thread that reads the signal
    wake-up socket does not.
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
