"""The cache of packed weights: mapped by later loads, keyed by content, robust to damage."""

import json
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from quire import LLM, ModelError, SamplingParams
from quire.model.checkpoint import loader, weight_cache
from quire.model.checkpoint.loader import load, read_config
from quire.model.checkpoint.weight_cache import WeightCache
from quire.ops import cache_folder, native
from quire.ops.linear.cpu import PackedWeight
from quire.tests.support import tiny

if not native.serves():
    pytest.skip("no native kernels", allow_module_level=True)


@pytest.fixture
def cache_home(monkeypatch, tmp_path):
    """An empty weight cache that accepts small models, on a disk however full; the kernels' cache
    stays in place.
    """
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.setattr(cache_folder, "MIN_FREE_BYTES", 0)
    kernels = native.build.cache_folder()
    monkeypatch.setattr(native.build, "cache_folder", lambda: kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "weights"


@pytest.fixture
def folder(tmp_path):
    tiny.write(
        tmp_path / "model",
        tiny.LLAMA | {"torch_dtype": "bfloat16", "hidden_size": 64, "vocab_size": 160},
    )
    return tmp_path / "model"


@pytest.fixture
def read_tensors(monkeypatch):
    """The source tensors of each leaf that is read from the checkpoint."""
    tensor_lists = []
    read = loader.read_leaf
    monkeypatch.setattr(
        loader,
        "read_leaf",
        lambda spec, sources, *arguments: (
            tensor_lists.append(sources) or read(spec, sources, *arguments)
        ),
    )
    return tensor_lists


def load_cached(folder, quantization=None, **options):
    weights = load(folder, read_config(folder, quantization=quantization), cached=True, **options)
    for thread in threading.enumerate():
        if thread.name == "quire-weight-cache":
            thread.join()
    return weights


def same_bits(a, b) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.mark.parametrize("quantization", [None, "int8", "int4-32-zero", "nf4", "nvfp4", "fp8"])
def test_second_load_maps_the_cached_file(cache_home, folder, read_tensors, quantization):
    """The second load reads no tensors, and large arrays lie in the mapped file."""
    packed = load_cached(folder, quantization)
    assert read_tensors and len([*cache_home.iterdir()]) == 1
    read_tensors.clear()
    progress = []
    mapped = load_cached(folder, quantization, progress=progress.append)
    assert not read_tensors and sum(progress) > 0
    assert same_bits(packed, mapped)
    assert isinstance(mapped.layers[0].mlp.up_DGF, PackedWeight)
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if ".weights" in line]
    leaf = jax.tree.leaves(mapped.layers[0].mlp.up_DGF)[0].unsafe_buffer_pointer()
    assert any(int(start, 16) <= leaf < int(end, 16) for start, end in spans)


def test_engine_generates_the_same_with_and_without_the_cache(cache_home, folder):
    options = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    uncached = LLM(**options, weight_cache=False).generate([[1, 2, 3]], params)
    assert not cache_home.exists()
    answers = [uncached, *(LLM(**options).generate([[1, 2, 3]], params) for _ in range(2))]
    texts = [
        repr((outputs[0].outputs[0].token_ids, outputs[0].outputs[0].logprobs))
        for outputs in answers
    ]
    assert len({*texts}) == 1
    for thread in threading.enumerate():
        if thread.name == "quire-weight-cache":
            thread.join()
    assert len([*cache_home.iterdir()]) == 1
    with pytest.raises(ModelError, match="weight_cache is 'no'; it must be True or False"):
        LLM(**options, weight_cache="no")


def test_cache_key_depends_on_files_options_kernels_and_code(cache_home, folder, monkeypatch):
    """Also on the checkpoint's bytes, even with an unchanged modification time."""
    config = read_config(folder)
    names = [weight_cache.cache_key(folder, config)]
    names.append(weight_cache.cache_key(folder, replace(config, quant="int8")))
    with monkeypatch.context() as patch:
        patch.setattr(native.build, "source_hash", lambda: "other")
        names.append(weight_cache.cache_key(folder, config))
    with monkeypatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: "other")
        names.append(weight_cache.cache_key(folder, config))
    file = folder / "model.safetensors"
    state = file.stat()
    os.utime(file, ns=(state.st_mtime_ns, state.st_mtime_ns + 1))
    names.append(weight_cache.cache_key(folder, config))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(state.st_mtime_ns, state.st_mtime_ns + 1))  # only the bytes differ
    names.append(weight_cache.cache_key(folder, config))
    assert len({*names}) == len(names)
    assert weight_cache.cache_key(folder, config) == names[-1]


@pytest.mark.parametrize("damage", ["empty", "cut", "table", "array", "magic", "class"])
def test_damaged_cache_file_is_rebuilt(cache_home, folder, read_tensors, caplog, damage):
    packed = load_cached(folder)
    (file,) = cache_home.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "empty":
        content = bytearray()
    elif damage == "cut":
        content = content[:-1]
    elif damage == "array":
        content[-weight_cache.PAGE] ^= 1
    elif damage == "class":  # a valid table that names a class which must not be instantiated
        begin = len(weight_cache.MAGIC) + 40
        length = int.from_bytes(content[len(weight_cache.MAGIC) :][:8], "little")
        table = json.loads(content[begin : begin + length])
        table["leaves"][0] = {"class": "model.config:ModelError", "fields": {}}
        head = weight_cache.header_bytes(table)
        content[: len(head)] = head
    else:
        content[{"magic": 0, "table": 100}[damage]] ^= 1
    file.write_bytes(content)
    read_tensors.clear()
    assert same_bits(load_cached(folder), packed)
    assert read_tensors and "is damaged and made again" in caplog.text
    read_tensors.clear()
    assert same_bits(load_cached(folder), packed) and not read_tensors


def test_concurrent_writers_leave_one_complete_file(cache_home, folder):
    """A read after concurrent writes returns complete weights."""
    config = read_config(folder)
    leaves = jax.tree.leaves(load(folder, config))
    caches = [WeightCache.for_folder(folder, config) for _ in range(2)]
    threads = [
        threading.Thread(target=cache.write, args=(leaves,)) for cache in caches for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_bits(caches[0].read(), leaves)
    assert [path.suffix for path in cache_home.iterdir()] == [".weights"]


def test_writers_with_equal_process_ids_use_separate_temporary_files(
    cache_home, folder, monkeypatch
):
    """As in containers that share a volume: one writer publishes while another has just begun."""
    config = read_config(folder)
    leaves = [
        np.random.default_rng(i).integers(0, 256, 5 * weight_cache.PAGE, np.uint8) for i in range(4)
    ]
    first_cache, second_cache = (WeightCache.for_folder(folder, config) for _ in range(2))
    assert first_cache.path == second_cache.path
    has_begun = threading.Event()
    may_finish = threading.Event()
    flat = weight_cache.as_bytes
    counts = Counter()

    def paused_flat(value):
        name = threading.current_thread().name
        counts[name] += 1
        # the table has converted each leaf before
        if name == "second" and counts[name] == len(leaves) + 1:
            has_begun.set()
            assert may_finish.wait(60)
        elif name == "first" and counts[name] == 2 * len(leaves):
            thread.start()
            assert has_begun.wait(60)
        return flat(value)

    monkeypatch.setattr(weight_cache, "as_bytes", paused_flat)
    thread = threading.Thread(target=second_cache.write, args=(leaves,), name="second")
    writer = threading.Thread(target=first_cache.write, args=(leaves,), name="first")
    writer.start()
    writer.join()
    published = first_cache.read()
    may_finish.set()
    thread.join()
    assert same_bits(published, leaves) and same_bits(second_cache.read(), leaves)
    assert [*cache_home.iterdir()] == [first_cache.path]


def test_least_recently_used_file_is_deleted(cache_home, folder, monkeypatch):
    """Stale temporary files are deleted too."""
    config = read_config(folder)
    leaves = [np.zeros(3 * weight_cache.PAGE, np.uint8)]
    caches = [WeightCache.for_folder(folder, (config, i)) for i in range(4)]
    for age, cache in enumerate(caches[:3]):
        cache.write(leaves)
        os.utime(cache.path, (time.time() - 100 + age,) * 2)
    size = caches[0].path.stat().st_size
    assert caches[0].read() is not None  # now the newest
    old = cache_home / "x.1.part"
    new = cache_home / "x.2.part"
    for partial_file in (old, new):
        partial_file.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * cache_folder.STALE,) * 2)
    monkeypatch.setattr(weight_cache, "LIMIT", 3 * size)
    caches[3].write(leaves)
    assert [cache.path.exists() for cache in caches] == [True, False, True, True]
    assert new.exists() and not old.exists()
    monkeypatch.setattr(weight_cache, "LIMIT", size - 1)
    caches[1].write(leaves)  # larger than the limit: nothing is deleted for it
    assert [cache.path.exists() for cache in caches] == [True, False, True, True]


def test_unwritable_cache_folder_does_not_prevent_loading(
    cache_home, folder, monkeypatch, caplog, tmp_path
):
    """The model loads, with a warning."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load_cached(folder)
    assert "packed weights are not kept" in caplog.text


def test_small_models_are_not_cached(cache_home, folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home.parents[1]))
    cache = WeightCache.for_folder(folder, None)
    cache.write_soon([np.zeros(8)])
    assert not [*cache_home.iterdir()]
