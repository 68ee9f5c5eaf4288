"""Placement of experts on devices, for random loads: validity, balance and transfers."""

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


def random_loads(case) -> tuple[np.ndarray, int, int]:
    """Returns (loads [L, E], slots, devices); all devices have the same number of slots."""
    devices, per_device, num_spare, seed, pareto_shape = case
    slots = devices * per_device
    E = max(per_device, slots - num_spare)
    loads = np.floor(np.random.default_rng(seed).pareto(pareto_shape, (3, E)) * 10)
    return loads, slots, devices


@settings(max_examples=cases(150))
@given(CASES)
def test_balanced_places_every_expert_within_bounds(case):
    loads, slots, devices = random_loads(case)
    for loads_E, placement_S in zip(loads, balanced(loads, slots, devices), strict=True):
        assert placement_S.shape == (slots,)
        assert set(placement_S.tolist()) == set(range(loads.shape[1]))
        copies_E = np.bincount(placement_S)
        assert copies_E.max() <= devices
        if copies_E.max() > 1:  # no other expert would have profited more from a copy
            min_saved = (loads_E[copies_E > 1] / (copies_E[copies_E > 1] - 1)).min()
            assert min_saved >= (loads_E / copies_E)[copies_E < devices].max(initial=0)
        mean = loads_E.sum() / devices
        # The last copy goes to a device with a load below the mean, unless all of these are full.
        per_device = slots // devices
        assert (
            busiest(loads_E, placement_S, devices) * mean
            <= mean + per_device * (loads_E / copies_E).max() + 1e-9
        )


@settings(max_examples=cases(100))
@given(CASES)
def test_transfers_produce_the_new_placement(case):
    """Carries out the transfers on expert ids instead of weights."""
    loads, slots, devices = random_loads(case)
    E = loads.shape[1]
    per_device = slots // devices
    old_S = first_placement(Moe(E, 1, 1, spare=slots - E))
    for target_S in balanced(loads, slots, devices):
        new_S = settled(target_S, old_S, devices)
        experts_by_device = [
            sorted(map(sorted, placed.reshape(devices, per_device).tolist()))
            for placed in (target_S, new_S)
        ]
        assert experts_by_device[0] == experts_by_device[1]
        assert (new_S == old_S).sum() >= (target_S == old_S).sum() or (new_S == old_S).any()
        sent_slots, target_slots, num_steps = transfers(new_S, old_S, devices)
        current_DS = old_S.reshape(devices, per_device).copy()
        for step in range(num_steps):
            for to_device in range(devices):
                for from_device in range(devices):
                    target_slot = target_slots[to_device, from_device, step]
                    if target_slot < per_device:
                        sent_slot = sent_slots[to_device, from_device, step]
                        current_DS[to_device, target_slot] = old_S[
                            from_device * per_device + sent_slot
                        ]
        assert current_DS.reshape(-1).tolist() == new_S.tolist()
        assert (target_slots < per_device).sum() == (new_S != old_S).sum()
        copies_E, slots_EC = tables(new_S, E, slots - E + 1)
        for e in range(E):
            assert slots_EC[e, : copies_E[e]].tolist() == np.flatnonzero(new_S == e).tolist()
        old_S = new_S


def test_hot_experts_get_copies():
    """Compares with a known optimum, and balances loads with a realistic skew."""
    placement = balanced(np.array([[60.0, 20, 10, 10]]), 6, 2)[0]
    assert np.bincount(placement).tolist() == [2, 2, 1, 1]
    assert busiest(np.array([60.0, 20, 10, 10]), placement, 2) == 1
    loads = np.random.default_rng(0).pareto(1.2, (8, 64))
    initial_placement = first_placement(Moe(64, 4, 1, spare=8))
    imbalance_before, imbalance_after = (
        [busiest(loads_E, placed, 8) for loads_E, placed in zip(loads, placements, strict=True)]
        for placements in (np.tile(initial_placement, (8, 1)), balanced(loads, 72, 8))
    )
    assert np.mean(imbalance_before) > 2.2 and max(imbalance_after) < 1.15
    assert busiest(np.zeros(64), initial_placement, 8) == 1


def moe_model(*experts: int) -> ModelConfig:
    attention = Attention(2, 2, 4, 0.5)
    layers = [Layer(attention, moe=Moe(E, 2, 4) if E else None) for E in experts]
    return ModelConfig("test", 16, 8, tuple(layers), 16)


@pytest.mark.parametrize(
    ("experts", "spare", "devices", "message"),
    [
        ((0,), 2, 2, "nothing to balance: it needs a model with experts"),
        ((8,), 2, 1, "nothing to balance: it needs .*as with expert_parallel_size 2"),
        ((8,), 3, 4, "8 experts it must give each of 4 devices as many.*could be 4, 8, 12, 16"),
        ((8,), 9, 2, "it could be 2, 4, 6, 8"),
        ((8, 4), 4, 2, "expert_redundancy is 4"),
    ],
)
def test_invalid_expert_redundancy_is_refused(experts, spare, devices, message):
    with pytest.raises(ModelError, match=message):
        check(moe_model(*experts), spare, devices)


def test_redundant_slots_repeat_experts():
    check(moe_model(0, 6), 2, 4)
    assert [
        layer.moe and layer.moe.slots for layer in with_redundancy(moe_model(0, 6), 2).layers
    ] == [
        None,
        8,
    ]
    assert first_placement(with_redundancy(moe_model(6), 2).layers[0].moe).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        0,
        1,
    ]
