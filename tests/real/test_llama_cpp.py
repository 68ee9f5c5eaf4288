"""Compares the distances of Quire and llama.cpp to float32 logits, on the same GGUF files."""

import pytest

from quire.tests.support import real_fidelity

pytestmark = pytest.mark.large


@pytest.mark.parametrize("name", real_fidelity.GGUF)
def test_quire_is_nearer_to_float32_than_llama_cpp(model, name):
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: make real builds it"
    )
    path = model(name)
    tokens, expected = real_fidelity.of_reference(path)
    quire_distance = real_fidelity.Distance.between(
        real_fidelity.of_quire(path, tokens, "float32"), expected
    )
    llama_cpp_distance = real_fidelity.Distance.between(
        real_fidelity.of_llama_cpp(path, tokens), expected
    )
    assert (
        quire_distance.mean < llama_cpp_distance.mean
        and quire_distance.worst < llama_cpp_distance.worst
    )
