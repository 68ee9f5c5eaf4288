"""The page table against a plain model of who owns what, over random operations."""

import numpy as np
import pytest

from quire.serving.pages import PageTable
from quire.serving.request import SamplingParams
from quire.serving.sequence import Sequence


def sequence(length: int = 1) -> Sequence:
    return Sequence(0, list(range(length)), length, SamplingParams(), 10, 0)


def visible(table: PageTable, group: int, seq: Sequence, length: int) -> set[int]:
    """The logical pages that hold a position which a row from `num_computed` on may see."""
    window = table.groups[group].window
    first = 0 if window is None else max(0, seq.num_computed - window + 1)
    return {position // table.page_size for position in range(first, length)}


@pytest.mark.parametrize("page_size", [1, 4, 8, 16])
def test_random_operations_keep_every_page_accounted_for(page_size):
    rng = np.random.default_rng(page_size)
    table = PageTable([40, 25, 18], page_size, [None, 3 * page_size, 5])
    live: list[Sequence] = []
    lengths: dict[int, int] = {}
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.2 or not live:
            seq = sequence()
            live.append(seq)
            lengths[id(seq)] = 0
        seq = live[int(rng.integers(len(live)))]
        if choice < 0.75:
            before = [list(pages) for pages in seq.pages] or [[], [], []]
            wanted = lengths[id(seq)] + int(rng.integers(1, 3 * page_size + 2))
            table.slide(seq)
            free = [len(group.free) for group in table.groups]
            if table.grow(seq, wanted):
                lengths[id(seq)] = wanted
                for index in range(3):
                    pages = seq.pages[index]
                    assert all(pages[page] for page in visible(table, index, seq, wanted))
                    assert all(new == old for old, new in zip(before[index], pages, strict=False) if new)
                seq.num_computed = int(rng.integers(seq.num_computed, wanted + 1))
            else:
                assert free == [len(group.free) for group in table.groups], "a refusal must change nothing"
        elif choice < 0.9:
            table.slide(seq)
            for index, group in enumerate(table.groups):
                for page, number in enumerate(seq.pages[index] if seq.pages else ()):
                    gone = group.window is not None and (page + 1) * page_size <= seq.num_computed - group.window + 1
                    assert (number == 0) == gone
        else:
            table.release(seq)
            live.remove(seq)
        table.check(live)
    for seq in live:
        table.release(seq)
    assert [len(group.free) for group in table.groups] == [39, 24, 17]
    table.check([])


def test_check_finds_what_it_is_for():
    table = PageTable([8], 4, [None])
    seq = sequence()
    table.grow(seq, 9)
    table.check([seq])
    with pytest.raises(AssertionError, match="neither"):
        table.check([])
    table.groups[0].free.append(seq.pages[0][0])
    with pytest.raises(AssertionError, match="twice"):
        table.check([seq])


def test_a_sequence_never_holds_more_than_it_was_sized_for():
    for page_size, window, chunk in [(4, 9, 7), (8, 8, 16), (16, 5, 64), (1, 3, 2)]:
        table = PageTable([500, 500], page_size, [None, window])
        seq, length = sequence(), 200
        while seq.num_computed < length:
            count = min(chunk, length - seq.num_computed)
            table.slide(seq)
            assert table.grow(seq, seq.num_computed + count)
            for group, pages in zip(table.groups, seq.pages, strict=True):
                assert sum(map(bool, pages)) <= table.most_pages(group, length, chunk)
            seq.num_computed += count


def test_used_follows_the_fullest_group():
    table = PageTable([11, 6], 4, [None, 4])
    assert table.used() == 0
    table.grow(sequence(), 12)
    assert table.used() == pytest.approx(3 / 5)
