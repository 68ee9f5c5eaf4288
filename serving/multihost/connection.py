"""Messages between the processes of one engine: a kind and values, including arrays."""

import socket
import struct
import threading
from typing import Any

import msgspec
import numpy as np

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 28  # bytes of a message; a longer one is not from Quire
MAX_UNCOMPRESSED = 4096  # bytes; smaller arrays are sent uncompressed
ARRAY = 1  # extension code of msgpack


class ConnectionLost(Exception):
    """The other process is gone, or sends invalid messages."""


class HostConnection:
    """A connection to another process of the engine. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.file = sock.makefile("rb")
        self.lock = threading.Lock()
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
        """Return the next message; raise ConnectionLost if none arrives within `patience`
        seconds.
        """
        try:
            self.sock.settimeout(patience)
            (size,) = LENGTH.unpack(self.read(LENGTH.size))
            if size > MAX_MESSAGE:
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


class BufferDeltas:
    """Step buffers, sent as differences to the last one of their size.

    The difference is small while all sequences decode.
    """

    def __init__(self):
        self.last: dict[tuple[int, ...], np.ndarray] = {}

    def encode(
        self, size: tuple[int, ...], buffer: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Return (indices, values) to send; (None, the whole buffer) if much differs."""
        previous = self.last.get(size)
        self.last[size] = buffer.copy()
        if previous is not None:
            indices = np.flatnonzero(buffer != previous)
            if 2 * len(indices) < len(buffer):
                return indices.astype(np.int32), buffer[indices]
        return None, buffer

    def decode(
        self, size: tuple[int, ...], indices: np.ndarray | None, values: np.ndarray
    ) -> np.ndarray:
        """The inverse of `encode`. Returns a new array, because the device may still read the last
        one.
        """
        buffer = values
        if indices is not None:
            buffer = self.last[size].copy()
            buffer[indices] = values
        self.last[size] = buffer
        return buffer


def frame(kind: str, *values: Any) -> bytes:
    """Return the bytes of a message."""
    body = ENCODER.encode((kind, *values))
    return LENGTH.pack(len(body)) + body


def encode_extension(value: Any) -> Any:
    """Encode types that msgpack does not support."""
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(compress(value)))
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"a message cannot hold {type(value)}")


def compress(array: np.ndarray) -> tuple[Any, ...]:
    """Return (dtype, shape, encoding, bytes...).

    An array of mostly one value is sent as the differing elements, an array of two values as one
    bit per element. A request's logit bias, for example, has one value for most tokens.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    dtype_and_shape = array.dtype.str, array.shape
    if flat.nbytes > MAX_UNCOMPRESSED:
        raw = flat.view(f"u{flat.itemsize}")
        differing = np.flatnonzero(raw != raw[0])
        first = raw[:1].tobytes()
        differing_values = raw[differing]
        if len(differing) * (4 + flat.itemsize) * 8 < flat.nbytes:
            return (
                *dtype_and_shape,
                "few",
                first,
                differing.astype(np.int32).tobytes(),
                differing_values.tobytes(),
            )
        if (differing_values == differing_values[0]).all():
            return (
                *dtype_and_shape,
                "two",
                first,
                differing_values[:1].tobytes(),
                np.packbits(raw != raw[0]).tobytes(),
            )
    return *dtype_and_shape, "all", flat.tobytes()


def decode_extension(code: int, data: memoryview) -> np.ndarray:
    """The inverse of `compress`."""
    if code != ARRAY:
        raise ValueError(f"extension {code} is unknown")
    name, shape, encoding, *buffers = msgspec.msgpack.decode(data)
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"arrays of {name} are not sent")
    if encoding == "all":
        return np.frombuffer(buffers[0], dtype).reshape(shape)
    out = np.empty(shape, dtype)
    flat = out.reshape(-1)
    flat[:] = np.frombuffer(buffers[0], dtype)
    if encoding == "few":
        flat[np.frombuffer(buffers[1], np.int32)] = np.frombuffer(buffers[2], dtype)
    else:
        bits = np.unpackbits(np.frombuffer(buffers[2], np.uint8), count=flat.size)
        flat[bits.view(bool)] = np.frombuffer(buffers[1], dtype)
    return out


ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_extension)
DECODER = msgspec.msgpack.Decoder(ext_hook=decode_extension)
