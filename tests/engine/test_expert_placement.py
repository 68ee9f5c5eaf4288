"""Where experts lie, over random loads: what every placement must keep, and what it must gain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model.config import Attention, Layer, ModelConfig, ModelError, Moe
from quire.model.expert_copies import check, first_placement, tables, with_redundancy
from quire.serving.device.expert_placement import balanced, busiest, settled, transfers
from quire.tests.support.cases import cases

CASES = st.tuples(
    st.integers(2, 8),
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.2, 5]),
)


def drawn(case) -> tuple[np.ndarray, int, int]:
    """(loads [L, E], places, devices); so many places that each device has as many, and experts
    enough for them.
    """
    devices, own, fewer, seed, shape = case
    slots = devices * own
    E = max(own, slots - fewer)
    loads = np.floor(np.random.default_rng(seed).pareto(shape, (3, E)) * 10)
    return loads, slots, devices


@settings(max_examples=cases(150))
@given(CASES)
def test_every_expert_has_a_place(case):
    loads, slots, devices = drawn(case)
    for loads_E, found in zip(loads, balanced(loads, slots, devices), strict=True):
        assert found.shape == (slots,)
        assert set(found.tolist()) == set(range(loads.shape[1]))
        copies = np.bincount(found)
        assert copies.max() <= devices
        if copies.max() > 1:  # no copy more to one would have helped more than those that there are
            least = (loads_E[copies > 1] / (copies[copies > 1] - 1)).min()
            assert least >= (loads_E / copies)[copies < devices].max(initial=0)
        mean = loads_E.sum() / devices
        # The last to be placed goes to a device with no more than the mean, unless all such are
        # full.
        own = slots // devices
        assert (
            busiest(loads_E, found, devices) * mean <= mean + own * (loads_E / copies).max() + 1e-9
        )


@settings(max_examples=cases(100))
@given(CASES)
def test_what_is_sent_makes_the_placement(case):
    """Carried out turn by turn on names instead of weights."""
    loads, slots, devices = drawn(case)
    E = loads.shape[1]
    own = slots // devices
    old = first_placement(Moe(E, 1, 1, spare=slots - E))
    for wanted in balanced(loads, slots, devices):
        new = settled(wanted, old, devices)
        shares = [
            sorted(map(sorted, placed.reshape(devices, own).tolist())) for placed in (wanted, new)
        ]
        assert shares[0] == shares[1]
        assert (new == old).sum() >= (wanted == old).sum() or (new == old).any()
        sent, kept, turns = transfers(new, old, devices)
        held = old.reshape(devices, own).copy()
        for turn in range(turns):
            for to in range(devices):
                for source in range(devices):
                    if kept[to, source, turn] < own:
                        held[to, kept[to, source, turn]] = old[
                            source * own + sent[to, source, turn]
                        ]
        assert held.reshape(-1).tolist() == new.tolist()
        assert (kept < own).sum() == (new != old).sum()
        copies_E, slots_EC = tables(new, E, slots - E + 1)
        for e in range(E):
            assert slots_EC[e, : copies_E[e]].tolist() == np.flatnonzero(new == e).tolist()
        old = new


def test_hot_experts_are_shared_out():
    """The known best of a case by hand, and what a skew as it is seen gains."""
    found = balanced(np.array([[60.0, 20, 10, 10]]), 6, 2)[0]
    assert np.bincount(found).tolist() == [2, 2, 1, 1]
    assert busiest(np.array([60.0, 20, 10, 10]), found, 2) == 1
    loads = np.random.default_rng(0).pareto(1.2, (8, 64))
    first = first_placement(Moe(64, 4, 1, spare=8))
    before, after = (
        [busiest(own, placed, 8) for own, placed in zip(loads, every, strict=True)]
        for every in (np.tile(first, (8, 1)), balanced(loads, 72, 8))
    )
    assert np.mean(before) > 2.2 and max(after) < 1.15
    assert busiest(np.zeros(64), first, 8) == 1


def model(*experts: int) -> ModelConfig:
    attention = Attention(2, 2, 4, 0.5)
    layers = [Layer(attention, moe=Moe(E, 2, 4) if E else None) for E in experts]
    return ModelConfig("test", 16, 8, tuple(layers), 16)


@pytest.mark.parametrize(
    ("experts", "spare", "devices", "said"),
    [
        ((0,), 2, 2, "nothing to balance: it needs a model with experts"),
        ((8,), 2, 1, "nothing to balance: it needs .*as with expert_parallel_size 2"),
        ((8,), 3, 4, "8 experts it must give each of 4 devices as many.*could be 4, 8, 12, 16"),
        ((8,), 9, 2, "it could be 2, 4, 6, 8"),
        ((8, 4), 4, 2, "expert_redundancy is 4"),
    ],
)
def test_places_that_cannot_be_shared(experts, spare, devices, said):
    with pytest.raises(ModelError, match=said):
        check(model(*experts), spare, devices)


def test_places_beside_the_experts():
    check(model(0, 6), 2, 4)
    assert [layer.moe and layer.moe.slots for layer in with_redundancy(model(0, 6), 2).layers] == [
        None,
        8,
    ]
    assert first_placement(with_redundancy(model(6), 2).layers[0].moe).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        0,
        1,
    ]
