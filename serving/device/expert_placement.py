"""Expert placement: copies of hot experts, and equal load on every device."""

import numpy as np


def balanced(loads_LE: np.ndarray, slots: int, devices: int) -> np.ndarray:
    """The expert of each slot [L, S], chosen greedily.

    Each further copy goes to the expert with the highest load per copy; then copies, the busiest
    first, go to the least loaded device that has no copy of the expert.
    """
    L, E = loads_LE.shape
    rows = np.arange(L)
    slots_per_device = slots // devices
    copies_LE = np.ones((L, E), int)
    for _ in range(slots - E):
        share_LE = np.where(copies_LE < devices, loads_LE / copies_LE, -1)
        copies_LE[rows, share_LE.argmax(1)] += 1
    items_LS = np.stack([np.repeat(np.arange(E), copies) for copies in copies_LE])
    share_LS = np.take_along_axis(loads_LE / copies_LE, items_LS, 1)
    items_LS = np.take_along_axis(items_LS, np.argsort(-share_LS, axis=1, kind="stable"), 1)
    share_LS = -np.sort(-share_LS, axis=1)
    placed_LnS = np.full((L, devices, slots_per_device), -1)
    busy_Ln = np.zeros((L, devices))
    filled_Ln = np.zeros((L, devices), int)
    has_LnE = np.zeros((L, devices, E), bool)
    for item_L, share_L in zip(items_LS.T, share_LS.T, strict=True):
        full_Ln = filled_Ln == slots_per_device
        twice_Ln = has_LnE[rows, :, item_L]
        # Equal loads go where fewest lie, so that none is filled first. A second copy only where
        # nothing else is free.
        cost = np.lexsort((filled_Ln, busy_Ln, twice_Ln, full_Ln), axis=1)[:, 0]
        placed_LnS[rows, cost, filled_Ln[rows, cost]] = item_L
        busy_Ln[rows, cost] += share_L
        filled_Ln[rows, cost] += 1
        has_LnE[rows, cost, item_L] = True
    return placed_LnS.reshape(L, slots)


def settled(new_S: np.ndarray, old_S: np.ndarray, devices: int) -> np.ndarray:
    """A placement with the same experts per device group, permuted so that most slots keep their
    expert.
    """
    new_nO = new_S.reshape(devices, -1)
    old_nO = old_S.reshape(devices, -1)
    has_new, has_old = (
        (placed_nO[:, :, None] == np.arange(new_S.max() + 1)).any(1)
        for placed_nO in (new_nO, old_nO)
    )
    alike_nn = has_new.astype(int) @ has_old.T.astype(int)
    slots_nO = np.full_like(old_nO, -1)
    for _ in range(devices):
        share, device = np.unravel_index(alike_nn.argmax(), alike_nn.shape)
        alike_nn[share, :] = alike_nn[:, device] = -1
        unplaced = new_nO[share].tolist()
        for place, expert in enumerate(old_nO[device]):
            if expert in unplaced:
                slots_nO[device, place] = expert
                unplaced.remove(expert)
        slots_nO[device, slots_nO[device] < 0] = unplaced
    return slots_nO.reshape(-1)


def busiest(loads_E: np.ndarray, experts_S: np.ndarray, devices: int) -> float:
    """The load of the busiest device, as a ratio to the mean."""
    if not loads_E.sum():
        return 1.0
    share_E = loads_E / np.maximum(np.bincount(experts_S, minlength=len(loads_E)), 1)
    work_n = share_E[experts_S].reshape(devices, -1).sum(1)
    return float(work_n.max() / work_n.mean())


def transfers(
    new_S: np.ndarray, old_S: np.ndarray, devices: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(sent, targets, turns): in each turn every device sends an expert to every device.

    The arrays are [to, from, turn]: `sent` is a slot of the sender, `targets` a slot of the
    receiver, or one past the last to discard it.
    """
    slots_per_device = len(new_S) // devices
    shape = (devices, devices, slots_per_device)
    counts = np.zeros((devices, devices), int)
    sent = np.zeros(shape, np.int32)
    targets = np.full(shape, slots_per_device, np.int32)
    for slot in np.flatnonzero(new_S != old_S):
        to, place = divmod(int(slot), slots_per_device)
        sources = np.flatnonzero(old_S == new_S[slot])
        source, at = divmod(
            int(min(sources, key=lambda slot: counts[to, slot // slots_per_device])),
            slots_per_device,
        )
        turn = counts[to, source]
        sent[to, source, turn], targets[to, source, turn] = at, place
        counts[to, source] += 1
    return sent, targets, int(counts.max())
