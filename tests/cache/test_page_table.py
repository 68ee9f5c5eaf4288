"""The page table against a plain model of who owns what and which page holds which tokens, over
random operations.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.serving.api.params import SamplingParams
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_moves import PageMoves
from quire.serving.cache.page_table import PageTable
from quire.serving.cache.prefix_tree import Node, PrefixMatch
from quire.serving.request.sequence import Sequence, SequenceCache
from quire.tests.support.cases import cases


def sequence(tokens=(0,), salt: str | None = None) -> Sequence:
    return Sequence(
        0, list(tokens), len(tokens), SamplingParams(), 10**6, 0, cache=SequenceCache(salt=salt)
    )


class Disk(dict):
    """A folder of pages that never fails."""

    def write(self, name, digest, group, tokens, data):
        self[name] = (digest, group, tokens, data)
        return True

    def read(self, name, digest, group, tokens, nbytes):
        assert self[name][:3] == (digest, group, tokens)
        return self[name][3]

    def discard(self, name):
        self.pop(name, None)


class AtOnce:
    """A thread that has done everything before it is asked."""

    def submit(self, job, *given):
        future = Future()
        future.set_result(job(*given))
        return future

    def shutdown(self):
        pass


def tokens_until(node: Node) -> int:
    """How many tokens a node and those above it hold."""
    return 0 if node.parent is None else len(node.key) + tokens_until(node.parent)


class Pages(RuleBasedStateMachine):
    """Sequences that begin, grow, slide, end and give way, over a pool too small for them.

    `holds` is what is written in each page of each group: the salt, with all tokens up to the last
    in the page; of snapshots, and in `states` of each slot, those that the state has seen. Some
    sequences are planned; then what the table says is to be moved is moved, and their rows are
    written, as in a step of the engine.
    """

    @initialize(
        size=st.sampled_from([1, 2, 4]),
        pages=st.tuples(*[st.integers(8, 24)] * 3),
        host=st.sampled_from([None, 3, 12, 1000]),
        disk=st.booleans(),
        snapshots=st.sampled_from([[], [2], [4], [16]]),
    )
    def make(self, size, pages, host, disk, snapshots):
        self.size, self.chunk, self.groups = size, 2 * size, 3 + len(snapshots)
        host_cache = (
            None if host is None else HostCache([1] * self.groups, host, Disk() if disk else None)
        )
        if host_cache is not None:
            host_cache.reader = host_cache.writer = AtOnce()
        windows = [None, 3 * size, 5]
        self.table = PageTable(
            [*pages, *snapshots], size, windows, host_cache=host_cache, snapshot_distance=2 * size
        )
        self.live: list[Sequence] = []
        self.prompts: list[list[int]] = []
        self.num_planned = 0
        self.planned: dict[Sequence, int] = {}  # up to which position
        # after that: draft tokens, and how many are accepted
        self.drafted: dict[Sequence, tuple[list[int], int]] = {}
        self.followed: set[tuple] = set()  # texts that a drafter has computed, too
        self.holds: list[dict[int, tuple]] = [{} for _ in range(self.groups)]
        self.states: list[tuple] = []  # by slot, of which every sequence gets another

    def first_seen(self, group: int, position: int) -> int:
        window = (None, 3 * self.size, 5)[group]
        return 0 if window is None else max(0, position - window + 1) // self.size

    def known(self, group: int) -> set[tuple]:
        """What can be found by its content: full pages that somebody has, that are kept, or that
        the host has.
        """
        table = self.table
        holds = dict(self.holds[group])
        for own, origin, target in table.moves.copies:
            if own == group:
                holds[target] = holds[origin]
        holds |= {
            page: copy.data for (own, page), copy in table.moves.restores.items() if own == group
        }
        for seq, end in self.planned.items():
            holds |= self.written(seq, end, group) if group < 3 else {}
        if group == 3:
            holds |= {page: self.states[slot] for _, slot, page in table.snapshots.saves}
        # A copied page holds more tokens than the sequence that got it computed: those behind its
        # node are not found.
        nodes = table.tree.node_by_page[group].items()
        found = {holds[page][: 1 + tokens_until(node)] for page, node in nodes if page in holds}
        if table.host_cache is not None and (group < 3 or table.snapshots.pool.num_free):
            found |= {copy.data for copy in table.host_cache.copies if copy.group == group}
        return found

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([None, "a"]),
    )
    def begin(self, data, tokens, salt):
        if self.prompts and data.draw(st.booleans()):  # a chat goes on
            tokens = [
                *data.draw(st.sampled_from(self.prompts)),
                *tokens[: data.draw(st.sampled_from([1, 2, 8]))],
            ]
        self.prompts.append(tokens[:20])
        seq = sequence(tokens, salt)
        while not self.table.prefetched(seq):
            pass
        found = self.table.match(seq)
        longest = max(
            n
            for n in range((len(tokens) - 1) // self.size + 1)
            if all(
                (salt, *tokens[: (page + 1) * self.size]) in self.known(group)
                for group in range(3)
                for page in range(self.first_seen(group, n * self.size), n)
            )
            and (self.groups == 3 or not n or (salt, *tokens[: n * self.size]) in self.known(3))
        )
        assert len(found.path) == longest
        assert found.num_partial < self.size or not found.num_partial
        assert self.groups == 3 or not found.num_partial
        if not self.table.admits(seq, found.path, self.live, self.chunk):
            return
        self.table.begin(seq, found)
        self.live.append(seq)
        seq.slot = len(self.states)
        seq.begun = False
        self.states.append((salt,))
        assert seq.num_computed == longest * self.size + found.num_partial < len(tokens)
        assert seq.draft.num_prefilled <= seq.num_computed
        assert (
            not seq.draft.num_prefilled
            or (salt, *tokens[: seq.draft.num_prefilled]) in self.followed
        )

    def written(
        self, seq: Sequence, end: int, group: int, drafts: Seq[int] = ()
    ) -> dict[int, tuple]:
        """What the rows up to `end`, and those of drafts, make of its pages."""
        table = seq.cache.pages[group]
        tokens = [*seq.tokens[:end], *drafts]
        return {
            table[page]: (seq.cache.salt, *tokens[: (page + 1) * self.size])
            for page in range(seq.num_computed // self.size, len(table))
        }

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def plan(self, data):
        """A sequence is to compute rows; once its prompt is computed, a token is drawn, and drafts
        are verified.
        """
        seq = data.draw(st.sampled_from(self.live))
        if seq in self.planned:
            return
        rest = len(seq.tokens) - seq.num_computed
        count = min(rest, data.draw(st.sampled_from([1, self.chunk, *range(1, self.chunk + 1)])))
        if not count:
            seq.tokens.append(data.draw(st.integers(0, 1)))
            count = 1
        count = self.table.tokens_to_snapshot(seq, seq.num_computed, count)
        self.table.insert(seq, seq.num_computed)
        self.table.slide(seq)
        before = [list(pages) for pages in seq.cache.pages]
        free = [group.num_free for group in self.table.pools]
        end = seq.num_computed + count
        if not self.table.grow(seq, end):
            assert free == [group.num_free for group in self.table.pools], (
                "a refusal must change nothing"
            )
            self.end(seq)
            return
        self.table.keep_states(seq)
        seq.begun = True
        if seq.draft.num_prefilled == seq.num_computed and data.draw(st.booleans()):
            seq.draft.num_prefilled = end
            self.followed |= {(seq.cache.salt, *seq.tokens[:count]) for count in range(1, end + 1)}
        self.table.insert(seq, end)
        self.planned[seq] = end
        self.num_planned += 1
        if end == len(seq.tokens):
            drafts = data.draw(st.lists(st.integers(0, 1), max_size=4))
            while drafts and not self.table.grow(seq, end + len(drafts)):
                drafts.pop()
            seq.draft.num_verified += len(drafts)
            self.drafted[seq] = drafts, data.draw(st.integers(0, len(drafts)))
        for group, pages in enumerate(seq.cache.pages):
            assert all(new == old for old, new in zip(before[group], pages, strict=False))
            assert all(
                pages[page] for page in range(self.first_seen(group, seq.num_computed), len(pages))
            )

    @precondition(lambda self: self.planned)
    @rule()
    def step(self):
        """What the table asks for is moved, then rows are written; now every sequence must find
        what it computed.
        """
        moves = self.table.take_moves()
        for page, copy in moves.offloads:
            copy.data = self.holds[copy.group].get(page)
        for group, origin, target in moves.copies:
            self.holds[group][target] = self.holds[group][origin]
        for (group, page), copy in moves.restores.items():
            assert self.table.tree.node_by_page[group].get(page) is copy.node, (
                "the page is for somebody else by now"
            )
            self.holds[group][page] = copy.data
        for _, slot, page in moves.saves:
            self.holds[3][page] = self.states[slot]
        for _, page, slot, count in moves.loads:
            self.states[slot] = self.holds[3][page]
            assert len(self.states[slot]) == 1 + count
        for seq, end in self.planned.items():
            drafts, _ = self.drafted.get(seq, ([], 0))
            for group in range(3):
                self.holds[group] |= self.written(seq, end, group, drafts)
        for seq, end in self.planned.items():
            drafts, num_accepted = self.drafted.get(seq, ([], 0))
            assert self.groups == 3 or self.states[seq.slot] == (
                seq.cache.salt,
                *seq.tokens[: seq.num_computed],
            )
            self.states[seq.slot] = (seq.cache.salt, *seq.tokens[:end], *drafts[:num_accepted])
            seq.tokens += drafts[:num_accepted]
            seq.num_computed = end + num_accepted
        self.planned = {}
        self.drafted = {}
        for seq in self.live:
            for group, table in enumerate(seq.cache.pages):
                for page in range(
                    self.first_seen(group, seq.num_computed), -(-seq.num_computed // self.size)
                ):
                    end = min(seq.num_computed, (page + 1) * self.size)
                    assert self.holds[group][table[page]][: end + 1] == (
                        seq.cache.salt,
                        *seq.tokens[:end],
                    )

    @precondition(lambda self: any(seq.begun for seq in self.live))
    @rule(data=st.data())
    def finish(self, data):
        seq = data.draw(st.sampled_from([seq for seq in self.live if seq.begun]))
        if seq in self.planned:
            self.step()
        self.end(seq)

    def end(self, seq):
        seq.slot = -1
        self.table.release(seq)
        self.live.remove(seq)

    @precondition(lambda self: self.live and self.num_planned % 10 == 9)
    @rule(data=st.data())
    def distrust(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.step()
        self.table.invalidate(seq)
        for group, table in enumerate(seq.cache.pages):
            assert not self.table.tree.node_by_page[group].keys() & set(table)
        for group in range(self.groups):
            for content in self.known(group) - {None}:
                assert content != (seq.cache.salt, *seq.tokens[: len(content) - 1]), (
                    "part of it is found"
                )
        self.end(seq)

    @precondition(lambda self: self.num_planned > 20)  # else little is ever there to be found
    @rule()
    def forget(self):
        self.step()
        self.num_planned = 0
        self.table.clear()
        assert not any(self.known(group) for group in range(self.groups))

    @precondition(lambda self: self.num_planned > 20)
    @rule()
    def fail(self):
        """A step fails: the device's pages are gone with all that runs, and what the host has
        is not.
        """
        for seq, end in self.planned.items():
            seq.num_computed = end
        self.planned = {}
        self.drafted = {}
        self.num_planned = 0
        for seq in list(self.live):
            self.end(seq)
        self.table.forget_device()
        self.holds = [{} for _ in range(self.groups)]

    @invariant()
    def adds_up(self):
        if hasattr(self, "table"):
            self.table.check(self.live)

    def teardown(self):
        if hasattr(self, "table"):
            self.step()
            for seq in list(self.live):
                self.end(seq)
            self.table.check([])
            assert all(group.num_free == group.num_pages - 1 for group in self.table.all_pools)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=cases(300), stateful_step_count=80)


def compute(table: PageTable, seq: Sequence, count: int | None = None) -> None:
    """Pretend that the rows are computed, all that are missing or so many."""
    table.slide(seq)
    end = len(seq.tokens) if count is None else seq.num_computed + count
    assert table.grow(seq, end)
    seq.num_computed = end
    table.insert(seq, seq.num_computed)
    table.take_moves()


def begin(table: PageTable, tokens, salt: str | None = None) -> Sequence:
    seq = sequence(tokens, salt)
    table.begin(seq, table.match(seq))
    return seq


def test_a_prompt_finds_what_another_left():
    table = PageTable([20], 4, [None])
    one = begin(table, range(10))
    compute(table, one)
    two = begin(table, [*range(8), 99, 98])  # while the first still runs
    assert two.num_computed == 8 and two.cache.pages[0] == one.cache.pages[0][:2]
    table.release(one)
    table.release(two)
    assert begin(table, range(10)).num_computed == 9
    assert begin(table, range(8)).num_computed == 7  # the last token's row is needed
    assert begin(table, [0, 1, 2, 3, 4, 5, 0, 0]).num_computed == 6
    assert begin(table, range(10), salt="other").num_computed == 0
    wants_scores = sequence(range(10))
    wants_scores.prompt_scores = [None] * 9
    assert table.match(wants_scores) == PrefixMatch([])


def test_a_prompt_that_parts_inside_of_a_page_gets_a_copy_of_it():
    table = PageTable([20, 20], 4, [None, 6])
    one = begin(table, range(11))
    compute(table, one)
    pages = [list(group) for group in one.cache.pages]
    # its last page is not full, and it still writes there
    assert begin(table, [*range(10), 99, 98]).num_computed == 8
    table.release(one)
    two = begin(table, [*range(10), 99, 98])
    three = begin(table, [*range(9), 97, 96])
    assert (two.num_computed, three.num_computed) == (10, 9)
    assert table.moves.copies == [
        (group, pages[group][2], seq.cache.pages[group][2])
        for seq in (two, three)
        for group in range(2)
    ]
    assert begin(table, [*range(5), 7, 7]).num_computed == 5
    table.release(two)
    # of the first: the copy is not made yet
    assert begin(table, [*range(10), 99, 98]).num_computed == 10
    assert table.moves.copies[-1][1] == pages[-1][2]


def test_nothing_is_left_of_what_cannot_be_trusted():
    table = PageTable([20], 4, [None])
    one = begin(table, range(6))
    compute(table, one)
    table.release(one)
    two = begin(table, [*range(6), 9, 9])
    compute(table, two)
    assert two.cache.num_cached == 0 and begin(table, [*range(6), 8]).num_computed == 6
    table.invalidate(two)
    table.release(two)
    three = begin(table, [*range(6), 8])
    assert three.num_computed == 0
    compute(table, three, 4)  # the first page is there again, and what followed it is not
    assert begin(table, [*range(6), 7]).num_computed == 4


def test_a_page_on_its_way_back_is_shared_but_not_copied():
    table = PageTable([7], 4, [None], host_cache=HostCache([1], 100))
    for first in (0, 100):
        seq = begin(table, range(first, first + 21))
        table.slide(seq)
        assert table.grow(seq, 21)
        seq.num_computed = 21
        table.insert(seq, 21)
        for page, copy in table.take_moves().offloads:
            copy.data = f"page {page}"
        table.release(seq)
    back = begin(table, [*range(8), 50, 50])
    assert back.num_computed == 8 and len(table.moves.restores) == 2
    # two more rows of the second page are not there yet
    assert begin(table, [*range(6), 60, 60]).num_computed == 4
    table.take_moves()
    assert begin(table, [*range(6), 70, 70]).num_computed == 6


def test_a_page_that_left_before_it_was_back_is_the_next_ones():
    table = PageTable([4], 4, [None], host_cache=HostCache([1], 100))

    def plan(first: int) -> Sequence:
        seq = begin(table, range(first, first + 12))
        table.slide(seq)
        assert table.grow(seq, 12)
        return seq

    for first in (0, 100):
        seq = plan(first)
        seq.num_computed = 12
        table.insert(seq, 12)
        for page, copy in table.take_moves().offloads:
            copy.data = f"page {page}"
        table.release(seq)
    back = begin(table, range(12))
    assert len(table.moves.restores) == 2
    table.release(back)  # its client has gone before the step
    plan(200)
    assert not table.take_moves().restores


def test_what_has_no_room_goes_to_the_host_and_to_disk_and_comes_back():
    disk = Disk()
    host_cache = HostCache([1], 2, disk)
    host_cache.reader = host_cache.writer = AtOnce()
    table = PageTable([5], 4, [None], host_cache=host_cache)

    def move(moves) -> None:
        assert all(copy.data is not None for copy in moves.restores.values())
        for page, copy in moves.offloads:
            copy.data = ("was on page", page)

    def serve(tokens) -> int:
        seq = sequence(tokens)
        while not table.prefetched(seq):
            pass
        table.begin(seq, table.match(seq))
        cached = seq.num_computed
        move(table.take_moves())
        table.slide(seq)
        assert table.grow(seq, len(tokens))
        seq.num_computed = len(tokens)
        table.insert(seq, len(tokens))
        move(table.take_moves())
        table.release(seq)
        table.check([])
        return cached

    assert serve([1] * 16) == 0
    # four pages leave the device, and two of them the host when they have arrived
    assert serve([2] * 16) == 0
    assert len(host_cache.copies) == 4 and not disk
    assert serve([3] * 4) == 0
    assert len(host_cache.copies) == 2 and len(disk) == 3
    assert serve([1] * 16) == 12  # the last token's row is needed, and so its page
    assert serve([2] * 16) == 12
    for moves in table.save():
        move(moves)
    assert {data for *_, data in disk.values()} and len(disk) == 9

    again = PageTable([5], 4, [None], host_cache=HostCache([1], 4, disk))
    again.host_cache.reader = AtOnce()
    table = again
    host_cache = again.host_cache
    assert serve([2] * 16) == 12
    host_cache.identity = b"another model"
    table.clear()
    assert serve([2] * 16) == 0


def test_a_snapshot_that_left_is_back_before_it_is_loaded():
    """There is room for one on the device, and none while it is to be written for another."""
    table = PageTable([30, 2], 4, [None], host_cache=HostCache([1, 1], 100))

    def plan(seq: Sequence) -> None:
        table.insert(seq, seq.num_computed)
        end = seq.num_computed + table.tokens_to_snapshot(
            seq, seq.num_computed, len(seq.tokens) - seq.num_computed
        )
        assert table.grow(seq, end)
        table.keep_states(seq)
        table.insert(seq, end)
        seq.num_computed = end
        seq.begun = True

    def start(tokens) -> Sequence:
        seq = begin(table, tokens)
        seq.slot = 3
        seq.begun = False
        plan(seq)
        return seq

    def moved() -> PageMoves:
        moves = table.take_moves()
        for page, copy in moves.offloads:
            copy.data = (copy.group, page)
        table.check([])
        return moves

    for first in (0, 100, 200):
        seq = start(range(first, first + 10))
        assert seq.num_computed == 8 and not table.take_moves().saves
        plan(seq)
        if first == 200:
            # its page is the other's until the step is planned
            assert not table.match(sequence(range(11))).path
        table.release(seq)
        moves = moved()
        assert moves.saves == [(0, 3, 1)] and [copy.group for _, copy in moves.offloads] == [1] * (
            first > 0
        )
    second = start(range(11))
    assert second.num_computed == 11
    moves = table.take_moves()
    assert [(copy.group, page) for page, copy in moves.offloads] == [(1, 1)]
    assert {place: copy.data for place, copy in moves.restores.items()} == {(1, 1): (1, 1)}
    assert moves.loads == [(0, 1, 3, 8)]
    table.check([second])


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
    assert len(table.match(sequence([1] * 13)).path) == 1
    assert len(table.match(sequence([2] * 13)).path) == 3


def test_a_window_needs_only_what_it_sees():
    table = PageTable([30, 30], 4, [None, 6])
    one = begin(table, range(40))
    while one.num_computed < 40:
        compute(table, one, 4)
    table.release(one)
    nodes = table.tree.node_by_page[1]
    for page in (1, 2, 3):  # long out of the window of what follows
        tokens = tuple(range(4 * page, 4 * page + 4))
        table.tree.forget(1, next(number for number, node in nodes.items() if node.key == tokens))
    table.pools[1].free_pages += [
        page for page in table.pools[1].cached if page not in table.tree.node_by_page[1]
    ]
    table.pools[1].cached = {
        page: None for page in table.pools[1].cached if page in table.tree.node_by_page[1]
    }
    two = begin(table, [*range(40), 7])
    assert two.num_computed == 40
    assert two.cache.pages[1][:8] == [0] * 8 and all(two.cache.pages[1][8:])
    # pages 1 to 3 are gone, and a row at 20 sees page 3
    assert begin(table, [*range(20), 7]).num_computed == 4
    assert begin(table, [*range(24), 7]).num_computed == 24


def test_check_finds_what_it_is_for():
    table = PageTable([8], 4, [None])
    seq = sequence(range(9))
    table.grow(seq, 9)
    table.check([seq])
    with pytest.raises(AssertionError, match="miscounted"):
        table.check([])
    table.pools[0].free_pages.append(seq.cache.pages[0][0])
    with pytest.raises(AssertionError, match="twice"):
        table.check([seq])
    table.pools[0].free_pages = table.pools[0].free_pages[1:-1]
    with pytest.raises(AssertionError, match="neither"):
        table.check([seq])


def test_a_sequence_never_holds_more_than_it_was_sized_for():
    for page_size, window, chunk in [(4, 9, 7), (8, 8, 16), (16, 5, 64), (1, 3, 2)]:
        table = PageTable([500, 500], page_size, [None, window])
        seq = sequence()
        length = 200
        seq.tokens = [0] * length
        while seq.num_computed < length:
            count = min(chunk, length - seq.num_computed)
            table.slide(seq)
            assert table.grow(seq, seq.num_computed + count)
            for group, pages in zip(table.pools, seq.cache.pages, strict=True):
                assert sum(map(bool, pages)) <= group.max_pages(length, chunk)
            seq.num_computed += count


def test_a_window_keeps_what_is_needed_where_drafts_are_wrong():
    """Four drafts are under way: the next row is at position 12 if none is right, and at 16 if all
    are.
    """
    table = PageTable([100], 1, [5])
    seq = sequence([0] * 12)
    seq.num_computed = 11
    assert table.grow(seq, 16)
    seq.num_computed = 16
    seq.pending = 5
    table.slide(seq)
    assert [position for position, page in enumerate(seq.cache.pages[0]) if page] == list(
        range(8, 16)
    )
    assert table.grow(seq, 17)


def test_used_follows_the_fullest_group():
    table = PageTable([11, 6], 4, [None, 4])
    assert table.used() == 0
    table.grow(sequence(), 12)
    assert table.used() == pytest.approx(3 / 5)
