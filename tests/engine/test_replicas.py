"""Replicas behind one queue, with a pretended device: who goes where, and the one buffer of a
step.
"""

from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest

from quire.serving.cache.page_moves import PageMoves
from quire.serving.cache.page_table import PageTable
from quire.serving.cache.prefix_tree import HostCopy, Node
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.batch_builder import BatchBuilder
from quire.serving.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from quire.tests.support.fake_device import Device, random_sequences, sequence

PAGE = 4


def make(replicas=3, pages=(64, 64), limits=(4, 16, 16), **options) -> Scheduler:
    tables = [PageTable(pages, PAGE, (None, 8), replica=number) for number in range(replicas)]
    return Scheduler(tables, StepShape.largest(*limits, page_size=PAGE, **options))


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_ends_once_whatever_the_load(seed):
    """Within each replica's limits, and never in two of them: what is computed is in the order of
    its rows.
    """
    rng = np.random.default_rng(seed)
    pages = tuple(rng.integers(14, 40, 2).tolist())
    scheduler = make(int(rng.integers(2, 5)), pages, max_drafts=seed % 2 * 3)
    device = Device(scheduler)
    sequences = []
    for seq in random_sequences(rng, scheduler, 80):
        sequences.append(seq)
        if rng.random() < 0.1:
            scheduler.finish(sequences[int(rng.integers(len(sequences)))], "abort")
        for _ in range(int(rng.integers(3))):
            device.step()
    device.run()
    assert all(seq.finish_reason for seq in sequences)
    assert {seq.replica for seq in sequences} == set(range(len(scheduler.replicas)))
    for replica in scheduler.replicas:
        assert len(replica.free_slots) == replica.shape.max_seqs and not replica.running


def test_prompts_spread_evenly():
    scheduler = make()
    for index in range(12):
        scheduler.add(sequence(index, 16, 4))
    assert Counter(seq.replica for seq in scheduler.waiting) == dict.fromkeys(range(3), 4)
    device = Device(scheduler)
    device.step()
    assert all(replica.running for replica in scheduler.replicas)
    device.run()


def test_a_beginning_that_is_known_is_worth_going_to():
    """As long as not too many are there already."""
    scheduler = make(limits=(16, 256, 32), pages=(400, 400))
    device = Device(scheduler)
    scheduler.add(first := sequence(0, 200, 2, token=7))
    device.run()
    others = [sequence(index, 200, 2, token=7) for index in range(1, 6)]
    for seq in others:
        scheduler.add(seq)
    here = [seq for seq in others if seq.replica == first.replica]
    assert 1 <= len(here) < 5
    device.run()
    assert all(seq.cache.num_cached >= 196 for seq in here)


def test_answers_of_one_request_stay_together():
    scheduler = make()
    request = [sequence(0, 20, 3, token=9) for _ in range(3)]
    scheduler.add(*request)
    assert len({seq.replica for seq in request}) == 1
    Device(scheduler).run()


def test_who_waits_for_pages_goes_where_there_are_some():
    """To the replica with one free slot and pages, not back to that with three slots and no
    page.
    """
    scheduler = make(2, pages=(16, 16))
    device = Device(scheduler)

    def send(seq, number):
        seq.replica = number
        scheduler.waiting.enter(seq)

    send(sequence(0, 48, 8), 0)
    for index in (1, 2, 3):
        send(sequence(index, 4, 8), 1)
    for _ in range(4):
        device.step()
    waits = sequence(4, 20, 4)
    send(waits, 0)
    for _ in range(2):
        device.step()
    assert [len(replica.free_slots) for replica in scheduler.replicas] == [
        3,
        0,
    ] and waits.replica == 1
    device.run()


def test_nobody_waits_beside_a_free_slot():
    """More answers than a replica has slots: those that wait go to the others; who gave way comes
    back to his pages.
    """
    scheduler = make(limits=(2, 16, 16))
    request = [sequence(0, 8, 30, token=9) for _ in range(6)]
    scheduler.add(*request)
    device = Device(scheduler)
    for _ in range(4):
        device.step()
    assert [len(replica.running) for replica in scheduler.replicas] == [2, 2, 2]
    gone = scheduler.replicas[1].running[0]
    scheduler.preempt(gone)
    scheduler.finish(scheduler.replicas[0].running[0], "abort")
    device.step()
    assert gone.replica == 1
    device.run()


def test_pages_have_the_device_s_numbers():
    """A copy inside of a replica's page table is one of the pages that are its own."""
    scheduler = make(2, pages=(10, 12))
    table = scheduler.replicas[1].table
    node = Node((1, 2, 3, 4), None, [3, 5])
    copies = [HostCopy(node, 0), HostCopy(node, 1)]
    table.moves = PageMoves([(3, copies[0]), (5, copies[1])], [(1, 2, 4)], {(0, 7): copies[0]})
    moves = scheduler.take_moves()
    assert moves.offloads == [(13, copies[0]), (17, copies[1])]
    assert moves.copies == [(1, 14, 16)] and moves.restores == {(0, 17): copies[0]}


@pytest.mark.parametrize("seed", range(4))
def test_one_buffer_for_all(seed):
    """Each replica's part is what a builder of its own makes at that size; where it computes
    nothing it is padding.
    """
    rng = np.random.default_rng(seed)
    scheduler = make()
    shape = StepShape.largest(4, 16, 16).with_cache(2, PAGE, 16 * PAGE, 3)
    together = BatchBuilder(shape)
    alone = [BatchBuilder(replace(shape, num_replicas=1)) for _ in range(3)]
    device = Device(scheduler)
    seen = set()
    schedule = scheduler.schedule

    def own(item: ScheduledSequence) -> ScheduledSequence:
        """The same where there is only one replica."""
        return item._replace(seq=replace(item.seq, replica=0))

    def watched(drafts: bool) -> StepPlan | None:
        plan = schedule(drafts)
        if plan is None:
            return None
        for item in plan.items:
            if item.is_first_step:
                together.assign(item.seq, False)
                alone[item.seq.replica].assign(own(item).seq, False)
        size, buffer = together.build(plan)
        parts = np.split(buffer, 3)
        for part, items, builder in zip(parts, plan.parts, alone, strict=True):
            wanted = builder.layouts[size].padding.copy()
            if items:
                builder.fill(deque(), [own(item) for item in items], size, wanted)
            np.testing.assert_array_equal(part, wanted)
        seen.add((sum(map(bool, plan.parts)), plan.decodes))
        return plan

    scheduler.schedule = watched
    for index in range(9):
        scheduler.add(sequence(index, int(rng.integers(1, 20)), int(rng.integers(4, 20))))
    device.run()
    assert {(3, False), (3, True)} <= seen and min(seen)[0] < 3


@pytest.mark.parametrize("stages", [2, 3])
def test_a_step_continues_the_one_of_its_own_sequences(stages):
    """Most steps are made from the last one of the same sequences; the host knows every token."""
    shape = StepShape.largest(8, 32, 16).with_cache(2, PAGE, 16 * PAGE)
    scheduler = Scheduler([PageTable((64, 64), PAGE, (None, 8))], shape, stages)
    builder, fresh = (BatchBuilder(shape, stages) for _ in range(2))
    flying = deque()
    count = 0
    num_continued = 0
    for index in range(7):
        seq = sequence(index, 3 + index % 3, 20 + 3 * (index % 2))
        seq.needs_host_token = True
        scheduler.add(seq)
    while scheduler.busy or flying:
        if (plan := scheduler.schedule()) is not None:
            for item in plan.items:
                if item.is_first_step:
                    builder.assign(item.seq, False)
                    fresh.assign(item.seq, False)
            steps = builder.decode_steps[0]
            again = steps[0].seqs if steps else None
            size, buffer = builder.build(plan)
            num_continued += bool(steps) and steps[-1].seqs is again
            fresh.forget()
            same_size, wanted = fresh.build(plan)
            assert same_size == size
            np.testing.assert_array_equal(buffer, wanted)
            flying.append(plan)
            count += 1
        if plan is None or len(flying) == stages:
            for item in flying.popleft().items:
                if item.num_samples:
                    item.seq.pending -= 1
                    item.seq.tokens.append(count % 5)
                    if item.seq.num_output == item.seq.max_tokens:
                        scheduler.finish(item.seq, "length")
    assert num_continued > count / 2
