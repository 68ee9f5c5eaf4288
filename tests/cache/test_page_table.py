"""Compares the page table with a simple model of pages, owners and contents, over random
operations.
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


def make_sequence(tokens=(0,), salt: str | None = None) -> Sequence:
    return Sequence(
        0, list(tokens), len(tokens), SamplingParams(), 10**6, 0, cache=SequenceCache(salt=salt)
    )


class FakeDisk(dict):
    """A disk cache in a dict; it never fails."""

    def write(self, name, digest, group, tokens, data):
        self[name] = (digest, group, tokens, data)
        return True

    def read(self, name, digest, group, tokens, nbytes):
        assert self[name][:3] == (digest, group, tokens)
        return self[name][3]

    def discard(self, name):
        self.pop(name, None)


class ImmediateExecutor:
    """An executor that runs each job within `submit`."""

    def submit(self, job, *arguments):
        future = Future()
        future.set_result(job(*arguments))
        return future

    def shutdown(self):
        pass


def num_tokens_until(node: Node) -> int:
    """Returns the number of tokens of a node and its ancestors."""
    return 0 if node.parent is None else len(node.key) + num_tokens_until(node.parent)


class PageTableMachine(RuleBasedStateMachine):
    """Sequences begin, grow, slide, end and are preempted, in a pool too small for all.

    The content of a page is modelled as its salt and all tokens of the prompt up to the last one
    in the page: `page_contents[group][page]`. The content of a snapshot and of a recurrent state
    (`slot_contents[slot]`) is the salt and the tokens that the state has processed. As in the
    engine, some sequences are planned; then `step()` carries out the table's page moves and writes
    the new contents.
    """

    @initialize(
        size=st.sampled_from([1, 2, 4]),
        pages=st.tuples(*[st.integers(8, 24)] * 3),
        host=st.sampled_from([None, 3, 12, 1000]),
        disk=st.booleans(),
        snapshots=st.sampled_from([[], [2], [4], [16]]),
    )
    def create_table(self, size, pages, host, disk, snapshots):
        self.size, self.chunk, self.groups = size, 2 * size, 3 + len(snapshots)
        host_cache = (
            None
            if host is None
            else HostCache([1] * self.groups, host, FakeDisk() if disk else None)
        )
        if host_cache is not None:
            host_cache.reader = host_cache.writer = ImmediateExecutor()
        windows = [None, 3 * size, 5]
        self.table = PageTable(
            [*pages, *snapshots], size, windows, host_cache=host_cache, snapshot_distance=2 * size
        )
        self.live: list[Sequence] = []
        self.prompts: list[list[int]] = []
        self.num_planned = 0
        self.planned_ends: dict[Sequence, int] = {}  # position after the last planned token
        # draft tokens after that, and how many are accepted
        self.planned_drafts: dict[Sequence, tuple[list[int], int]] = {}
        self.drafter_contents: set[tuple] = set()  # contents that a drafter has computed too
        self.page_contents: list[dict[int, tuple]] = [{} for _ in range(self.groups)]
        self.slot_contents: list[tuple] = []  # by slot; each sequence has its own slot

    def first_visible_page(self, group: int, position: int) -> int:
        window = (None, 3 * self.size, 5)[group]
        return 0 if window is None else max(0, position - window + 1) // self.size

    def known_contents(self, group: int) -> set[tuple]:
        """Returns the contents that a prefix match can find: full pages that are in use, cached or
        in the host cache.
        """
        table = self.table
        contents = dict(self.page_contents[group])
        for copy_group, origin, target in table.moves.copies:
            if copy_group == group:
                contents[target] = contents[origin]
        contents |= {
            page: copy.data
            for (copy_group, page), copy in table.moves.restores.items()
            if copy_group == group
        }
        for seq, end in self.planned_ends.items():
            contents |= self.written_contents(seq, end, group) if group < 3 else {}
        if group == 3:
            contents |= {page: self.slot_contents[slot] for _, slot, page in table.snapshots.saves}
        # A copied page may hold tokens that its new owner has not computed: those after its node
        # cannot be matched.
        nodes = table.tree.node_by_page[group].items()
        cached_contents = {
            contents[page][: 1 + num_tokens_until(node)] for page, node in nodes if page in contents
        }
        if table.host_cache is not None and (group < 3 or table.snapshots.pool.num_free):
            cached_contents |= {
                copy.data for copy in table.host_cache.copies if copy.group == group
            }
        return cached_contents

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([None, "a"]),
    )
    def begin(self, data, tokens, salt):
        if self.prompts and data.draw(st.booleans()):  # another turn of a chat
            tokens = [
                *data.draw(st.sampled_from(self.prompts)),
                *tokens[: data.draw(st.sampled_from([1, 2, 8]))],
            ]
        self.prompts.append(tokens[:20])
        seq = make_sequence(tokens, salt)
        while not self.table.prefetched(seq):
            pass
        match = self.table.match(seq)
        max_cached_pages = max(
            n
            for n in range((len(tokens) - 1) // self.size + 1)
            if all(
                (salt, *tokens[: (page + 1) * self.size]) in self.known_contents(group)
                for group in range(3)
                for page in range(self.first_visible_page(group, n * self.size), n)
            )
            and (
                self.groups == 3
                or not n
                or (salt, *tokens[: n * self.size]) in self.known_contents(3)
            )
        )
        assert len(match.path) == max_cached_pages
        assert match.num_partial < self.size or not match.num_partial
        assert self.groups == 3 or not match.num_partial
        if not self.table.admits(seq, match.path, self.live, self.chunk):
            return
        self.table.begin(seq, match)
        self.live.append(seq)
        seq.slot = len(self.slot_contents)
        seq.begun = False
        self.slot_contents.append((salt,))
        assert seq.num_computed == max_cached_pages * self.size + match.num_partial < len(tokens)
        assert seq.draft.num_prefilled <= seq.num_computed
        assert (
            not seq.draft.num_prefilled
            or (salt, *tokens[: seq.draft.num_prefilled]) in self.drafter_contents
        )

    def written_contents(
        self, seq: Sequence, end: int, group: int, drafts: Seq[int] = ()
    ) -> dict[int, tuple]:
        """Returns the contents of pages after the tokens up to `end` and the drafts are written."""
        table = seq.cache.pages[group]
        tokens = [*seq.tokens[:end], *drafts]
        return {
            table[page]: (seq.cache.salt, *tokens[: (page + 1) * self.size])
            for page in range(seq.num_computed // self.size, len(table))
        }

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def plan(self, data):
        """Plans tokens of a sequence; after its prompt, one new token and some drafts."""
        seq = data.draw(st.sampled_from(self.live))
        if seq in self.planned_ends:
            return
        num_remaining = len(seq.tokens) - seq.num_computed
        count = min(
            num_remaining, data.draw(st.sampled_from([1, self.chunk, *range(1, self.chunk + 1)]))
        )
        if not count:
            seq.tokens.append(data.draw(st.integers(0, 1)))
            count = 1
        count = self.table.tokens_to_snapshot(seq, seq.num_computed, count)
        self.table.insert(seq, seq.num_computed)
        self.table.slide(seq)
        pages_before = [list(pages) for pages in seq.cache.pages]
        num_free_before = [group.num_free for group in self.table.pools]
        end = seq.num_computed + count
        if not self.table.grow(seq, end):
            assert num_free_before == [group.num_free for group in self.table.pools], (
                "a failed grow() must change nothing"
            )
            self.end(seq)
            return
        self.table.keep_states(seq)
        seq.begun = True
        if seq.draft.num_prefilled == seq.num_computed and data.draw(st.booleans()):
            seq.draft.num_prefilled = end
            self.drafter_contents |= {
                (seq.cache.salt, *seq.tokens[:count]) for count in range(1, end + 1)
            }
        self.table.insert(seq, end)
        self.planned_ends[seq] = end
        self.num_planned += 1
        if end == len(seq.tokens):
            drafts = data.draw(st.lists(st.integers(0, 1), max_size=4))
            while drafts and not self.table.grow(seq, end + len(drafts)):
                drafts.pop()
            seq.draft.num_verified += len(drafts)
            self.planned_drafts[seq] = drafts, data.draw(st.integers(0, len(drafts)))
        for group, pages in enumerate(seq.cache.pages):
            assert all(new == old for old, new in zip(pages_before[group], pages, strict=False))
            assert all(
                pages[page]
                for page in range(self.first_visible_page(group, seq.num_computed), len(pages))
            )

    @precondition(lambda self: self.planned_ends)
    @rule()
    def step(self):
        """Carries out page moves, writes the planned tokens, and checks every sequence's pages."""
        moves = self.table.take_moves()
        for page, copy in moves.offloads:
            copy.data = self.page_contents[copy.group].get(page)
        for group, origin, target in moves.copies:
            self.page_contents[group][target] = self.page_contents[group][origin]
        for (group, page), copy in moves.restores.items():
            assert self.table.tree.node_by_page[group].get(page) is copy.node, (
                "the page was reallocated before its restore"
            )
            self.page_contents[group][page] = copy.data
        for _, slot, page in moves.saves:
            self.page_contents[3][page] = self.slot_contents[slot]
        for _, page, slot, count in moves.loads:
            self.slot_contents[slot] = self.page_contents[3][page]
            assert len(self.slot_contents[slot]) == 1 + count
        for seq, end in self.planned_ends.items():
            drafts, _ = self.planned_drafts.get(seq, ([], 0))
            for group in range(3):
                self.page_contents[group] |= self.written_contents(seq, end, group, drafts)
        for seq, end in self.planned_ends.items():
            drafts, num_accepted = self.planned_drafts.get(seq, ([], 0))
            assert self.groups == 3 or self.slot_contents[seq.slot] == (
                seq.cache.salt,
                *seq.tokens[: seq.num_computed],
            )
            self.slot_contents[seq.slot] = (
                seq.cache.salt,
                *seq.tokens[:end],
                *drafts[:num_accepted],
            )
            seq.tokens += drafts[:num_accepted]
            seq.num_computed = end + num_accepted
        self.planned_ends = {}
        self.planned_drafts = {}
        for seq in self.live:
            for group, table in enumerate(seq.cache.pages):
                for page in range(
                    self.first_visible_page(group, seq.num_computed),
                    -(-seq.num_computed // self.size),
                ):
                    end = min(seq.num_computed, (page + 1) * self.size)
                    assert self.page_contents[group][table[page]][: end + 1] == (
                        seq.cache.salt,
                        *seq.tokens[:end],
                    )

    @precondition(lambda self: any(seq.begun for seq in self.live))
    @rule(data=st.data())
    def finish(self, data):
        seq = data.draw(st.sampled_from([seq for seq in self.live if seq.begun]))
        if seq in self.planned_ends:
            self.step()
        self.end(seq)

    def end(self, seq):
        seq.slot = -1
        self.table.release(seq)
        self.live.remove(seq)

    @precondition(lambda self: self.live and self.num_planned % 10 == 9)
    @rule(data=st.data())
    def invalidate(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.step()
        self.table.invalidate(seq)
        for group, table in enumerate(seq.cache.pages):
            assert not self.table.tree.node_by_page[group].keys() & set(table)
        for group in range(self.groups):
            for content in self.known_contents(group) - {None}:
                assert content != (seq.cache.salt, *seq.tokens[: len(content) - 1]), (
                    "a page of an invalidated sequence can be matched"
                )
        self.end(seq)

    @precondition(lambda self: self.num_planned > 20)  # otherwise too little would be cached
    @rule()
    def clear_cache(self):
        self.step()
        self.num_planned = 0
        self.table.clear()
        assert not any(self.known_contents(group) for group in range(self.groups))

    @precondition(lambda self: self.num_planned > 20)
    @rule()
    def fail_step(self):
        """A step fails: running sequences and device pages are lost, host pages are kept."""
        for seq, end in self.planned_ends.items():
            seq.num_computed = end
        self.planned_ends = {}
        self.planned_drafts = {}
        self.num_planned = 0
        for seq in list(self.live):
            self.end(seq)
        self.table.forget_device()
        self.page_contents = [{} for _ in range(self.groups)]

    @invariant()
    def check_table(self):
        if hasattr(self, "table"):
            self.table.check(self.live)

    def teardown(self):
        if hasattr(self, "table"):
            self.step()
            for seq in list(self.live):
                self.end(seq)
            self.table.check([])
            assert all(group.num_free == group.num_pages - 1 for group in self.table.all_pools)


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=cases(300), stateful_step_count=80)


def compute_tokens(table: PageTable, seq: Sequence, num_tokens: int | None = None) -> None:
    """Marks `count` tokens as computed, or all remaining ones."""
    table.slide(seq)
    end = len(seq.tokens) if num_tokens is None else seq.num_computed + num_tokens
    assert table.grow(seq, end)
    seq.num_computed = end
    table.insert(seq, seq.num_computed)
    table.take_moves()


def begin(table: PageTable, tokens, salt: str | None = None) -> Sequence:
    seq = make_sequence(tokens, salt)
    table.begin(seq, table.match(seq))
    return seq


def test_prompt_reuses_cached_pages_of_another_sequence():
    table = PageTable([20], 4, [None])
    first_seq = begin(table, range(10))
    compute_tokens(table, first_seq)
    second_seq = begin(table, [*range(8), 99, 98])  # while the first is still running
    assert (
        second_seq.num_computed == 8 and second_seq.cache.pages[0] == first_seq.cache.pages[0][:2]
    )
    table.release(first_seq)
    table.release(second_seq)
    assert begin(table, range(10)).num_computed == 9
    assert begin(table, range(8)).num_computed == 7  # the last token must be computed
    assert begin(table, [0, 1, 2, 3, 4, 5, 0, 0]).num_computed == 6
    assert begin(table, range(10), salt="other").num_computed == 0
    scoring_sequence = make_sequence(range(10))
    scoring_sequence.prompt_scores = [None] * 9
    assert table.match(scoring_sequence) == PrefixMatch([])


def test_prefix_ending_inside_a_page_copies_that_page():
    table = PageTable([20, 20], 4, [None, 6])
    first_seq = begin(table, range(11))
    compute_tokens(table, first_seq)
    pages = [list(group) for group in first_seq.cache.pages]
    # a running sequence still writes to its last, partial page, so that it cannot be copied
    assert begin(table, [*range(10), 99, 98]).num_computed == 8
    table.release(first_seq)
    second_seq = begin(table, [*range(10), 99, 98])
    shorter = begin(table, [*range(9), 97, 96])
    assert (second_seq.num_computed, shorter.num_computed) == (10, 9)
    assert table.moves.copies == [
        (group, pages[group][2], seq.cache.pages[group][2])
        for seq in (second_seq, shorter)
        for group in range(2)
    ]
    assert begin(table, [*range(5), 7, 7]).num_computed == 5
    table.release(second_seq)
    # copied from the first sequence's page, as the second sequence's copy was not carried out
    assert begin(table, [*range(10), 99, 98]).num_computed == 10
    assert table.moves.copies[-1][1] == pages[-1][2]


def test_invalidate_removes_all_pages_of_a_sequence():
    table = PageTable([20], 4, [None])
    first = begin(table, range(6))
    compute_tokens(table, first)
    table.release(first)
    invalid = begin(table, [*range(6), 9, 9])
    compute_tokens(table, invalid)
    assert invalid.cache.num_cached == 0 and begin(table, [*range(6), 8]).num_computed == 6
    table.invalidate(invalid)
    table.release(invalid)
    repeated = begin(table, [*range(6), 8])
    assert repeated.num_computed == 0
    compute_tokens(table, repeated, 4)  # only the first page is cached again
    assert begin(table, [*range(6), 7]).num_computed == 4


def test_page_being_restored_is_shared_but_not_copied():
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
    restored = begin(table, [*range(8), 50, 50])
    assert restored.num_computed == 8 and len(table.moves.restores) == 2
    # the second page is not restored yet, so that its two matching tokens cannot be copied
    assert begin(table, [*range(6), 60, 60]).num_computed == 4
    table.take_moves()
    assert begin(table, [*range(6), 70, 70]).num_computed == 6


def test_released_page_cancels_its_restore():
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
    restored = begin(table, range(12))
    assert len(table.moves.restores) == 2
    table.release(restored)  # aborted before the step
    plan(200)
    assert not table.take_moves().restores


def test_evicted_pages_are_offloaded_to_host_and_disk_and_restored():
    disk = FakeDisk()
    host_cache = HostCache([1], 2, disk)
    host_cache.reader = host_cache.writer = ImmediateExecutor()
    table = PageTable([5], 4, [None], host_cache=host_cache)

    def fill_offloads(moves) -> None:
        assert all(copy.data is not None for copy in moves.restores.values())
        for page, copy in moves.offloads:
            copy.data = ("was on page", page)

    def compute_and_release(tokens) -> int:
        seq = make_sequence(tokens)
        while not table.prefetched(seq):
            pass
        table.begin(seq, table.match(seq))
        cached = seq.num_computed
        fill_offloads(table.take_moves())
        table.slide(seq)
        assert table.grow(seq, len(tokens))
        seq.num_computed = len(tokens)
        table.insert(seq, len(tokens))
        fill_offloads(table.take_moves())
        table.release(seq)
        table.check([])
        return cached

    assert compute_and_release([1] * 16) == 0
    # four pages go to the host, and two of them then to the disk
    assert compute_and_release([2] * 16) == 0
    assert len(host_cache.copies) == 4 and not disk
    assert compute_and_release([3] * 4) == 0
    assert len(host_cache.copies) == 2 and len(disk) == 3
    assert compute_and_release([1] * 16) == 12  # the last token must be computed, and so its page
    assert compute_and_release([2] * 16) == 12
    for moves in table.save():
        fill_offloads(moves)
    assert {data for *_, data in disk.values()} and len(disk) == 9

    new_table = PageTable([5], 4, [None], host_cache=HostCache([1], 4, disk))
    new_table.host_cache.reader = ImmediateExecutor()
    table = new_table
    host_cache = new_table.host_cache
    assert compute_and_release([2] * 16) == 12
    host_cache.identity = b"another model"
    table.clear()
    assert compute_and_release([2] * 16) == 0


def test_offloaded_snapshot_is_restored_before_it_is_loaded():
    """The device has one page for snapshots; it is not available while another one is saved."""
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

    def take_moves() -> PageMoves:
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
            # the only snapshot page is taken until the step is carried out
            assert not table.match(make_sequence(range(11))).path
        table.release(seq)
        moves = take_moves()
        assert moves.saves == [(0, 3, 1)] and [copy.group for _, copy in moves.offloads] == [1] * (
            first > 0
        )
    restored = start(range(11))
    assert restored.num_computed == 11
    moves = table.take_moves()
    assert [(copy.group, page) for page, copy in moves.offloads] == [(1, 1)]
    assert {place: copy.data for place, copy in moves.restores.items()} == {(1, 1): (1, 1)}
    assert moves.loads == [(0, 1, 3, 8)]
    table.check([restored])


def test_disabled_prefix_cache_keeps_no_pages():
    table = PageTable([20], 4, [None], keeps_prefixes=False)
    seq = begin(table, range(10))
    compute_tokens(table, seq)
    table.release(seq)
    assert begin(table, range(10)).num_computed == 0
    table.check([])


def test_least_recently_used_pages_are_evicted_first():
    table = PageTable([7], 4, [None])
    for first in (1, 2):
        seq = begin(table, [first] * 12)
        compute_tokens(table, seq)
        table.release(seq)
    newest = begin(table, [3] * 8)
    compute_tokens(table, newest)  # takes two of six pages: the last pages of the oldest prompt
    assert len(table.match(make_sequence([1] * 13)).path) == 1
    assert len(table.match(make_sequence([2] * 13)).path) == 3


def test_sliding_window_match_needs_only_pages_in_the_window():
    table = PageTable([30, 30], 4, [None, 6])
    first_seq = begin(table, range(40))
    while first_seq.num_computed < 40:
        compute_tokens(table, first_seq, 4)
    table.release(first_seq)
    nodes = table.tree.node_by_page[1]
    for page in (1, 2, 3):  # outside the window of the next token
        tokens = tuple(range(4 * page, 4 * page + 4))
        table.tree.forget(1, next(number for number, node in nodes.items() if node.key == tokens))
    table.pools[1].free_pages += [
        page for page in table.pools[1].cached if page not in table.tree.node_by_page[1]
    ]
    table.pools[1].cached = {
        page: None for page in table.pools[1].cached if page in table.tree.node_by_page[1]
    }
    second_seq = begin(table, [*range(40), 7])
    assert second_seq.num_computed == 40
    assert second_seq.cache.pages[1][:8] == [0] * 8 and all(second_seq.cache.pages[1][8:])
    # pages 1 to 3 are not cached, and position 20 attends to page 3
    assert begin(table, [*range(20), 7]).num_computed == 4
    assert begin(table, [*range(24), 7]).num_computed == 24


def test_check_detects_inconsistent_pages():
    table = PageTable([8], 4, [None])
    seq = make_sequence(range(9))
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


def test_sequence_holds_at_most_max_pages():
    for page_size, window, chunk in [(4, 9, 7), (8, 8, 16), (16, 5, 64), (1, 3, 2)]:
        table = PageTable([500, 500], page_size, [None, window])
        seq = make_sequence()
        length = 200
        seq.tokens = [0] * length
        while seq.num_computed < length:
            count = min(chunk, length - seq.num_computed)
            table.slide(seq)
            assert table.grow(seq, seq.num_computed + count)
            for group, pages in zip(table.pools, seq.cache.pages, strict=True):
                assert sum(map(bool, pages)) <= group.max_pages(length, chunk)
            seq.num_computed += count


def test_sliding_window_keeps_pages_for_rejected_drafts():
    """With four drafts in flight, the next position is between 12 (none accepted) and 16 (all)."""
    table = PageTable([100], 1, [5])
    seq = make_sequence([0] * 12)
    seq.num_computed = 11
    assert table.grow(seq, 16)
    seq.num_computed = 16
    seq.pending = 5
    table.slide(seq)
    assert [position for position, page in enumerate(seq.cache.pages[0]) if page] == list(
        range(8, 16)
    )
    assert table.grow(seq, 17)


def test_used_is_the_usage_of_the_fullest_group():
    table = PageTable([11, 6], 4, [None, 4])
    assert table.used() == 0
    table.grow(make_sequence(), 12)
    assert table.used() == pytest.approx(3 / 5)
