"""Quire beside llama.cpp on the same GGUF files: which of them is nearer to float32."""

import pytest

from quire.tests.support import real_fidelity

pytestmark = pytest.mark.large


@pytest.mark.parametrize("name", real_fidelity.GGUF)
def test_nearer_to_float32_than_llama_cpp(model, name):
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: make real builds it"
    )
    path = model(name)
    tokens, expected = real_fidelity.of_reference(path)
    found = real_fidelity.Distance.between(
        real_fidelity.of_quire(path, tokens, "float32"), expected
    )
    theirs = real_fidelity.Distance.between(real_fidelity.of_llama_cpp(path, tokens), expected)
    assert found.mean < theirs.mean and found.worst < theirs.worst
