"""The scheduler with a pretended device: a step's tokens come back one step late, as they do in
service.
"""

import numpy as np
import pytest

from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.scheduler import Scheduler
from quire.serving.engine.waiting_queue import WaitingQueue
from quire.serving.request.sequence import Sequence
from quire.tests.support.fake_device import Device, random_sequences, sequence


def make(pages=(64, 64), limits=(4, 16, 16), page_size=4, windows=(None, 8), **drafts) -> Scheduler:
    shape = StepShape.largest(*limits, page_size=page_size, **drafts)
    return Scheduler([PageTable(pages, page_size, windows)], shape)


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_ends_once_whatever_the_load(seed):
    rng = np.random.default_rng(seed)
    pages = tuple(rng.integers(14, 40, 2).tolist())
    drafts = seed % 2 * 3
    scheduler = make(pages=pages, limits=(4, 16, 16), max_drafts=drafts)
    device = Device(scheduler)
    sequences = []
    aborted = set()
    for seq in random_sequences(rng, scheduler, 60):
        sequences.append(seq)
        for _ in range(int(rng.integers(0, 4))):
            device.step()
        if rng.random() < 0.15:
            victim = sequences[int(rng.integers(len(sequences)))]
            if victim.finish_reason is None:
                scheduler.finish(victim, "abort")
                aborted.add(victim)
    device.run()
    for seq in sequences:
        if seq in aborted:
            assert seq.finish_reason == "abort"
            continue
        assert seq.finish_reason == "length"
        assert seq.num_output == seq.max_tokens
        assert seq.prompt_scores is None or all(seq.prompt_scores)
    assert all(group.num_free == group.num_pages - 1 for group in scheduler.replicas[0].table.pools)
    assert len(scheduler.replicas[0].free_slots) == 4
    assert not drafts or (device.accepted and device.rejected)


def test_decodes_do_not_wait_for_a_long_prompt():
    scheduler = make(pages=(200, 200))
    device = Device(scheduler)
    short = sequence(0, 2, 50)
    long = sequence(1, 100, 2)
    scheduler.add(short)
    device.step()
    scheduler.add(long)
    for _ in range(6):
        before = short.num_computed
        device.step()
        assert short.num_computed == before + 1
        assert long.num_computed <= 100
    assert long.num_computed == 90  # the 15 rows of each step that the decode left


def test_the_budget_is_filled():
    scheduler = make(pages=(200, 200))
    for index in range(4):
        scheduler.add(sequence(index, 10, 2))
    assert scheduler.schedule().num_tokens == 16


def test_first_come_first_served():
    scheduler = make(pages=(200, 200), limits=(1, 16, 16))
    device = Device(scheduler)
    sequences = [sequence(index, 5, 3) for index in range(5)]
    for seq in sequences:
        scheduler.add(seq)
    ended = []
    while scheduler.busy or device.in_flight:
        device.step()
        ended += [seq.rank for seq in sequences if seq.finish_reason and seq.rank not in ended]
    assert ended == sorted(ended)


def test_the_latest_arrival_gives_way():
    scheduler = make(pages=(12, 12), page_size=4, windows=(None, 8), limits=(4, 16, 16))
    device = Device(scheduler)
    sequences = [sequence(index, 12, 20) for index in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    device.run()
    assert sequences[0].num_preemptions == 0
    assert sum(seq.num_preemptions for seq in sequences) > 0


def test_no_row_is_computed_past_max_tokens():
    scheduler = make()
    device = Device(scheduler)
    seq = sequence(0, 3, 4)
    scheduler.add(seq)
    device.run()
    assert device.computed[seq] == 3 + 4 - 1  # the last token drawn is never fed back


def test_sequence_that_needs_a_host_token_waits_for_it():
    scheduler = make()
    device = Device(scheduler)
    seq = sequence(0, 3, 4, needs_host_token=True)
    scheduler.add(seq)
    device.step()
    assert seq.pending == 1
    assert scheduler.schedule() is None


def test_who_begins_alike_computes_the_beginning_once():
    scheduler = make(pages=(60, 60), limits=(4, 64, 16))
    device = Device(scheduler)
    sequences = [sequence(index, 30, 3, token=7) for index in range(3)]
    scheduler.add(sequences[0])
    device.step()
    for seq in sequences[1:]:
        scheduler.add(seq)
    plan = scheduler.schedule()
    assert [
        (item.start, item.num_tokens) for item in plan.items if item.seq is not sequences[0]
    ] == [(28, 2)] * 2
    assert [seq.cache.num_cached for seq in sequences] == [0, 28, 28]


def test_who_gave_way_finds_its_pages_again():
    scheduler = make(pages=(40, 40), limits=(4, 64, 16))
    device = Device(scheduler)
    seq = sequence(0, 30, 20)
    scheduler.add(seq)
    for _ in range(5):
        device.step()
    scheduler.preempt(seq)
    device.step()  # takes in its last token
    (item,) = scheduler.schedule().items
    # with the one it draws now
    assert item.is_first_step and (item.start, item.num_tokens) == (34, 1) and seq.num_tokens == 36
    assert seq.cache.num_cached == 0 and seq.num_preemptions == 1


def test_a_prompt_that_waits_is_not_looked_up_at_every_step(monkeypatch):
    scheduler = make(pages=(12, 12))
    device = Device(scheduler)
    scheduler.add(sequence(0, 12, 25))
    device.step()
    scheduler.add(sequence(1, 36, 2))
    looks = []
    match = scheduler.replicas[0].table.match
    monkeypatch.setattr(
        scheduler.replicas[0].table, "match", lambda seq: looks.append(seq) or match(seq)
    )
    for _ in range(20):
        device.step()
    assert len(looks) < 8  # once, and again when a window has left a page


def test_who_comes_late_starts_level():
    """Neither behind for what others were given before, nor ahead of them; and who had more than
    his share keeps it.
    """
    queue = WaitingQueue()

    def enter(tenant: str, rank: float) -> Sequence:
        seq = sequence(0, 4, 4)
        seq.tenant = tenant
        seq.rank = rank
        queue.enter(seq)
        return seq

    first = enter("a", 0)
    other = enter("b", 1)
    queue.serve(first, 1000)
    queue.serve(other, 600)
    late = enter("c", 2)
    assert queue.served == {"a": 1000, "b": 600, "c": 600}
    assert queue.first(lambda seq: True) is other  # it came before the one that had as little
    queue.serve(other, 1)
    assert queue.first(lambda seq: True) is late
    queue.serve(late, 5000)
    # the others are skipped while they are not ready
    assert queue.first(lambda seq: seq is not other) is first
    queue.remove(late)
    queue.leave(late)
    back = enter("c", 3)
    assert queue.served["c"] == 5600
    for seq in (first, other, back):
        queue.remove(seq)
        queue.leave(seq)
    assert not queue.served and not queue.waiting and len(queue) == 0
