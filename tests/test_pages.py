"""The page table against a plain model of who owns what and which page holds which tokens, over random operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.serving.pages import PageTable
from quire.serving.request import SamplingParams
from quire.serving.sequence import Sequence


def sequence(tokens=(0,), salt: str | None = None) -> Sequence:
    return Sequence(0, list(tokens), len(tokens), SamplingParams(), 10**6, 0, salt=salt)


class Pages(RuleBasedStateMachine):
    """Sequences that begin, grow, slide, end and give way, over a pool too small for them.

    `holds` is what is written in each page of each group: the salt, with all tokens up to the page's end.
    """

    @initialize(size=st.sampled_from([1, 2, 4]), pages=st.tuples(*[st.integers(8, 24)] * 3))
    def make(self, size, pages):
        self.size, self.chunk = size, 2 * size
        self.table = PageTable(pages, size, [None, 3 * size, 5])
        self.live: list[Sequence] = []
        self.holds: list[dict[int, tuple]] = [{}, {}, {}]

    def first_seen(self, group: int, position: int) -> int:
        window = (None, 3 * self.size, 5)[group]
        return 0 if window is None else max(0, position - window + 1) // self.size

    def known(self, group: int) -> set[tuple]:
        """What can be found by its content: full pages that somebody has or that are kept."""
        found = self.table.tree.where[group]
        return {content for page, content in self.holds[group].items() if page in found}

    @rule(
        data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from([None, "a"])
    )
    def begin(self, data, tokens, salt):
        seq = sequence(tokens, salt)
        path = self.table.match(seq)
        longest = max(
            n
            for n in range((len(tokens) - 1) // self.size + 1)
            if all(
                (salt, *tokens[: (page + 1) * self.size]) in self.known(group)
                for group in range(3)
                for page in range(self.first_seen(group, n * self.size), n)
            )
        )
        assert len(path) == longest
        if not self.table.admits(seq, path, self.live, self.chunk):
            return
        self.table.adopt(seq, path)
        self.live.append(seq)
        for group, table in enumerate(seq.pages):
            for page in range(self.first_seen(group, seq.num_computed), longest):
                assert self.holds[group][table[page]] == (salt, *tokens[: (page + 1) * self.size])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        """Rows are computed; once the prompt is, a token is drawn."""
        seq = data.draw(st.sampled_from(self.live))
        count = min(len(seq.tokens) - seq.num_computed, data.draw(st.integers(1, self.chunk)))
        if not count:
            seq.tokens.append(data.draw(st.integers(0, 1)))
            count = 1
        self.table.enter(seq, seq.num_computed)
        self.table.slide(seq)
        before = [list(pages) for pages in seq.pages]
        free = [group.free for group in self.table.groups]
        end = seq.num_computed + count
        if not self.table.grow(seq, end):
            assert free == [group.free for group in self.table.groups], "a refusal must change nothing"
            self.end(seq)
            return
        for group, pages in enumerate(seq.pages):
            assert all(new == old for old, new in zip(before[group], pages, strict=False))
            assert all(pages[page] for page in range(self.first_seen(group, seq.num_computed), len(pages)))
            for page in range(seq.num_computed // self.size, len(pages)):
                if (page + 1) * self.size <= end:
                    self.holds[group][pages[page]] = (seq.salt, *seq.tokens[: (page + 1) * self.size])
                else:
                    self.holds[group].pop(pages[page], None)
        seq.num_computed = end
        self.table.enter(seq, seq.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data):
        self.end(data.draw(st.sampled_from(self.live)))

    def end(self, seq):
        self.table.release(seq)
        self.live.remove(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def distrust(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.table.disown(seq)
        for group, table in enumerate(seq.pages):
            assert not self.table.tree.where[group].keys() & set(table)
        self.end(seq)

    @rule()
    def forget(self):
        self.table.forget()
        assert not any(self.known(group) for group in range(3))

    @invariant()
    def adds_up(self):
        if hasattr(self, "table"):
            self.table.check(self.live)

    def teardown(self):
        if hasattr(self, "table"):
            for seq in list(self.live):
                self.end(seq)
            self.table.check([])
            assert all(group.free == group.num_pages - 1 for group in self.table.groups)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=300, stateful_step_count=80)


def compute(table: PageTable, seq: Sequence, count: int | None = None) -> None:
    """Pretend that the rows are computed, all that are missing or so many."""
    table.slide(seq)
    end = len(seq.tokens) if count is None else seq.num_computed + count
    assert table.grow(seq, end)
    seq.num_computed = end
    table.enter(seq, seq.num_computed)


def begin(table: PageTable, tokens, salt: str | None = None) -> Sequence:
    seq = sequence(tokens, salt)
    table.adopt(seq, table.match(seq))
    return seq


def test_a_prompt_finds_what_another_left():
    table = PageTable([20], 4, [None])
    one = begin(table, range(10))
    compute(table, one)
    two = begin(table, [*range(8), 99, 98])  # while the first still runs
    assert two.num_computed == 8 and two.pages[0] == one.pages[0][:2]
    table.release(one)
    table.release(two)
    assert begin(table, range(10)).num_computed == 8
    assert begin(table, range(8)).num_computed == 4  # the last token's row is needed
    assert begin(table, [0, 1, 2, 3, 4, 5, 6, 0]).num_computed == 4
    assert begin(table, range(10), salt="other").num_computed == 0
    wants_scores = sequence(range(10))
    wants_scores.prompt_scores = [None] * 9
    assert table.match(wants_scores) == []


def test_switched_off_it_keeps_nothing():
    table = PageTable([20], 4, [None], keeps_prefixes=False)
    one = begin(table, range(10))
    compute(table, one)
    table.release(one)
    assert begin(table, range(10)).num_computed == 0
    table.check([])


def test_what_is_left_longest_goes_first():
    table = PageTable([7], 4, [None])
    for first in (1, 2):
        seq = begin(table, [first] * 12)
        compute(table, seq)
        table.release(seq)
    third = begin(table, [3] * 8)
    compute(table, third)  # two of six pages: the end of the oldest prompt, not its beginning
    assert len(table.match(sequence([1] * 13))) == 1
    assert len(table.match(sequence([2] * 13))) == 3


def test_a_window_needs_only_what_it_sees():
    table = PageTable([30, 30], 4, [None, 6])
    one = begin(table, range(40))
    while one.num_computed < 40:
        compute(table, one, 4)
    table.release(one)
    for page in (1, 2, 3):  # long out of the window of what follows
        table.tree.forget(
            1, next(p for p, node in table.tree.where[1].items() if node.key == tuple(range(4 * page, 4 * page + 4)))
        )
    table.groups[1].blank += [page for page in table.groups[1].kept if page not in table.tree.where[1]]
    table.groups[1].kept = {page: None for page in table.groups[1].kept if page in table.tree.where[1]}
    two = begin(table, [*range(40), 7])
    assert two.num_computed == 40
    assert two.pages[1][:8] == [0] * 8 and all(two.pages[1][8:])
    assert begin(table, [*range(20), 7]).num_computed == 4  # pages 1 to 3 are gone, and a row at 20 sees page 3
    assert begin(table, [*range(24), 7]).num_computed == 24


def test_check_finds_what_it_is_for():
    table = PageTable([8], 4, [None])
    seq = sequence(range(9))
    table.grow(seq, 9)
    table.check([seq])
    with pytest.raises(AssertionError, match="miscounted"):
        table.check([])
    table.groups[0].blank.append(seq.pages[0][0])
    with pytest.raises(AssertionError, match="twice"):
        table.check([seq])
    table.groups[0].blank = table.groups[0].blank[1:-1]
    with pytest.raises(AssertionError, match="neither"):
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
