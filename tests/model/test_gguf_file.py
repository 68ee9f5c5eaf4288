"""GGUF files written by the format's own package, and files that are damaged, wrong or hostile."""

import math
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from quire.model.config import ModelError
from quire.model.gguf.blocks import TYPES
from quire.model.gguf.file import read_file
from quire.tests.support import tiny_gguf
from quire.tests.support.cases import cases

NUMBERS = {
    GGUFValueType.UINT8: np.uint8,
    GGUFValueType.INT8: np.int8,
    GGUFValueType.UINT16: np.uint16,
    GGUFValueType.INT16: np.int16,
    GGUFValueType.UINT32: np.uint32,
    GGUFValueType.INT32: np.int32,
    GGUFValueType.FLOAT32: np.float32,
    GGUFValueType.UINT64: np.uint64,
    GGUFValueType.INT64: np.int64,
    GGUFValueType.FLOAT64: np.float64,
    GGUFValueType.BOOL: np.bool_,
}
TEXTS = ["", "x", "Ünïcödé", "東京都", "🦙" * 50, "a\0b\n\u2028", "▁the", "x" * 5000]
KINDS = list(TYPES.values())


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path, values=(), tensors=(), alignment: int | None = None, **options):
    """A file of (key, value, type, type of elements) and (name, kind, blocks [rows..., blocks,
    bytes]).
    """
    writer = GGUFWriter(path, "llama", **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value, kind, sub in values:
        writer.add_key_value(key, value, kind, sub)
    for name, kind, blocks in tensors:
        *rows, count, _ = blocks.shape
        writer.add_tensor(
            name,
            blocks.reshape(*rows, -1),
            raw_shape=None if not kind.is_plain else (*rows, count * kind.nbytes),
            raw_dtype=GGMLQuantizationType(kind.number),
        )
    finish(writer)
    return path


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def entry(name: str = "x", sizes=(32, 2), kind: int = 8, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, start)


def raw(
    pairs=(), entries=(), data: bytes = b"", version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    """The bytes of a file made by hand; by default the tensor of `entry` has 68 bytes."""
    tensors, keys = counts or (len(entries), len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    return header + bytes(-len(header) % 32) + data


def refused(path, *words: str) -> str:
    """What the error says: one line of moderate length, with the file and these words in it."""
    with pytest.raises(ModelError) as caught:
        read_file(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(path.parent), "")) < 1200
    for word in (path.name.split("-000")[0], *words):
        assert word in message
    return message


def drawn(rng, kind: GGUFValueType):
    """A value of a type."""
    if kind is GGUFValueType.STRING:
        return rng.choice(TEXTS)
    if kind is GGUFValueType.BOOL:
        return rng.random() < 0.5
    dtype = NUMBERS[kind]
    if issubclass(dtype, np.floating):
        return float(dtype(rng.choice([0.0, -0.0, math.inf, -math.inf, 1e-6, rng.gauss(0, 1e4)])))
    least = int(np.iinfo(dtype).min)
    most = int(np.iinfo(dtype).max)
    return rng.choice([least, most, 0, rng.randint(least, most)])


def read_as(value, kind: GGUFValueType):
    """What is read of an array of a type."""
    return value if kind is GGUFValueType.STRING else np.array(value, NUMBERS[kind])


def check_same(found, expected) -> None:
    """The same value and the same type, arrays by their elements."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            check_same(mine, other)
    else:
        assert repr(found) == repr(expected)


@pytest.mark.random
def test_metadata(tmp_path):
    for seed in range(cases(50)):
        rng = random.Random(seed)
        values = []
        expected = {"general.architecture": "llama"}
        for number in range(40):
            kind = rng.choice([*NUMBERS, GGUFValueType.STRING])
            key = f"{rng.choice(TEXTS[:-1])}.{number}"
            if rng.random() < 0.5:
                value = [drawn(rng, kind) for _ in range(rng.choice([1, 2, 500]))]
                values.append((key, value, GGUFValueType.ARRAY, kind))
                expected[key] = read_as(value, kind)
            else:
                value = drawn(rng, kind)
                values.append((key, value, kind, None))
                expected[key] = value
        found = read_file(write(tmp_path / "x.gguf", values)).metadata
        assert list(found) == list(expected)
        for key, value in expected.items():
            check_same(found[key], value)


def test_arrays_in_arrays(tmp_path):
    def nested(depth: int) -> bytes:
        return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQ2H", 2, 2, 7, 8)

    ragged = [[[1, 2], [3]], [[4]]]
    path = write(tmp_path / "x.gguf", [("a", ragged, GGUFValueType.ARRAY, None)])
    found = read_file(path).metadata["a"]
    check_same(
        found, [[np.array([1, 2], np.int32), np.array([3], np.int32)], [np.array([4], np.int32)]]
    )
    path.write_bytes(raw([pair("empty", 9, struct.pack("<IQ", 9, 0))]))
    check_same(read_file(path).metadata["empty"], [])
    path.write_bytes(raw([pair("deep", 9, nested(8))]))
    found = read_file(path).metadata["deep"]
    for _ in range(7):
        assert isinstance(found, list)
        (found,) = found
    check_same(found, np.array([7, 8], np.uint16))
    for depth in (9, 100_000):
        path.write_bytes(raw([pair("deep", 9, nested(depth))]))
        refused(path, "'deep'", "9 deep", "at most 8")


def test_a_vocabulary(tmp_path):
    """Hundreds of thousands of texts, scores and types."""
    words = [f"▁word{number}" if number % 3 else f"w{number}" for number in range(100_000)]
    array = struct.pack("<IQ", 8, len(words)) + b"".join(map(text, words))
    scores = -np.arange(100_000, dtype=np.float32)
    path = tmp_path / "x.gguf"
    path.write_bytes(
        raw(
            [
                pair("tokens", 9, array),
                pair("scores", 9, struct.pack("<IQ", 6, 100_000) + bytes(scores)),
            ]
        )
    )
    found = read_file(path).metadata
    assert found["tokens"] == words
    check_same(found["scores"], scores)


def random_tensors(rng, kinds, most: int = 4):
    for number, kind in enumerate(kinds):
        shape = [int(rng.integers(1, most)) for _ in range(number % 4)]
        shape += [int(rng.integers(1, 4)) if not kind.is_plain else 5, kind.nbytes]
        yield f"blk.{number}.{kind.name}", kind, rng.integers(0, 256, shape, np.uint8)


@pytest.mark.random
@pytest.mark.parametrize("version", [2, 3])
def test_tensors(tmp_path, version):
    for seed in range(cases(20, least=2)):
        rng = np.random.default_rng([seed, version])
        tensors = list(random_tensors(rng, rng.permutation(KINDS)))
        alignment = int(rng.choice([8, 32, 64, 4096]))
        path = write(tmp_path / "x.gguf", tensors=tensors, alignment=alignment)
        with path.open("r+b") as file:
            file.seek(4)
            file.write(bytes([version]))
        found = read_file(path)
        assert found.metadata == {"general.architecture": "llama", "general.alignment": alignment}
        assert list(found.tensors) == [name for name, *_ in tensors]
        for name, kind, blocks in tensors:
            check_tensor(found.tensors[name], name, kind, blocks)


def check_tensor(tensor, name, kind, blocks) -> None:
    *rows, count, _ = blocks.shape
    assert (tensor.name, tensor.kind, tensor.shape) == (name, kind, (*rows, count * kind.elements))
    assert tensor.nbytes == blocks.nbytes
    mapped = tensor.blocks()
    assert not mapped.flags.writeable
    assert not mapped.flags.owndata
    np.testing.assert_array_equal(mapped, blocks)
    expected = decoded(kind, blocks)
    for values in (tensor.read(), tensor.mapped()):
        assert values.dtype == tensor.dtype == expected.dtype
        assert values.shape == tensor.shape
        check_values(kind, values, expected)
    assert tensor.mapped().flags.writeable is not kind.is_plain
    for index in range(rows[0] if rows else 0):
        cut = tensor.cut(index)
        assert cut.shape == (1, *tensor.shape[1:])
        check_values(kind, cut.read(), expected[index : index + 1])
        np.testing.assert_array_equal(cut.blocks(), blocks[index : index + 1])


def check_values(kind, values, expected) -> None:
    """Equal: those that are stored as they are in every bit, decoded ones save for which NaN it is.

    A Q1_0 is a sum, in which what is infinite is lost.
    """
    assert values.shape == expected.shape
    if kind.name == "Q1_0":
        values, expected = (
            np.where(np.isfinite(each), each, np.nan) for each in (values, expected)
        )
    if kind.is_plain:
        assert values.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_equal(values, expected)


def decoded(kind, blocks) -> np.ndarray:
    *rows, count, _ = blocks.shape
    if kind.is_plain:
        return blocks.view(kind.dtype).reshape(*rows, count)
    with np.errstate(all="ignore"):
        return tiny_gguf.decoded(blocks.reshape(*rows, -1), GGMLQuantizationType(kind.number))


def test_values_that_the_package_rounds(tmp_path):
    """Values in, codes in the file, and the package's own values out, close to those that went
    in.
    """
    rng = np.random.default_rng(0)
    path = tmp_path / "x.gguf"
    dense = rng.standard_normal((6, 512)).astype(np.float32)
    writer = GGUFWriter(path, "llama")
    expected = {}
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "MXFP4", "F16", "F32"):
        kind = GGMLQuantizationType[name]
        data = quants.quantize(dense, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[name] = quants.dequantize(data, kind)
    finish(writer)
    found = read_file(path).tensors
    for name, values in expected.items():
        read = found[name].read().astype(np.float32)
        np.testing.assert_array_equal(read, values)
        assert np.abs(read - dense).mean() < (0.2 if "4" in name else 0.05)


def test_no_axes(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw(entries=[entry("scale", (), 0)], data=struct.pack("<f", 2.5)))
    tensor = read_file(path).tensors["scale"]
    assert tensor.shape == ()
    assert tensor.read() == tensor.mapped() == 2.5
    assert tensor.blocks().shape == (1, 4)


def test_a_row_of_blocks_is_not_cut(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(
        raw(entries=[entry("x", (64,)), entry("y", (17,), 0, 96)], data=bytes(96 + 68))
    )
    found = read_file(path).tensors
    with pytest.raises(ModelError, match="'x' of type Q8_0 has the shape"):
        found["x"].cut(0)
    assert found["y"].cut(3).read().shape == (1,)


def test_a_large_tensor_is_read_in_strips(tmp_path):
    """Little more than the result is in memory at once, and the last strip is a short one."""
    kind = TYPES[12]
    blocks = np.random.default_rng(0).integers(0, 256, (1, 16_001, kind.nbytes), np.uint8)
    blocks[..., [1, 3]] &= 0x3F  # finite scales
    tensor = read_file(write(tmp_path / "x.gguf", tensors=[("x", kind, blocks)])).tensors["x"]
    tensor.read()
    tracemalloc.start()
    try:
        values = tensor.read()
        assert tracemalloc.get_traced_memory()[1] < values.nbytes + (4 << 20) < 1.3 * values.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(values, decoded(kind, blocks))


def test_file_that_shrinks_while_it_is_read(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "x.gguf"
    found = read_file(write(path, tensors=random_tensors(rng, KINDS))).tensors
    path.write_bytes(path.read_bytes()[:100])
    for tensor in found.values():
        for work in (tensor.read, tensor.mapped, tensor.blocks):
            with pytest.raises(ModelError, match="truncated"):
                work()
    path.unlink()
    for tensor in found.values():
        for work in (tensor.read, tensor.mapped, tensor.blocks):
            with pytest.raises(ModelError, match="cannot be read"):
                work()


# Split files.


def write_parts(folder, count: int = 3):
    """Parts of two tensors each, and what they hold."""
    tensors = list(random_tensors(np.random.default_rng(0), KINDS[: 2 * count]))
    write(folder / "m.gguf", [("a", 5, GGUFValueType.UINT8, None)], tensors, split_max_tensors=2)
    return [folder / f"m-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)], tensors


def test_split_files(tmp_path):
    paths, tensors = write_parts(tmp_path)
    for path in paths:
        found = read_file(path)
        assert (
            found.metadata["general.architecture"],
            found.metadata["a"],
            found.metadata["split.no"],
        ) == (
            "llama",
            5,
            0,
        )
        assert list(found.tensors) == [name for name, *_ in tensors]
        for number, (name, kind, blocks) in enumerate(tensors):
            assert found.tensors[name].file == paths[number // 2]
            check_tensor(found.tensors[name], name, kind, blocks)


def test_first_part_without_tensors(tmp_path):
    """As llama.cpp splits files when it is asked to."""
    paths, _ = write_parts(tmp_path, 2)
    keys = [
        pair("split.count", 2, b"\2\0"),
        pair("split.no", 2, b"\0\0"),
        pair("split.tensors.count", 5, b"\2\0\0\0"),
    ]
    paths[0].write_bytes(raw(keys))
    change(paths[1], "split.tensors.count", 2)
    for path in paths:
        assert len(read_file(path).tensors) == 2


def change(path, key: str, value: int) -> None:
    """Another number of two bytes in place of a key's."""
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + struct.pack("<H", value) + data[at + 2 :])


def test_missing_part(tmp_path):
    for number in range(3):
        paths, _ = write_parts(tmp_path)
        paths[number].unlink()
        for path in paths:
            refused(path, paths[number].name, "does not exist")
    refused(tmp_path / "nothing.gguf", "does not exist")


@pytest.mark.parametrize(
    ("key", "value"), [("split.no", 0), ("split.no", 2), ("split.count", 2), ("split.count", 4), ("split.count", 0),
                       ("split.tensors.count", 5), ("split.tensors.count", 7)],
)  # fmt: skip
def test_contradictory_part(tmp_path, key, value):
    paths, _ = write_parts(tmp_path)
    change(paths[1], key, value)
    for path in paths:
        refused(path, paths[1].name, key, f"= {value}")


def test_parts_by_another_name(tmp_path):
    paths, _ = write_parts(tmp_path)
    refused(
        paths[0].rename(tmp_path / "other.gguf"),
        "split.count = 3",
        "part 1 of 1",
        "NAME-00001-of-00003.gguf",
    )
    refused(paths[2].rename(paths[0]), "split.no = 2", "part 1 of 3")


def test_a_part_that_is_not_split(tmp_path):
    path = write(tmp_path / "m-00002-of-00003.gguf")
    refused(path, "split.count = 0", "part 2 of 3")
    assert read_file(path.rename(tmp_path / "m-00001-of-00001.gguf")).tensors == {}


def test_merged_file(tmp_path):
    """llama.cpp leaves a count of 0 where it has merged the parts."""
    path = write(tmp_path / "m.gguf", [("split.count", 0, GGUFValueType.UINT16, None)])
    assert read_file(path).metadata["split.count"] == 0


def test_a_tensor_in_two_parts(tmp_path):
    paths, tensors = write_parts(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    change(paths[2], "split.no", 2)
    refused(paths[0], tensors[2][0], "is in both", paths[1].name, paths[2].name)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize(
    ("kind", "data", "shown"),
    [(8, text("3\n"), r"'3\n'"), (12, struct.pack("<d", 3), "3.0"), (7, b"\1", "True"), (11, b"\xff" * 8, "-1"),
     (9, struct.pack("<IQ", 0, 500) + bytes(500), "an array of 500")],
)  # fmt: skip
def test_split_keys_that_are_no_counts(tmp_path, key, kind, data, shown):
    right = {"split.no": 0, "split.count": 2, "split.tensors.count": 0}
    for number in (0, 1):
        keys = [
            pair(name, 2, struct.pack("<H", value))
            for name, value in (right | {"split.no": number}).items()
        ]
        if number == 0:
            keys = [pair(key, kind, data) if text(key) in one else one for one in keys]
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(raw(keys))
    for number in (1, 2):
        refused(
            tmp_path / f"m-0000{number}-of-00002.gguf", f"{key} = {shown}", "m-00001-of-00002.gguf"
        )


# Damaged, wrong and hostile files.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["is empty"]), (b"GG", ["truncated", "2 bytes"]), (b"GGUF\3\0\0\0", ["truncated", "8 bytes"]),
        (b"version https:" + b"//git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32, ["git-lfs pointer"]),
        (b"GGML" + bytes(100), ["no GGUF file", "b'GGML'"]), (b"PK\3\4" + bytes(100), ["no GGUF file"]),
        (raw(version=1), ["version 1", "2 or 3"]), (raw(version=4), ["version 4"]), (raw(version=0), ["version 0"]),
        (raw(version=3 << 24), ["big endian", "version 3"]), (raw(version=2**32 - 1), ["version 4294967295"]),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)  # fmt: skip
def test_files_of_another_kind(tmp_path, data, words):
    (tmp_path / "x.gguf").write_bytes(data)
    refused(tmp_path / "x.gguf", *words)


def test_big_endian_as_it_is_written(tmp_path):
    refused(write(tmp_path / "x.gguf", endianess=gguf.GGUFEndian.BIG), "big endian")


def test_not_a_file(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    refused(tmp_path / "x.gguf", "cannot be read")


UNKNOWN = [4, 5, 9, 15, 31, 36, 99, 2**32 - 1]
HUGE = [2**31, 2**32 - 1, 2**40, 2**61 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("size", HUGE)
def test_headers_that_lie(tmp_path, size):
    """No claim is believed before it is held against the file's size; nothing of the size claimed
    is made.
    """
    path = tmp_path / "x.gguf"
    many = struct.pack("<Q", size)
    lies = [
        (raw(counts=(size, 0)), "tensors"), (raw(counts=(0, size)), "keys"),
        (raw([many + b"x"]), "the name of key 0"), (raw([pair("k", 8, many)]), "'k'"),
        *((raw([pair("k", 9, struct.pack("<I", kind) + many)]), "'k'") for kind in range(13)),
        (raw([pair("k", 9, struct.pack("<IQ", 9, 1) + struct.pack("<I", 9) + many)]), "'k'"),
        (raw([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + many)]), "'k'"),
        (raw(entries=[many + b"x" * 24]), "the name of tensor 0"),
        (raw(entries=[entry(sizes=(32, size))], data=bytes(68)), "'x'"),
        (raw(entries=[entry(sizes=(size // 32 * 32, size, size, size))], data=bytes(68)), "'x'"),
        (raw(entries=[entry(start=size // 32 * 32)], data=bytes(68)), "'x'"),
    ]  # fmt: skip
    for data, word in lies:
        path.write_bytes(data)
        tracemalloc.start()
        try:
            assert "truncated" in refused(path, word)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("pairs", "entries", "words"),
    [
        ([pair("k", 7, b"\2")], [], ["'k'", "2 as a boolean", "0 or 1"]),
        ([pair("k", 9, struct.pack("<IQ", 7, 3) + b"\0\1\xff")], [], ["'k'", "255 as a boolean"]),
        ([pair("k", 13, bytes(8))], [], ["'k'", "type 13", "0 to 12"]),
        ([pair("k", 9, struct.pack("<IQ", 77, 0))], [], ["'k'", "type 77"]),
        ([pair("k", 8, text(b"ab\xff"))], [], ["'k'", r"b'ab\xff'", "UTF-8"]),
        ([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text(b"\xe6\x9d"))], [], ["'k'", "UTF-8"]),
        ([text(b"\x80") + bytes(5)], [], ["the name of key 0", "UTF-8"]),
        ([pair("a\nb", 0, b"\0"), pair("a\nb", 0, b"\0")], [], [r"'a\nb' twice"]),
        ([pair("k" * 3000, 0, b"\0")] * 2, [], ["twice"]),
        *(([pair("general.alignment", 4, struct.pack("<I", n))], [], [f"general.alignment = {n};", "power of two"])
          for n in (0, 3, 33, 2**32 - 1)),
        ([pair("general.alignment", 8, text("32"))], [], ["general.alignment = '32'"]),
        ([pair("general.alignment", 6, struct.pack("<f", 32))], [], ["general.alignment = 32.0"]),
        ([pair("general.alignment", 4, struct.pack("<I", 64))], [entry(start=32)], ["'x'", "byte 32", "64"]),
        ([], [entry(), entry()], ["'x' twice"]),
        ([], [entry(sizes=(32, 1, 1, 1, 1))], ["'x'", "5 dimensions", "at most 4"]),
        ([], [text("x") + struct.pack("<I", 2**32 - 1) + bytes(32)], ["'x'", "4294967295 dimensions"]),
        ([], [entry(sizes=(32, 0))], ["'x'", "[32, 0]", "at least 1"]),
        ([], [entry(sizes=(0, 2**63))], ["'x'", "at least 1"]),
        *(([], [entry(kind=kind)], ["'x'", f"type {kind},", "Q4_0 (2)"]) for kind in UNKNOWN),
        ([], [entry(sizes=(33, 2))], ["'x'", "Q8_0", "33 elements", "divide by 32"]),
        ([], [entry(sizes=(), kind=12)], ["'x'", "Q4_K", "1 elements", "divide by 256"]),
        ([], [entry(sizes=(128,), kind=12)], ["'x'", "128 elements", "divide by 256"]),
        ([], [entry(start=16)], ["'x'", "byte 16", "32"]),
        ([], [entry("a"), entry("b", start=64)], ["'b' begins", "'a' ends", "overlap"]),
        ([], [entry("a", start=64), entry("b")], ["'a' begins", "'b' ends", "overlap"]),
        ([], [entry("a"), entry("b")], ["overlap"]),
        ([], [entry(sizes=(32, 8))], ["'x'", "truncated", "(8, 32)"]),
        ([], [entry(start=256)], ["'x'", "truncated"]),
        ([], [entry(b"\xff")], ["the name of tensor 0", "UTF-8"]),
    ],
)  # fmt: skip
def test_values_that_are_wrong(tmp_path, pairs, entries, words):
    (tmp_path / "x.gguf").write_bytes(raw(pairs, entries, bytes(256)))
    refused(tmp_path / "x.gguf", *words)


def small_file(path):
    """All kinds of values and tensors in some three thousand bytes; how many are the header."""
    kinds = [TYPES[number] for number in (0, 30, 2, 8, 12, 14, 20, 16, 27)]
    values = [
        ("general.name", "Ünï", GGUFValueType.STRING, None),
        ("f", 0.5, GGUFValueType.FLOAT64, None),
        ("u", 2**64 - 1, GGUFValueType.UINT64, None),
        ("ok", True, GGUFValueType.BOOL, None),
        ("a", [1, 2, 3], GGUFValueType.ARRAY, GGUFValueType.UINT16),
        ("t", ["x", "yé", ""], GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("b", [True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL),
        ("n", [[1], [2, 3]], GGUFValueType.ARRAY, None),
    ]
    tensors = list(random_tensors(np.random.default_rng(0), kinds, most=3))
    write(path, values, tensors, alignment=32)
    return path.read_bytes(), min(tensor.start for tensor in read_file(path).tensors.values())


def mutated(rng, whole: bytes, header: int) -> bytes:
    """Bytes changed, cut, repeated or left out, or numbers written over; mostly in the header."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(min(header if rng.random() < 0.95 else len(data), len(data)) or 1)
        what = rng.randrange(7)
        if what == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif what == 1:
            data[at : at + 1] = bytes([(data[at : at + 1] or b"\0")[0] ^ 1 << rng.randrange(8)])
        elif what == 2:
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice([0, 1, len(data), len(data) - at, len(data) + 1, *HUGE])
            )
        elif what == 3:
            data[at : at + 4] = struct.pack(
                "<I", rng.choice([0, 1, 7, 8, 9, 12, 13, 2**31, 2**32 - 1])
            )
        elif what == 4:
            del data[at : at + rng.choice([1, 4, 8, 100])]
        elif what == 5:
            data[at:at] = data[at : at + rng.choice([1, 4, 8, 100])]
        else:
            del data[at if rng.random() < 0.5 else rng.randrange(len(data) or 1) :]
    return bytes(data)


@pytest.mark.random
def test_any_damage(tmp_path):
    """A file that is damaged anywhere is refused, or is one of which all can be read."""
    path = tmp_path / "x.gguf"
    whole, header = small_file(path)
    read = 0
    for seed in range(cases(20_000)):
        data = mutated(random.Random(seed), whole, header)
        path.unlink()  # a mapping may still be there of the one before
        path.write_bytes(data)
        watched = seed % 10 == 0
        if watched:
            tracemalloc.start()
        try:
            found = read_file(path)
        except ModelError as error:
            found = None
            message = str(error)
            assert path.name in message
            assert "\n" not in message
            assert len(message) < 1500
        finally:
            if watched:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 20 * len(whole)
        if found is not None:
            read += 1
            check_sound(found, path, len(data))
    # neither refusals alone nor damage that changes nothing
    assert 0.05 < read / cases(20_000) < 0.7


def check_sound(found, path, size: int) -> None:
    """Every key is of a type that there is, and every tensor lies in the file, alone, and can
    be read.
    """
    assert all(
        isinstance(value, str | int | float | np.ndarray | list)
        for value in found.metadata.values()
    )
    end = 0
    for tensor in sorted(found.tensors.values(), key=lambda tensor: tensor.start):
        assert tensor.file == path
        assert end <= tensor.start
        end = tensor.start + tensor.nbytes
        assert end <= size
        assert tensor.read().shape == tensor.shape
        assert tensor.blocks().nbytes == tensor.nbytes


@pytest.mark.random
def test_truncated_anywhere(tmp_path):
    path = tmp_path / "x.gguf"
    whole, header = small_file(path)
    last = max(read_file(path).tensors.values(), key=lambda tensor: tensor.start)
    end = last.start + last.nbytes  # padding may follow
    cuts = {*range(header if cases(100) == 100 else 60), end - 1}
    for cut in cuts | {random.Random(0).randrange(end) for _ in range(200)}:
        path.unlink()
        path.write_bytes(whole[:cut])
        refused(path, "truncated" if cut else "empty")
    path.write_bytes(whole[:end])
    assert read_file(path).tensors[last.name].read().shape == last.shape


@pytest.mark.parametrize("kind", [0, 2, 7, 8, 9])
def test_values_take_little_memory(tmp_path, kind):
    """A file that is nothing but tiny values takes some times its size."""
    path = tmp_path / "x.gguf"
    one = {8: text("ab"), 9: struct.pack("<IQB", 0, 1, 5)}.get(kind, bytes(2))
    count = 300_000 // len(one)
    path.write_bytes(raw([pair("k", 9, struct.pack("<IQ", kind, count) + one * count)]))
    tracemalloc.start()
    try:
        assert len(read_file(path).metadata["k"]) == count
        assert tracemalloc.get_traced_memory()[1] < 15 * path.stat().st_size
    finally:
        tracemalloc.stop()
