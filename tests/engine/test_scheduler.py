"""The scheduler with a fake device, which returns a step's tokens one step later, as an engine
does.
"""

import numpy as np
import pytest

from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.scheduler import Scheduler
from quire.serving.engine.waiting_queue import WaitingQueue
from quire.serving.request.sequence import Sequence
from quire.tests.support.fake_device import Device, random_sequences, sequence


def make_scheduler(
    pages=(64, 64), limits=(4, 16, 16), page_size=4, windows=(None, 8), **draft_limits
) -> Scheduler:
    shape = StepShape.largest(*limits, page_size=page_size, **draft_limits)
    return Scheduler([PageTable(pages, page_size, windows)], shape)


@pytest.mark.parametrize("seed", range(30))
def test_all_sequences_finish_within_limits(seed):
    rng = np.random.default_rng(seed)
    pages = tuple(rng.integers(14, 40, 2).tolist())
    max_drafts = seed % 2 * 3
    scheduler = make_scheduler(pages=pages, limits=(4, 16, 16), max_drafts=max_drafts)
    device = Device(scheduler)
    sequences = []
    aborted = set()
    for seq in random_sequences(rng, scheduler, 60):
        sequences.append(seq)
        for _ in range(int(rng.integers(0, 4))):
            device.step()
        if rng.random() < 0.15:
            aborted_seq = sequences[int(rng.integers(len(sequences)))]
            if aborted_seq.finish_reason is None:
                scheduler.finish(aborted_seq, "abort")
                aborted.add(aborted_seq)
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
    assert not max_drafts or (device.accepted and device.rejected)


def test_decodes_continue_during_a_chunked_prefill():
    scheduler = make_scheduler(pages=(200, 200))
    device = Device(scheduler)
    decoding = sequence(0, 2, 50)
    prefilling = sequence(1, 100, 2)
    scheduler.add(decoding)
    device.step()
    scheduler.add(prefilling)
    for _ in range(6):
        num_computed = decoding.num_computed
        device.step()
        assert decoding.num_computed == num_computed + 1
        assert prefilling.num_computed <= 100
    assert prefilling.num_computed == 90  # 15 tokens per step, as the decode takes one


def test_token_budget_is_filled():
    scheduler = make_scheduler(pages=(200, 200))
    for index in range(4):
        scheduler.add(sequence(index, 10, 2))
    assert scheduler.schedule().num_tokens == 16


def test_first_come_first_served():
    scheduler = make_scheduler(pages=(200, 200), limits=(1, 16, 16))
    device = Device(scheduler)
    sequences = [sequence(index, 5, 3) for index in range(5)]
    for seq in sequences:
        scheduler.add(seq)
    finished_ranks = []
    while scheduler.busy or device.in_flight:
        device.step()
        finished_ranks += [
            seq.rank for seq in sequences if seq.finish_reason and seq.rank not in finished_ranks
        ]
    assert finished_ranks == sorted(finished_ranks)


def test_latest_sequence_is_preempted_first():
    scheduler = make_scheduler(pages=(12, 12), page_size=4, windows=(None, 8), limits=(4, 16, 16))
    device = Device(scheduler)
    sequences = [sequence(index, 12, 20) for index in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    device.run()
    assert sequences[0].num_preemptions == 0
    assert sum(seq.num_preemptions for seq in sequences) > 0


def test_no_token_is_computed_past_max_tokens():
    scheduler = make_scheduler()
    device = Device(scheduler)
    seq = sequence(0, 3, 4)
    scheduler.add(seq)
    device.run()
    assert device.computed[seq] == 3 + 4 - 1  # the last sampled token is never computed


def test_sequence_that_needs_a_host_token_waits_for_it():
    scheduler = make_scheduler()
    device = Device(scheduler)
    seq = sequence(0, 3, 4, needs_host_token=True)
    scheduler.add(seq)
    device.step()
    assert seq.pending == 1
    assert scheduler.schedule() is None


def test_shared_prefix_is_computed_once():
    scheduler = make_scheduler(pages=(60, 60), limits=(4, 64, 16))
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


def test_preempted_sequence_reuses_its_cached_pages():
    scheduler = make_scheduler(pages=(40, 40), limits=(4, 64, 16))
    device = Device(scheduler)
    seq = sequence(0, 30, 20)
    scheduler.add(seq)
    for _ in range(5):
        device.step()
    scheduler.preempt(seq)
    device.step()  # collects its last token
    (item,) = scheduler.schedule().items
    # 36 with the token that this step samples
    assert item.is_first_step and (item.start, item.num_tokens) == (34, 1) and seq.num_tokens == 36
    assert seq.cache.num_cached == 0 and seq.num_preemptions == 1


def test_waiting_prompt_is_not_matched_at_every_step(monkeypatch):
    scheduler = make_scheduler(pages=(12, 12))
    device = Device(scheduler)
    scheduler.add(sequence(0, 12, 25))
    device.step()
    scheduler.add(sequence(1, 36, 2))
    lookups = []
    match = scheduler.replicas[0].table.match
    monkeypatch.setattr(
        scheduler.replicas[0].table, "match", lambda seq: lookups.append(seq) or match(seq)
    )
    for _ in range(20):
        device.step()
    assert len(lookups) < 8  # once, and again when a sliding window frees a page


def test_late_tenant_starts_with_the_smallest_service():
    """It neither gains from its idle time nor repays earlier service of others; a tenant with more
    service than others keeps its count when it returns.
    """
    queue = WaitingQueue()

    def enter(tenant: str, rank: float) -> Sequence:
        seq = sequence(0, 4, 4)
        seq.tenant = tenant
        seq.rank = rank
        queue.enter(seq)
        return seq

    first_seq = enter("a", 0)
    second_seq = enter("b", 1)
    queue.serve(first_seq, 1000)
    queue.serve(second_seq, 600)
    late_seq = enter("c", 2)
    assert queue.served == {"a": 1000, "b": 600, "c": 600}
    # of two tenants with equal service, the earlier sequence is first
    assert queue.first(lambda seq: True) is second_seq
    queue.serve(second_seq, 1)
    assert queue.first(lambda seq: True) is late_seq
    queue.serve(late_seq, 5000)
    # the others are skipped while they are not ready
    assert queue.first(lambda seq: seq is not second_seq) is first_seq
    queue.remove(late_seq)
    queue.leave(late_seq)
    returning_seq = enter("c", 3)
    assert queue.served["c"] == 5600
    for seq in (first_seq, second_seq, returning_seq):
        queue.remove(seq)
        queue.leave(seq)
    assert not queue.served and not queue.waiting and len(queue) == 0
