"""Replicas with one queue and a fake device: routing of sequences, and the shared step buffer."""

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

PAGE_SIZE = 4


def make_scheduler(replicas=3, pages=(64, 64), limits=(4, 16, 16), **options) -> Scheduler:
    tables = [
        PageTable(pages, PAGE_SIZE, (None, 8), replica=replica_index)
        for replica_index in range(replicas)
    ]
    return Scheduler(tables, StepShape.largest(*limits, page_size=PAGE_SIZE, **options))


@pytest.mark.parametrize("seed", range(12))
def test_all_sequences_finish_within_replica_limits(seed):
    """Under random load; the fake device checks limits and the order of tokens in each replica."""
    rng = np.random.default_rng(seed)
    pages = tuple(rng.integers(14, 40, 2).tolist())
    scheduler = make_scheduler(int(rng.integers(2, 5)), pages, max_drafts=seed % 2 * 3)
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


def test_prompts_are_spread_evenly():
    scheduler = make_scheduler()
    for index in range(12):
        scheduler.add(sequence(index, 16, 4))
    assert Counter(seq.replica for seq in scheduler.waiting) == dict.fromkeys(range(3), 4)
    device = Device(scheduler)
    device.step()
    assert all(replica.running for replica in scheduler.replicas)
    device.run()


def test_cached_prefix_attracts_sequences_up_to_a_limit():
    scheduler = make_scheduler(limits=(16, 256, 32), pages=(400, 400))
    device = Device(scheduler)
    scheduler.add(first := sequence(0, 200, 2, token=7))
    device.run()
    later_sequences = [sequence(index, 200, 2, token=7) for index in range(1, 6)]
    for seq in later_sequences:
        scheduler.add(seq)
    colocated = [seq for seq in later_sequences if seq.replica == first.replica]
    assert 1 <= len(colocated) < 5
    device.run()
    assert all(seq.cache.num_cached >= 196 for seq in colocated)


def test_samples_of_one_request_share_a_replica():
    scheduler = make_scheduler()
    request = [sequence(0, 20, 3, token=9) for _ in range(3)]
    scheduler.add(*request)
    assert len({seq.replica for seq in request}) == 1
    Device(scheduler).run()


def test_waiting_sequence_moves_to_a_replica_with_free_pages():
    """It leaves a replica with three free slots but no free page for one with a slot and pages."""
    scheduler = make_scheduler(2, pages=(16, 16))
    device = Device(scheduler)

    def enqueue(seq, replica_index):
        seq.replica = replica_index
        scheduler.waiting.enter(seq)

    enqueue(sequence(0, 48, 8), 0)
    for index in (1, 2, 3):
        enqueue(sequence(index, 4, 8), 1)
    for _ in range(4):
        device.step()
    waiting = sequence(4, 20, 4)
    enqueue(waiting, 0)
    for _ in range(2):
        device.step()
    assert [len(replica.free_slots) for replica in scheduler.replicas] == [
        3,
        0,
    ] and waiting.replica == 1
    device.run()


def test_waiting_sequences_fill_free_slots_and_preempted_ones_return():
    """One request has more samples than a replica has slots: other replicas take the rest. A
    preempted sequence returns to the replica with its pages.
    """
    scheduler = make_scheduler(limits=(2, 16, 16))
    request = [sequence(0, 8, 30, token=9) for _ in range(6)]
    scheduler.add(*request)
    device = Device(scheduler)
    for _ in range(4):
        device.step()
    assert [len(replica.running) for replica in scheduler.replicas] == [2, 2, 2]
    preempted = scheduler.replicas[1].running[0]
    scheduler.preempt(preempted)
    scheduler.finish(scheduler.replicas[0].running[0], "abort")
    device.step()
    assert preempted.replica == 1
    device.run()


def test_page_numbers_are_global_on_the_device():
    """Moves within the second replica's page table are offset by the first replica's pages."""
    scheduler = make_scheduler(2, pages=(10, 12))
    table = scheduler.replicas[1].table
    node = Node((1, 2, 3, 4), None, [3, 5])
    copies = [HostCopy(node, 0), HostCopy(node, 1)]
    table.moves = PageMoves([(3, copies[0]), (5, copies[1])], [(1, 2, 4)], {(0, 7): copies[0]})
    moves = scheduler.take_moves()
    assert moves.offloads == [(13, copies[0]), (17, copies[1])]
    assert moves.copies == [(1, 14, 16)] and moves.restores == {(0, 17): copies[0]}


@pytest.mark.parametrize("seed", range(4))
def test_shared_buffer_equals_single_replica_buffers(seed):
    """A replica's part equals what a single-replica builder makes, or is padding if it is idle."""
    rng = np.random.default_rng(seed)
    scheduler = make_scheduler()
    shape = StepShape.largest(4, 16, 16).with_cache(2, PAGE_SIZE, 16 * PAGE_SIZE, 3)
    shared_builder = BatchBuilder(shape)
    replica_builders = [BatchBuilder(replace(shape, num_replicas=1)) for _ in range(3)]
    device = Device(scheduler)
    plan_kinds = set()
    schedule = scheduler.schedule

    def as_single_replica(item: ScheduledSequence) -> ScheduledSequence:
        """Returns the item as if there were only one replica."""
        return item._replace(seq=replace(item.seq, replica=0))

    def schedule_and_compare(drafts: bool) -> StepPlan | None:
        plan = schedule(drafts)
        if plan is None:
            return None
        for item in plan.items:
            if item.is_first_step:
                shared_builder.assign(item.seq, False)
                replica_builders[item.seq.replica].assign(as_single_replica(item).seq, False)
        size, buffer = shared_builder.build(plan)
        replica_buffers = np.split(buffer, 3)
        for replica_buffer, items, builder in zip(
            replica_buffers, plan.parts, replica_builders, strict=True
        ):
            expected = builder.layouts[size].padding.copy()
            if items:
                builder.fill(deque(), [as_single_replica(item) for item in items], size, expected)
            np.testing.assert_array_equal(replica_buffer, expected)
        plan_kinds.add((sum(map(bool, plan.parts)), plan.decodes))
        return plan

    scheduler.schedule = schedule_and_compare
    for index in range(9):
        scheduler.add(sequence(index, int(rng.integers(1, 20)), int(rng.integers(4, 20))))
    device.run()
    assert {(3, False), (3, True)} <= plan_kinds and min(plan_kinds)[0] < 3


@pytest.mark.parametrize("stages", [2, 3])
def test_pipelined_steps_are_built_from_the_previous_one(stages):
    """Most steps extend the last step of the same sequences, and equal ones built from scratch."""
    shape = StepShape.largest(8, 32, 16).with_cache(2, PAGE_SIZE, 16 * PAGE_SIZE)
    scheduler = Scheduler([PageTable((64, 64), PAGE_SIZE, (None, 8))], shape, stages)
    builder, reference_builder = (BatchBuilder(shape, stages) for _ in range(2))
    in_flight = deque()
    num_steps = 0
    num_continued = 0
    for index in range(7):
        seq = sequence(index, 3 + index % 3, 20 + 3 * (index % 2))
        seq.needs_host_token = True
        scheduler.add(seq)
    while scheduler.busy or in_flight:
        if (plan := scheduler.schedule()) is not None:
            for item in plan.items:
                if item.is_first_step:
                    builder.assign(item.seq, False)
                    reference_builder.assign(item.seq, False)
            steps = builder.decode_steps[0]
            continued_seqs = steps[0].seqs if steps else None
            size, buffer = builder.build(plan)
            num_continued += bool(steps) and steps[-1].seqs is continued_seqs
            reference_builder.forget()
            expected_size, expected = reference_builder.build(plan)
            assert expected_size == size
            np.testing.assert_array_equal(buffer, expected)
            in_flight.append(plan)
            num_steps += 1
        if plan is None or len(in_flight) == stages:
            for item in in_flight.popleft().items:
                if item.num_samples:
                    item.seq.pending -= 1
                    item.seq.tokens.append(num_steps % 5)
                    if item.seq.num_output == item.seq.max_tokens:
                        scheduler.finish(item.seq, "length")
    assert num_continued > num_steps / 2
