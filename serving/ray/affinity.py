"""Routing by prefix: a prompt goes to the replica that has computed its beginning, unless that one is too busy."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from .message import Headers

Routing = Literal["prefix", "round-robin"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
CHUNK = 256  # bytes; a prompt's beginnings are remembered in steps of so many
MOST = 64  # beginnings of a prompt
REMEMBERED = 1 << 16  # beginnings in all; the least recently used are forgotten first
SLACK = 4  # requests
KEYS = (b"authorization", b"x-api-key")  # replicas share computed pages among requests of one key only


def limit(least: int) -> int:
    """The most requests with which a replica is still preferred for what it has read, where another has `least`.

    A beginning that everybody sends is read by one replica, then by the next as soon as the first has that much more
    to do than the others; after that all of them have it.
    """
    return least + max(SLACK, least // 2)


class Affinity:
    """Which replica has computed which beginnings. One may have been evicted since; that only costs time."""

    def __init__(self, routing: Routing = "prefix"):
        self.routing = routing
        self.readers: OrderedDict[bytes, dict[str, None]] = OrderedDict()  # by beginning
        self.turns: dict[str, int] = {}  # when each replica was chosen last
        self.count = 0

    def order(self, prefix: Sequence[bytes], loads: Mapping[str, int], tried: Collection[str] = ()) -> list[str]:
        """Best first: not failed on this request, not too busy, longest beginning computed, least busy."""
        most = limit(min(loads.values(), default=0))
        known = self.known(prefix) if self.routing == "prefix" else {}

        def rank(name: str) -> tuple:
            turn = self.turns.get(name, 0)
            if self.routing == "round-robin":
                return name in tried, turn
            fits = loads[name] <= most
            return name in tried, not fits, -known.get(name, 0) if fits else 0, loads[name], turn

        return sorted(loads, key=rank)

    def known(self, prefix: Sequence[bytes]) -> dict[str, int]:
        """How many of a prompt's beginnings each replica has read."""
        found: dict[str, int] = {}
        for count, name in enumerate(prefix):
            readers = self.readers.get(name, ())
            for reader in readers:
                if found.get(reader, 0) == count:
                    found[reader] = count + 1
            if not readers:
                break
        return found

    def sent(self, prefix: Sequence[bytes], replica: str) -> None:
        """The replica will have read it."""
        self.count += 1
        self.turns[replica] = self.count
        for name in reversed(prefix):  # the beginning was used last
            self.readers.setdefault(name, {})[replica] = None
            self.readers.move_to_end(name)
        while len(self.readers) > REMEMBERED:
            self.readers.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the others: they are gone, and what they had read with them."""
        if self.turns.keys() <= set(replicas):
            return
        self.turns = {name: turn for name, turn in self.turns.items() if name in replicas}
        for beginning, readers in list(self.readers.items()):
            left = {name: None for name in readers if name in replicas}
            if left:
                self.readers[beginning] = left
            else:
                del self.readers[beginning]


def beginnings(root: bytes, text: bytes) -> tuple[bytes, ...]:
    """Names for the beginnings of a text, each of which holds the ones before it; `root` keeps tenants apart."""
    found, name = [], root
    for at in range(0, min(len(text) // CHUNK, MOST) * CHUNK, CHUNK):
        name = hashlib.blake2b(text[at : at + CHUNK], digest_size=16, key=name[:64]).digest()
        found.append(name)
    return tuple(found)


class PromptFields(msgspec.Struct):
    """The fields of a body that a prompt begins with, as raw JSON."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


def of_body(headers: Headers, body: bytes) -> tuple[bytes, ...]:
    """The beginnings of what a body asks; none where it is no JSON, which the replica will say."""
    try:
        asked = msgspec.json.decode(body, type=PromptFields)
    except (msgspec.DecodeError, RecursionError):
        return ()
    keys = [value for name, value in headers if name in KEYS]
    parts = [asked.tools, asked.system, asked.instructions, asked.messages or asked.input or asked.prompt]
    text = b"\0".join(map(bytes, parts))
    return beginnings(rooted(*keys, bytes(asked.model), bytes(asked.cache_salt)), text)


def of_tokens(tokens: Iterable[int], salt: str | None) -> tuple[bytes, ...]:
    return beginnings(rooted(repr(salt).encode()), array("i", tokens).tobytes())


def rooted(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
