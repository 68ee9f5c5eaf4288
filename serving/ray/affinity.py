"""Prefix-aware routing: a prompt goes to the replica that has computed its prefix, unless that is
too busy.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from .message import Headers

Routing = Literal["prefix", "round-robin"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
CHUNK = 256  # bytes; a prompt's prefixes are recorded in steps of this size
MAX_PREFIXES = 64  # prefixes of a prompt
REMEMBERED = 1 << 16  # prefixes in all, evicted in LRU order
SLACK = 4  # requests
# Replicas share computed pages only among requests with the same key.
KEYS = (b"authorization", b"x-api-key")


def load_limit(min_load: int) -> int:
    """Return the maximum requests of a replica that is preferred for its prefixes, if another has
    `min_load`.

    A prefix of many requests is computed by one replica, then by the next as soon as the first has
    that many more requests than the others, and eventually by all.
    """
    return min_load + max(SLACK, min_load // 2)


class Affinity:
    """Records which replica has computed which prefixes.

    A recorded prefix may have been evicted since, which only costs time.
    """

    def __init__(self, routing: Routing = "prefix"):
        self.routing = routing
        self.readers: OrderedDict[bytes, dict[str, None]] = OrderedDict()  # by prefix
        self.turns: dict[str, int] = {}  # sequence number of each replica's last request
        self.count = 0

    def order(
        self, prefix: Sequence[bytes], loads: Mapping[str, int], tried: Collection[str] = ()
    ) -> list[str]:
        """Return the replicas, best first.

        Criteria, in order: has not failed on this request, is not too busy, has the longest prefix,
        is least busy.
        """
        limit = load_limit(min(loads.values(), default=0))
        num_computed = self.count_computed(prefix) if self.routing == "prefix" else {}

        def rank(name: str) -> tuple:
            turn = self.turns.get(name, 0)
            if self.routing == "round-robin":
                return name in tried, turn
            is_below_limit = loads[name] <= limit
            return (
                name in tried,
                not is_below_limit,
                -num_computed.get(name, 0) if is_below_limit else 0,
                loads[name],
                turn,
            )

        return sorted(loads, key=rank)

    def count_computed(self, prefix: Sequence[bytes]) -> dict[str, int]:
        """Return how many of a prompt's prefixes each replica has computed."""
        counts: dict[str, int] = {}
        for count, name in enumerate(prefix):
            readers = self.readers.get(name, ())
            for reader in readers:
                if counts.get(reader, 0) == count:
                    counts[reader] = count + 1
            if not readers:
                break
        return counts

    def record_sent(self, prefix: Sequence[bytes], replica: str) -> None:
        """Record that a replica will have computed a prompt."""
        self.count += 1
        self.turns[replica] = self.count
        for name in reversed(prefix):  # shorter prefixes count as more recent
            self.readers.setdefault(name, {})[replica] = None
            self.readers.move_to_end(name)
        while len(self.readers) > REMEMBERED:
            self.readers.popitem(last=False)

    def retain(self, replicas: Collection[str]) -> None:
        """Forget replicas that are gone."""
        if self.turns.keys() <= set(replicas):
            return
        self.turns = {name: turn for name, turn in self.turns.items() if name in replicas}
        for beginning, readers in list(self.readers.items()):
            remaining = {name: None for name in readers if name in replicas}
            if remaining:
                self.readers[beginning] = remaining
            else:
                del self.readers[beginning]


def prefix_digests(root: bytes, text: bytes) -> tuple[bytes, ...]:
    """Return digests of the prefixes of a text, shortest first; `root` separates tenants."""
    digests = []
    name = root
    for offset in range(0, min(len(text) // CHUNK, MAX_PREFIXES) * CHUNK, CHUNK):
        name = hashlib.blake2b(
            text[offset : offset + CHUNK], digest_size=16, key=name[:64]
        ).digest()
        digests.append(name)
    return tuple(digests)


class PromptFields(msgspec.Struct):
    """The request fields that make up the start of a prompt, as raw JSON."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


def body_prefix(headers: Headers, body: bytes) -> tuple[bytes, ...]:
    """Return the prefix digests of a request body; none for invalid JSON, which the replica
    reports.
    """
    try:
        fields = msgspec.json.decode(body, type=PromptFields)
    except (msgspec.DecodeError, RecursionError):
        return ()
    keys = [value for name, value in headers if name in KEYS]
    prompt_fields = [
        fields.tools,
        fields.system,
        fields.instructions,
        fields.messages or fields.input or fields.prompt,
    ]
    text = b"\0".join(map(bytes, prompt_fields))
    return prefix_digests(root_digest(*keys, bytes(fields.model), bytes(fields.cache_salt)), text)


def token_prefix(tokens: Iterable[int], salt: str | None) -> tuple[bytes, ...]:
    return prefix_digests(root_digest(repr(salt).encode()), array("i", tokens).tobytes())


def root_digest(*components: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(components), digest_size=16).digest()
