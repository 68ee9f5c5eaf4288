"""Messages between the processes of one engine: a kind and a few values, arrays among them, over one connection."""

import socket
import struct
import threading
from typing import Any

import msgspec
import numpy as np

LENGTH = struct.Struct("<I")
MOST = 1 << 28  # bytes of a message; a longer one is not from Quire
SMALL = 4096  # bytes; smaller arrays are sent as they are
ARRAY = 1  # the code of an extension of msgpack


class ConnectionLost(Exception):
    """The other process has gone, or sends what is no message."""


class HostConnection:
    """A connection to another process of the engine. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.file, self.lock = sock, sock.makefile("rb"), threading.Lock()
        self.peer = str(sock.getpeername()[0])

    def send(self, kind: str, *values: Any) -> None:
        self.send_frame(frame(kind, *values))

    def send_frame(self, data: bytes) -> None:
        try:
            with self.lock:
                self.sock.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"nothing can be sent to it: {error.strerror or error}") from None

    def receive(self, patience: float) -> tuple[str, list[Any]]:
        """The next message; raises `ConnectionLost` where none comes within so many seconds."""
        try:
            self.sock.settimeout(patience)
            (size,) = LENGTH.unpack(self.read(LENGTH.size))
            if size > MOST:
                raise ConnectionLost(f"it sent a message of {size} bytes")
            kind, *values = DECODER.decode(self.read(size))
        except TimeoutError:
            raise ConnectionLost(f"nothing was heard of it for {patience:g} seconds") from None
        except OSError as error:
            raise ConnectionLost(f"its connection broke: {error.strerror or error}") from None
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise ConnectionLost(f"it sent what is no message: {error}") from None
        return kind, values

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise ConnectionLost("its connection was closed")
        return data

    def close(self) -> None:
        self.file.close()
        self.sock.close()


class Changes:
    """Buffers of a few sizes, sent as the difference to the last one: it is small while all sequences decode."""

    def __init__(self):
        self.last: dict[tuple[int, ...], np.ndarray] = {}

    def of(self, size: tuple[int, ...], buffer: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """(where, what) to send; the whole buffer (None, what) if much differs."""
        before, self.last[size] = self.last.get(size), buffer.copy()
        if before is not None:
            where = np.flatnonzero(buffer != before)
            if 2 * len(where) < len(buffer):
                return where.astype(np.int32), buffer[where]
        return None, buffer

    def read(self, size: tuple[int, ...], where: np.ndarray | None, what: np.ndarray) -> np.ndarray:
        """The inverse; a new array each time, since the device may still read the last."""
        buffer = what
        if where is not None:
            buffer = self.last[size].copy()
            buffer[where] = what
        self.last[size] = buffer
        return buffer


def frame(kind: str, *values: Any) -> bytes:
    """A message as it is sent."""
    body = ENCODER.encode((kind, *values))
    return LENGTH.pack(len(body)) + body


def encode(value: Any) -> Any:
    """Encode the types that msgpack does not know."""
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(shortened(value)))
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"a message cannot hold {type(value)}")


def shortened(array: np.ndarray) -> tuple[Any, ...]:
    """(dtype, shape, how, bytes...): only the few that differ from the first number, or a bit each if there are two.

    A request's bias has a number for each token of the vocabulary, most of which are alike.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    head = array.dtype.str, array.shape
    if flat.nbytes > SMALL:
        raw = flat.view(f"u{flat.itemsize}")
        others = np.flatnonzero(raw != raw[0])
        first, rest = raw[:1].tobytes(), raw[others]
        if len(others) * (4 + flat.itemsize) * 8 < flat.nbytes:
            return *head, "few", first, others.astype(np.int32).tobytes(), rest.tobytes()
        if (rest == rest[0]).all():
            return *head, "two", first, rest[:1].tobytes(), np.packbits(raw != raw[0]).tobytes()
    return *head, "all", flat.tobytes()


def decode(code: int, data: memoryview) -> np.ndarray:
    """The inverse of `shortened`."""
    if code != ARRAY:
        raise ValueError(f"extension {code} is unknown")
    name, shape, how, *parts = msgspec.msgpack.decode(data)
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"arrays of {name} are not sent")
    if how == "all":
        return np.frombuffer(parts[0], dtype).reshape(shape)
    out = np.empty(shape, dtype)
    flat = out.reshape(-1)
    flat[:] = np.frombuffer(parts[0], dtype)
    if how == "few":
        flat[np.frombuffer(parts[1], np.int32)] = np.frombuffer(parts[2], dtype)
    else:
        bits = np.unpackbits(np.frombuffer(parts[2], np.uint8), count=flat.size)
        flat[bits.view(bool)] = np.frombuffer(parts[1], dtype)
    return out


ENCODER = msgspec.msgpack.Encoder(enc_hook=encode)
DECODER = msgspec.msgpack.Decoder(ext_hook=decode)
