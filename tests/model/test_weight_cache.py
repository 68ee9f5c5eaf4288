"""Packed weights on disk: the second load maps what the first has made, whatever happens to the
files meanwhile.
"""

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
def home(monkeypatch, tmp_path):
    """An empty cache that keeps small models too; the kernels stay where they are."""
    monkeypatch.setattr(weight_cache, "SMALL", 0)
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
def reads(monkeypatch):
    """The names of the tensors that are read from the checkpoint."""
    found = []
    read = loader.read_leaf
    monkeypatch.setattr(
        loader,
        "read_leaf",
        lambda spec, parts, *rest: found.append(parts) or read(spec, parts, *rest),
    )
    return found


def loaded(folder, quantization=None, **options):
    weights = load(folder, read_config(folder, quantization=quantization), cached=True, **options)
    for thread in threading.enumerate():
        if thread.name == "quire-weight-cache":
            thread.join()
    return weights


def same(a, b) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.mark.parametrize("quantization", [None, "int8", "int4-32-zero", "nf4", "nvfp4", "fp8"])
def test_second_load_maps(home, folder, reads, quantization):
    """The same tree, bit for bit, of which nothing was read, and no byte of large arrays was
    copied.
    """
    first = loaded(folder, quantization)
    assert reads and len([*home.iterdir()]) == 1
    reads.clear()
    told = []
    second = loaded(folder, quantization, progress=told.append)
    assert not reads and sum(told) > 0
    assert same(first, second)
    assert isinstance(second.layers[0].mlp.up_DGF, PackedWeight)
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if ".weights" in line]
    leaf = jax.tree.leaves(second.layers[0].mlp.up_DGF)[0].unsafe_buffer_pointer()
    assert any(int(start, 16) <= leaf < int(end, 16) for start, end in spans)


def test_generates_the_same(home, folder):
    options = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    plain = LLM(**options, weight_cache=False).generate([[1, 2, 3]], params)
    assert not home.exists()
    answers = [plain, *(LLM(**options).generate([[1, 2, 3]], params) for _ in range(2))]
    said = [repr((each[0].outputs[0].token_ids, each[0].outputs[0].logprobs)) for each in answers]
    assert len({*said}) == 1
    for thread in threading.enumerate():
        if thread.name == "quire-weight-cache":
            thread.join()
    assert len([*home.iterdir()]) == 1
    with pytest.raises(ModelError, match="weight_cache is 'no'; it must be True or False"):
        LLM(**options, weight_cache="no")


def test_another_name_for_anything_else(home, folder, monkeypatch):
    """The file belongs to the checkpoint's bytes, the options, the kernels and the code."""
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
    os.utime(file, ns=(state.st_mtime_ns, state.st_mtime_ns + 1))  # as before but for its bytes
    names.append(weight_cache.cache_key(folder, config))
    assert len({*names}) == len(names)
    assert weight_cache.cache_key(folder, config) == names[-1]


@pytest.mark.parametrize("damage", ["empty", "cut", "table", "array", "magic", "class"])
def test_damage_is_noticed_and_mended(home, folder, reads, caplog, damage):
    first = loaded(folder)
    (file,) = home.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "empty":
        content = bytearray()
    elif damage == "cut":
        content = content[:-1]
    elif damage == "array":
        content[-weight_cache.PAGE] ^= 1
    elif damage == "class":  # a table that is whole, of somebody who would have other code run
        begin = len(weight_cache.MAGIC) + 40
        length = int.from_bytes(content[len(weight_cache.MAGIC) :][:8], "little")
        table = json.loads(content[begin : begin + length])
        table["leaves"][0] = {"class": "model.config:ModelError", "fields": {}}
        head = weight_cache.header_bytes(table)
        content[: len(head)] = head
    else:
        content[{"magic": 0, "table": 100}[damage]] ^= 1
    file.write_bytes(content)
    reads.clear()
    assert same(loaded(folder), first)
    assert reads and "is damaged and made again" in caplog.text
    reads.clear()
    assert same(loaded(folder), first) and not reads


def test_two_at_once(home, folder):
    """Both write, and a third reads one of them whole."""
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
    assert same(caches[0].read(), leaves)
    assert [path.suffix for path in home.iterdir()] == [".weights"]


def test_writers_with_one_process_id_do_not_share_a_temporary_file(home, folder, monkeypatch):
    """As in containers that share a volume: one writer publishes while another has just begun with
    the same file.
    """
    config = read_config(folder)
    leaves = [
        np.random.default_rng(i).integers(0, 256, 5 * weight_cache.PAGE, np.uint8) for i in range(4)
    ]
    first, second = (WeightCache.for_folder(folder, config) for _ in range(2))
    assert first.path == second.path
    has_begun = threading.Event()
    may_finish = threading.Event()
    flat = weight_cache.as_bytes
    counts = Counter()

    def paused_flat(value):
        name = threading.current_thread().name
        counts[name] += 1
        # the table has asked for each before
        if name == "second" and counts[name] == len(leaves) + 1:
            has_begun.set()
            assert may_finish.wait(60)
        elif name == "first" and counts[name] == 2 * len(leaves):
            thread.start()
            assert has_begun.wait(60)
        return flat(value)

    monkeypatch.setattr(weight_cache, "as_bytes", paused_flat)
    thread = threading.Thread(target=second.write, args=(leaves,), name="second")
    writer = threading.Thread(target=first.write, args=(leaves,), name="first")
    writer.start()
    writer.join()
    published = first.read()
    may_finish.set()
    thread.join()
    assert same(published, leaves) and same(second.read(), leaves)
    assert [*home.iterdir()] == [first.path]


def test_least_recently_used_goes(home, folder, monkeypatch):
    """Over the limit the one goes that was not used for longest; a file that nobody completed goes
    with age.
    """
    config = read_config(folder)
    leaves = [np.zeros(3 * weight_cache.PAGE, np.uint8)]
    caches = [WeightCache.for_folder(folder, (config, i)) for i in range(4)]
    for age, cache in enumerate(caches[:3]):
        cache.write(leaves)
        os.utime(cache.path, (time.time() - 100 + age,) * 2)
    size = caches[0].path.stat().st_size
    assert caches[0].read() is not None  # now the newest
    old = home / "x.1.part"
    new = home / "x.2.part"
    for part in (old, new):
        part.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * cache_folder.STALE,) * 2)
    monkeypatch.setattr(weight_cache, "LIMIT", 3 * size)
    caches[3].write(leaves)
    assert [cache.path.exists() for cache in caches] == [True, False, True, True]
    assert new.exists() and not old.exists()
    monkeypatch.setattr(weight_cache, "LIMIT", size - 1)
    caches[1].write(leaves)  # has no room in any case: nothing is deleted for it
    assert [cache.path.exists() for cache in caches] == [True, False, True, True]


def test_no_place(home, folder, monkeypatch, caplog, tmp_path):
    """Where nothing can be written the model is loaded all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    loaded(folder)
    assert "packed weights are not kept" in caplog.text


def test_small_models_are_not_kept(home, folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parents[1]))
    cache = WeightCache.for_folder(folder, None)
    cache.write_soon([np.zeros(8)])
    assert not [*home.iterdir()]
