"""Replicas behind one queue, with a pretended device: who goes where, and the one buffer of a step."""

from collections import Counter, deque
from itertools import groupby

import numpy as np
import pytest
from pretended_device import Device, sequence

from quire.serving.cache.page_moves import Moves
from quire.serving.cache.page_table import PageTable
from quire.serving.cache.prefix_tree import Copy, Node
from quire.serving.engine.batch_builder import Batcher
from quire.serving.engine.replicas import Batchers, Replicas, Tables, batcher_of
from quire.serving.engine.scheduler import Limits, Plan, Scheduler

PAGE = 4


def make(replicas=3, pages=(64, 64), limits=(4, 16, 16), **options) -> Replicas:
    tables = [PageTable(pages, PAGE, (None, 8), replica=number) for number in range(replicas)]
    return Replicas(Tables(tables), Limits(*limits), **options)


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_ends_once_whatever_the_load(seed):
    """Within each replica's limits, and never in two of them: what is computed is in the order of its rows."""
    rng = np.random.default_rng(seed)
    pages = tuple(rng.integers(14, 40, 2).tolist())
    scheduler = make(int(rng.integers(2, 5)), pages)
    device = Device(scheduler, scheduler.each[0].limits)
    sequences = []
    for index in range(80):
        prompt, output = int(rng.integers(1, 40)), int(rng.integers(1, 12))
        if not scheduler.each[0].pages.fits(prompt + output, 16):
            continue
        seq = sequence(index, prompt, output, int(rng.integers(3)), lockstep=bool(rng.random() < 0.1))
        if rng.random() < 0.2:
            seq.prompt_scores = [None] * (prompt - 1)
        sequences.append(seq)
        scheduler.add(seq)
        if rng.random() < 0.1:
            scheduler.finish(sequences[int(rng.integers(len(sequences)))], "abort")
        for _ in range(int(rng.integers(3))):
            device.step()
    device.run()
    assert all(seq.finish_reason for seq in sequences)
    assert {seq.replica for seq in sequences} == set(range(len(scheduler.each)))
    for one in scheduler.each:
        assert len(one.free_slots) == one.limits.max_seqs and not one.running


def test_prompts_spread_evenly():
    scheduler = make()
    for index in range(12):
        scheduler.add(sequence(index, 16, 4))
    assert Counter(seq.replica for seq in scheduler.waiting) == dict.fromkeys(range(3), 4)
    device = Device(scheduler, scheduler.each[0].limits)
    device.step()
    assert all(one.running for one in scheduler.each)
    device.run()


def test_a_beginning_that_is_known_is_worth_going_to():
    """As long as not too many are there already."""
    scheduler = make(limits=(16, 256, 32), pages=(400, 400))
    device = Device(scheduler, scheduler.each[0].limits)
    scheduler.add(first := sequence(0, 200, 2, token=7))
    device.run()
    others = [sequence(index, 200, 2, token=7) for index in range(1, 6)]
    for seq in others:
        scheduler.add(seq)
    here = [seq for seq in others if seq.replica == first.replica]
    assert 1 <= len(here) < 5
    device.run()
    assert all(seq.num_cached >= 196 for seq in here)


def test_answers_of_one_request_stay_together():
    scheduler = make()
    request = [sequence(0, 20, 3, token=9) for _ in range(3)]
    scheduler.add(*request)
    assert len({seq.replica for seq in request}) == 1
    Device(scheduler, scheduler.each[0].limits).run()


def test_nobody_waits_beside_a_free_slot():
    """More answers than a replica has slots: those that wait go to the others; who gave way comes back to his pages."""
    scheduler = make(limits=(2, 16, 16))
    request = [sequence(0, 8, 30, token=9) for _ in range(6)]
    scheduler.add(*request)
    device = Device(scheduler, scheduler.each[0].limits)
    for _ in range(4):
        device.step()
    assert [len(one.running) for one in scheduler.each] == [2, 2, 2]
    gone = scheduler.each[1].running[0]
    scheduler.preempt(gone)
    scheduler.finish(scheduler.each[0].running[0], "abort")
    device.step()
    assert gone.replica == 1
    device.run()


def test_pages_have_the_device_s_numbers():
    """A copy inside of a replica's page table is one of the pages that are its own."""
    scheduler = make(2, pages=(10, 12))
    table = scheduler.each[1].pages
    node = Node((1, 2, 3, 4), None, [3, 5])
    copies = [Copy(node, 0), Copy(node, 1)]
    table.moves = Moves([(3, copies[0]), (5, copies[1])], [(1, 2, 4)], {(0, 7): copies[0]})
    moves = Tables([scheduler.each[0].pages, table]).take_moves()
    assert moves.out == [(13, copies[0]), (17, copies[1])]
    assert moves.within == [(1, 14, 16)] and moves.back == {(0, 17): copies[0]}


@pytest.mark.parametrize("seed", range(4))
def test_one_buffer_for_all(seed):
    """Each replica's part is what a batcher of its own makes at that size; of one that does nothing it is padding."""
    rng = np.random.default_rng(seed)
    scheduler, sizes = make(), (Limits(4, 16, 16), 2, PAGE, 16)
    together, alone = batcher_of(3, *sizes, lanes=1), [Batcher(*sizes) for _ in range(3)]
    assert isinstance(together, Batchers)
    device, seen = Device(scheduler, scheduler.each[0].limits), set()
    schedule = scheduler.schedule

    def watched():
        plan = schedule()
        if plan is None:
            return None
        for item in plan.items:
            if item.begins:
                together.assign(item.seq, False)
                alone[item.seq.replica].assign(item.seq, False)
        size, buffer = together.build(plan)
        parts = np.split(buffer, 3)
        own = {number: tuple(items) for number, items in groupby(plan.items, lambda item: item.seq.replica)}
        for number, part in enumerate(parts):
            wanted = together.layouts[size].padding
            if number in own:
                wanted = alone[number].fill(Plan(own[number]), size)
            np.testing.assert_array_equal(part, wanted)
        seen.add((len(own), plan.decodes))
        return plan

    scheduler.schedule = watched
    for index in range(9):
        scheduler.add(sequence(index, int(rng.integers(1, 20)), int(rng.integers(4, 20))))
    device.run()
    assert {(3, False), (3, True)} <= seen and min(seen)[0] < 3


@pytest.mark.parametrize("lanes", [2, 3])
def test_a_lane_goes_on_from_its_own_last_step(lanes):
    """Most steps are made from the last one of the same sequences; the host knows every token."""
    limits = Limits(8, 32, 16)
    scheduler = Scheduler(PageTable((64, 64), PAGE, (None, 8)), limits, lanes)
    batcher, fresh = (Batcher(limits, 2, PAGE, 16, lanes=lanes) for _ in range(2))
    flying, steps, advanced = deque(), 0, 0
    for index in range(7):
        seq = sequence(index, 3 + index % 3, 20 + 3 * (index % 2))
        seq.lockstep = True
        scheduler.add(seq)
    while scheduler.busy or flying:
        if (plan := scheduler.schedule()) is not None:
            for item in plan.items:
                if item.begins:
                    batcher.assign(item.seq, False)
                    fresh.assign(item.seq, False)
            again = batcher.lasts[0].seqs if batcher.lasts else None
            size, buffer = batcher.build(plan)
            advanced += bool(batcher.lasts) and batcher.lasts[-1].seqs is again
            np.testing.assert_array_equal(buffer, fresh.fill(plan, size))
            flying.append(plan)
            steps += 1
        if plan is None or len(flying) == lanes:
            for item in flying.popleft().items:
                if item.draws:
                    item.seq.pending -= 1
                    item.seq.tokens.append(steps % 5)
                    if item.seq.num_output == item.seq.max_tokens:
                        scheduler.finish(item.seq, "length")
    assert advanced > steps / 2
