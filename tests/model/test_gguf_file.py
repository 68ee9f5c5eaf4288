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

NUMPY_TYPES = {
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
    """Write a GGUF file.

    Args:
        values: metadata as (key, value, type, element type).
        tensors: (name, kind, blocks [rows..., blocks, bytes]).
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
    """Bytes of a handwritten file; the default tensor of `entry` has 68 bytes."""
    tensors, keys = counts or (len(entries), len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    return header + bytes(-len(header) % 32) + data


def assert_rejected(path, *words: str) -> str:
    """Check that reading raises a short one-line error with the file's name and `words`."""
    with pytest.raises(ModelError) as caught:
        read_file(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(path.parent), "")) < 1200
    for word in (path.name.split("-000")[0], *words):
        assert word in message
    return message


def random_value(rng, kind: GGUFValueType):
    """A random value of a metadata type."""
    if kind is GGUFValueType.STRING:
        return rng.choice(TEXTS)
    if kind is GGUFValueType.BOOL:
        return rng.random() < 0.5
    dtype = NUMPY_TYPES[kind]
    if issubclass(dtype, np.floating):
        return float(dtype(rng.choice([0.0, -0.0, math.inf, -math.inf, 1e-6, rng.gauss(0, 1e4)])))
    minimum = int(np.iinfo(dtype).min)
    maximum = int(np.iinfo(dtype).max)
    return rng.choice([minimum, maximum, 0, rng.randint(minimum, maximum)])


def read_as(value, kind: GGUFValueType):
    """The value that the reader returns for an array."""
    return value if kind is GGUFValueType.STRING else np.array(value, NUMPY_TYPES[kind])


def check_same(actual, expected) -> None:
    """Check that values and types are equal, element by element in arrays."""
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            check_same(actual_item, expected_item)
    else:
        assert repr(actual) == repr(expected)


@pytest.mark.random
def test_random_metadata_is_read_back(tmp_path):
    for seed in range(cases(50)):
        rng = random.Random(seed)
        values = []
        expected = {"general.architecture": "llama"}
        for number in range(40):
            kind = rng.choice([*NUMPY_TYPES, GGUFValueType.STRING])
            key = f"{rng.choice(TEXTS[:-1])}.{number}"
            if rng.random() < 0.5:
                value = [random_value(rng, kind) for _ in range(rng.choice([1, 2, 500]))]
                values.append((key, value, GGUFValueType.ARRAY, kind))
                expected[key] = read_as(value, kind)
            else:
                value = random_value(rng, kind)
                values.append((key, value, kind, None))
                expected[key] = value
        metadata = read_file(write(tmp_path / "x.gguf", values)).metadata
        assert list(metadata) == list(expected)
        for key, value in expected.items():
            check_same(metadata[key], value)


def test_nested_arrays_up_to_depth_8(tmp_path):
    def nested(depth: int) -> bytes:
        return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQ2H", 2, 2, 7, 8)

    ragged = [[[1, 2], [3]], [[4]]]
    path = write(tmp_path / "x.gguf", [("a", ragged, GGUFValueType.ARRAY, None)])
    array = read_file(path).metadata["a"]
    check_same(
        array, [[np.array([1, 2], np.int32), np.array([3], np.int32)], [np.array([4], np.int32)]]
    )
    path.write_bytes(raw([pair("empty", 9, struct.pack("<IQ", 9, 0))]))
    check_same(read_file(path).metadata["empty"], [])
    path.write_bytes(raw([pair("deep", 9, nested(8))]))
    array = read_file(path).metadata["deep"]
    for _ in range(7):
        assert isinstance(array, list)
        (array,) = array
    check_same(array, np.array([7, 8], np.uint16))
    for depth in (9, 100_000):
        path.write_bytes(raw([pair("deep", 9, nested(depth))]))
        assert_rejected(path, "'deep'", "9 deep", "at most 8")


def test_large_vocabulary_is_read(tmp_path):
    """100,000 tokens with scores."""
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
    metadata = read_file(path).metadata
    assert metadata["tokens"] == words
    check_same(metadata["scores"], scores)


def random_tensors(rng, kinds, max_rows: int = 4):
    for number, kind in enumerate(kinds):
        shape = [int(rng.integers(1, max_rows)) for _ in range(number % 4)]
        shape += [int(rng.integers(1, 4)) if not kind.is_plain else 5, kind.nbytes]
        yield f"blk.{number}.{kind.name}", kind, rng.integers(0, 256, shape, np.uint8)


@pytest.mark.random
@pytest.mark.parametrize("version", [2, 3])
def test_random_tensors_are_read_back(tmp_path, version):
    for seed in range(cases(20, least=2)):
        rng = np.random.default_rng([seed, version])
        tensors = list(random_tensors(rng, rng.permutation(KINDS)))
        alignment = int(rng.choice([8, 32, 64, 4096]))
        path = write(tmp_path / "x.gguf", tensors=tensors, alignment=alignment)
        with path.open("r+b") as file:
            file.seek(4)
            file.write(bytes([version]))
        gguf_file = read_file(path)
        assert gguf_file.metadata == {
            "general.architecture": "llama",
            "general.alignment": alignment,
        }
        assert list(gguf_file.tensors) == [name for name, *_ in tensors]
        for name, kind, blocks in tensors:
            check_tensor(gguf_file.tensors[name], name, kind, blocks)


def check_tensor(tensor, name, kind, blocks) -> None:
    *rows, count, _ = blocks.shape
    assert (tensor.name, tensor.kind, tensor.shape) == (name, kind, (*rows, count * kind.elements))
    assert tensor.nbytes == blocks.nbytes
    mapped = tensor.blocks()
    assert not mapped.flags.writeable
    assert not mapped.flags.owndata
    np.testing.assert_array_equal(mapped, blocks)
    expected = reference_values(kind, blocks)
    for values in (tensor.read(), tensor.mapped()):
        assert values.dtype == tensor.dtype == expected.dtype
        assert values.shape == tensor.shape
        check_values(kind, values, expected)
    assert tensor.mapped().flags.writeable is not kind.is_plain
    for index in range(rows[0] if rows else 0):
        first_axis_slice = tensor.cut(index)
        assert first_axis_slice.shape == (1, *tensor.shape[1:])
        check_values(kind, first_axis_slice.read(), expected[index : index + 1])
        np.testing.assert_array_equal(first_axis_slice.blocks(), blocks[index : index + 1])


def check_values(kind, values, expected) -> None:
    """Check that values are equal: bit for bit if stored unquantised, else with any NaN equal.

    Q1_0 values are sums, in which infinities become NaN.
    """
    assert values.shape == expected.shape
    if kind.name == "Q1_0":
        values, expected = (
            np.where(np.isfinite(array), array, np.nan) for array in (values, expected)
        )
    if kind.is_plain:
        assert values.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_equal(values, expected)


def reference_values(kind, blocks) -> np.ndarray:
    *rows, count, _ = blocks.shape
    if kind.is_plain:
        return blocks.view(kind.dtype).reshape(*rows, count)
    with np.errstate(all="ignore"):
        return tiny_gguf.decoded(blocks.reshape(*rows, -1), GGMLQuantizationType(kind.number))


def test_values_quantized_by_the_gguf_package(tmp_path):
    """The values match the package's dequantised ones and are close to the originals."""
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
    tensors = read_file(path).tensors
    for name, values in expected.items():
        read = tensors[name].read().astype(np.float32)
        np.testing.assert_array_equal(read, values)
        assert np.abs(read - dense).mean() < (0.2 if "4" in name else 0.05)


def test_scalar_tensor(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw(entries=[entry("scale", (), 0)], data=struct.pack("<f", 2.5)))
    tensor = read_file(path).tensors["scale"]
    assert tensor.shape == ()
    assert tensor.read() == tensor.mapped() == 2.5
    assert tensor.blocks().shape == (1, 4)


def test_cutting_within_a_row_of_blocks_is_rejected(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(
        raw(entries=[entry("x", (64,)), entry("y", (17,), 0, 96)], data=bytes(96 + 68))
    )
    tensors = read_file(path).tensors
    with pytest.raises(ModelError, match="'x' of type Q8_0 has the shape"):
        tensors["x"].cut(0)
    assert tensors["y"].cut(3).read().shape == (1,)


def test_large_tensor_is_dequantized_in_strips(tmp_path):
    """Peak memory is little more than the result; the last strip is shorter."""
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
    np.testing.assert_array_equal(values, reference_values(kind, blocks))


def test_file_truncated_after_opening_is_rejected(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "x.gguf"
    tensors = read_file(write(path, tensors=random_tensors(rng, KINDS))).tensors
    path.write_bytes(path.read_bytes()[:100])
    for tensor in tensors.values():
        for read in (tensor.read, tensor.mapped, tensor.blocks):
            with pytest.raises(ModelError, match="truncated"):
                read()
    path.unlink()
    for tensor in tensors.values():
        for read in (tensor.read, tensor.mapped, tensor.blocks):
            with pytest.raises(ModelError, match="cannot be read"):
                read()


# Split files.


def write_parts(folder, count: int = 3):
    """(paths of split files with two tensors each, the tensors)."""
    tensors = list(random_tensors(np.random.default_rng(0), KINDS[: 2 * count]))
    write(folder / "m.gguf", [("a", 5, GGUFValueType.UINT8, None)], tensors, split_max_tensors=2)
    return [folder / f"m-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)], tensors


def test_split_files_are_read_from_any_part(tmp_path):
    paths, tensors = write_parts(tmp_path)
    for path in paths:
        gguf_file = read_file(path)
        assert (
            gguf_file.metadata["general.architecture"],
            gguf_file.metadata["a"],
            gguf_file.metadata["split.no"],
        ) == (
            "llama",
            5,
            0,
        )
        assert list(gguf_file.tensors) == [name for name, *_ in tensors]
        for number, (name, kind, blocks) in enumerate(tensors):
            assert gguf_file.tensors[name].file == paths[number // 2]
            check_tensor(gguf_file.tensors[name], name, kind, blocks)


def test_first_part_without_tensors(tmp_path):
    """As written by llama.cpp's `--no-tensor-first-split`."""
    paths, _ = write_parts(tmp_path, 2)
    keys = [
        pair("split.count", 2, b"\2\0"),
        pair("split.no", 2, b"\0\0"),
        pair("split.tensors.count", 5, b"\2\0\0\0"),
    ]
    paths[0].write_bytes(raw(keys))
    overwrite_uint16(paths[1], "split.tensors.count", 2)
    for path in paths:
        assert len(read_file(path).tensors) == 2


def overwrite_uint16(path, key: str, value: int) -> None:
    """Overwrite the first two bytes of a key's value."""
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + struct.pack("<H", value) + data[at + 2 :])


def test_error_names_the_missing_part(tmp_path):
    for number in range(3):
        paths, _ = write_parts(tmp_path)
        paths[number].unlink()
        for path in paths:
            assert_rejected(path, paths[number].name, "does not exist")
    assert_rejected(tmp_path / "nothing.gguf", "does not exist")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("split.no", 0),
        ("split.no", 2),
        ("split.count", 2),
        ("split.count", 4),
        ("split.count", 0),
        ("split.tensors.count", 5),
        ("split.tensors.count", 7),
    ],
)
def test_contradictory_split_keys_are_rejected(tmp_path, key, value):
    paths, _ = write_parts(tmp_path)
    overwrite_uint16(paths[1], key, value)
    for path in paths:
        assert_rejected(path, paths[1].name, key, f"= {value}")


def test_renamed_parts_are_rejected(tmp_path):
    paths, _ = write_parts(tmp_path)
    assert_rejected(
        paths[0].rename(tmp_path / "other.gguf"),
        "split.count = 3",
        "part 1 of 1",
        "NAME-00001-of-00003.gguf",
    )
    assert_rejected(paths[2].rename(paths[0]), "split.no = 2", "part 1 of 3")


def test_split_file_name_without_split_keys(tmp_path):
    path = write(tmp_path / "m-00002-of-00003.gguf")
    assert_rejected(path, "split.count = 0", "part 2 of 3")
    assert read_file(path.rename(tmp_path / "m-00001-of-00001.gguf")).tensors == {}


def test_merged_file_with_split_count_zero(tmp_path):
    """llama.cpp leaves split.count = 0 in merged files."""
    path = write(tmp_path / "m.gguf", [("split.count", 0, GGUFValueType.UINT16, None)])
    assert read_file(path).metadata["split.count"] == 0


def test_tensor_in_two_parts_is_rejected(tmp_path):
    paths, tensors = write_parts(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    overwrite_uint16(paths[2], "split.no", 2)
    assert_rejected(paths[0], tensors[2][0], "is in both", paths[1].name, paths[2].name)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize(
    ("kind", "data", "value_text"),
    [
        (8, text("3\n"), r"'3\n'"),
        (12, struct.pack("<d", 3), "3.0"),
        (7, b"\1", "True"),
        (11, b"\xff" * 8, "-1"),
        (9, struct.pack("<IQ", 0, 500) + bytes(500), "an array of 500"),
    ],
)
def test_split_keys_of_wrong_types_are_rejected(tmp_path, key, kind, data, value_text):
    values = {"split.no": 0, "split.count": 2, "split.tensors.count": 0}
    for number in (0, 1):
        keys = [
            pair(name, 2, struct.pack("<H", value))
            for name, value in (values | {"split.no": number}).items()
        ]
        if number == 0:
            keys = [
                pair(key, kind, data) if text(key) in metadata else metadata for metadata in keys
            ]
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(raw(keys))
    for number in (1, 2):
        assert_rejected(
            tmp_path / f"m-0000{number}-of-00002.gguf",
            f"{key} = {value_text}",
            "m-00001-of-00002.gguf",
        )


# Damaged, wrong and hostile files.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["is empty"]),
        (b"GG", ["truncated", "2 bytes"]),
        (b"GGUF\3\0\0\0", ["truncated", "8 bytes"]),
        (
            b"version https:" + b"//git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32,
            ["git-lfs pointer"],
        ),
        (b"GGML" + bytes(100), ["no GGUF file", "b'GGML'"]),
        (b"PK\3\4" + bytes(100), ["no GGUF file"]),
        (raw(version=1), ["version 1", "2 or 3"]),
        (raw(version=4), ["version 4"]),
        (raw(version=0), ["version 0"]),
        (raw(version=3 << 24), ["big endian", "version 3"]),
        (raw(version=2**32 - 1), ["version 4294967295"]),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
def test_files_of_other_formats_are_rejected(tmp_path, data, words):
    (tmp_path / "x.gguf").write_bytes(data)
    assert_rejected(tmp_path / "x.gguf", *words)


def test_big_endian_file_is_rejected(tmp_path):
    assert_rejected(write(tmp_path / "x.gguf", endianess=gguf.GGUFEndian.BIG), "big endian")


def test_folder_instead_of_a_file_is_rejected(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    assert_rejected(tmp_path / "x.gguf", "cannot be read")


UNKNOWN = [4, 5, 9, 15, 31, 36, 99, 2**32 - 1]
HUGE = [2**31, 2**32 - 1, 2**40, 2**61 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("size", HUGE)
def test_false_sizes_in_headers_allocate_nothing(tmp_path, size):
    """Sizes are checked against the file's size before anything is allocated."""
    path = tmp_path / "x.gguf"
    size_bytes = struct.pack("<Q", size)
    false_headers = [
        (raw(counts=(size, 0)), "tensors"),
        (raw(counts=(0, size)), "keys"),
        (raw([size_bytes + b"x"]), "the name of key 0"),
        (raw([pair("k", 8, size_bytes)]), "'k'"),
        *((raw([pair("k", 9, struct.pack("<I", kind) + size_bytes)]), "'k'") for kind in range(13)),
        (raw([pair("k", 9, struct.pack("<IQ", 9, 1) + struct.pack("<I", 9) + size_bytes)]), "'k'"),
        (raw([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + size_bytes)]), "'k'"),
        (raw(entries=[size_bytes + b"x" * 24]), "the name of tensor 0"),
        (raw(entries=[entry(sizes=(32, size))], data=bytes(68)), "'x'"),
        (raw(entries=[entry(sizes=(size // 32 * 32, size, size, size))], data=bytes(68)), "'x'"),
        (raw(entries=[entry(start=size // 32 * 32)], data=bytes(68)), "'x'"),
    ]
    for data, word in false_headers:
        path.write_bytes(data)
        tracemalloc.start()
        try:
            assert "truncated" in assert_rejected(path, word)
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
        (
            [pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text(b"\xe6\x9d"))],
            [],
            ["'k'", "UTF-8"],
        ),
        ([text(b"\x80") + bytes(5)], [], ["the name of key 0", "UTF-8"]),
        ([pair("a\nb", 0, b"\0"), pair("a\nb", 0, b"\0")], [], [r"'a\nb' twice"]),
        ([pair("k" * 3000, 0, b"\0")] * 2, [], ["twice"]),
        *(
            (
                [pair("general.alignment", 4, struct.pack("<I", n))],
                [],
                [f"general.alignment = {n};", "power of two"],
            )
            for n in (0, 3, 33, 2**32 - 1)
        ),
        ([pair("general.alignment", 8, text("32"))], [], ["general.alignment = '32'"]),
        ([pair("general.alignment", 6, struct.pack("<f", 32))], [], ["general.alignment = 32.0"]),
        (
            [pair("general.alignment", 4, struct.pack("<I", 64))],
            [entry(start=32)],
            ["'x'", "byte 32", "64"],
        ),
        ([], [entry(), entry()], ["'x' twice"]),
        ([], [entry(sizes=(32, 1, 1, 1, 1))], ["'x'", "5 dimensions", "at most 4"]),
        (
            [],
            [text("x") + struct.pack("<I", 2**32 - 1) + bytes(32)],
            ["'x'", "4294967295 dimensions"],
        ),
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
)
def test_invalid_header_values_are_rejected(tmp_path, pairs, entries, words):
    (tmp_path / "x.gguf").write_bytes(raw(pairs, entries, bytes(256)))
    assert_rejected(tmp_path / "x.gguf", *words)


def small_file(path):
    """(bytes of a 3 kB file with values and tensors of all kinds, size of its header)."""
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
    tensors = list(random_tensors(np.random.default_rng(0), kinds, max_rows=3))
    write(path, values, tensors, alignment=32)
    return path.read_bytes(), min(tensor.start for tensor in read_file(path).tensors.values())


def mutate(rng, contents: bytes, header: int) -> bytes:
    """Change, cut, repeat or remove bytes, or overwrite numbers; mostly in the header."""
    data = bytearray(contents)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(min(header if rng.random() < 0.95 else len(data), len(data)) or 1)
        mutation = rng.randrange(7)
        if mutation == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif mutation == 1:
            data[at : at + 1] = bytes([(data[at : at + 1] or b"\0")[0] ^ 1 << rng.randrange(8)])
        elif mutation == 2:
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice([0, 1, len(data), len(data) - at, len(data) + 1, *HUGE])
            )
        elif mutation == 3:
            data[at : at + 4] = struct.pack(
                "<I", rng.choice([0, 1, 7, 8, 9, 12, 13, 2**31, 2**32 - 1])
            )
        elif mutation == 4:
            del data[at : at + rng.choice([1, 4, 8, 100])]
        elif mutation == 5:
            data[at:at] = data[at : at + rng.choice([1, 4, 8, 100])]
        else:
            del data[at if rng.random() < 0.5 else rng.randrange(len(data) or 1) :]
    return bytes(data)


@pytest.mark.random
def test_randomly_damaged_file_is_rejected_or_readable(tmp_path):
    """If a damaged file is accepted, all its tensors are readable."""
    path = tmp_path / "x.gguf"
    contents, header = small_file(path)
    num_readable = 0
    for seed in range(cases(20_000)):
        data = mutate(random.Random(seed), contents, header)
        path.unlink()  # the previous file may still be mapped
        path.write_bytes(data)
        traces_memory = seed % 10 == 0
        if traces_memory:
            tracemalloc.start()
        try:
            gguf_file = read_file(path)
        except ModelError as error:
            gguf_file = None
            message = str(error)
            assert path.name in message
            assert "\n" not in message
            assert len(message) < 1500
        finally:
            if traces_memory:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 20 * len(contents)
        if gguf_file is not None:
            num_readable += 1
            check_readable(gguf_file, path, len(data))
    # some files must be accepted and some rejected
    assert 0.05 < num_readable / cases(20_000) < 0.7


def check_readable(gguf_file, path, size: int) -> None:
    """Check that metadata types are known and that tensors are readable and do not overlap."""
    assert all(
        isinstance(value, str | int | float | np.ndarray | list)
        for value in gguf_file.metadata.values()
    )
    end = 0
    for tensor in sorted(gguf_file.tensors.values(), key=lambda tensor: tensor.start):
        assert tensor.file == path
        assert end <= tensor.start
        end = tensor.start + tensor.nbytes
        assert end <= size
        assert tensor.read().shape == tensor.shape
        assert tensor.blocks().nbytes == tensor.nbytes


@pytest.mark.random
def test_truncated_file_is_rejected(tmp_path):
    path = tmp_path / "x.gguf"
    contents, header = small_file(path)
    last = max(read_file(path).tensors.values(), key=lambda tensor: tensor.start)
    end = last.start + last.nbytes  # padding may follow
    cuts = {*range(header if cases(100) == 100 else 60), end - 1}
    for cut in cuts | {random.Random(0).randrange(end) for _ in range(200)}:
        path.unlink()
        path.write_bytes(contents[:cut])
        assert_rejected(path, "truncated" if cut else "empty")
    path.write_bytes(contents[:end])
    assert read_file(path).tensors[last.name].read().shape == last.shape


@pytest.mark.parametrize("kind", [0, 2, 7, 8, 9])
def test_metadata_of_tiny_values_takes_little_memory(tmp_path, kind):
    """Metadata takes at most 15 times the file's size."""
    path = tmp_path / "x.gguf"
    value = {8: text("ab"), 9: struct.pack("<IQB", 0, 1, 5)}.get(kind, bytes(2))
    count = 300_000 // len(value)
    path.write_bytes(raw([pair("k", 9, struct.pack("<IQ", kind, count) + value * count)]))
    tracemalloc.start()
    try:
        assert len(read_file(path).metadata["k"]) == count
        assert tracemalloc.get_traced_memory()[1] < 15 * path.stat().st_size
    finally:
        tracemalloc.stop()
