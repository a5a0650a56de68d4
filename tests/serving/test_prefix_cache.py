"""Pages are found by all tokens that lead to them, kept while there is room, and never mixed up."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxfound.serving.page_pool import PageError, PagePool
from jaxfound.serving.prefix_cache import PrefixCache

SIZE = 2


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(6, page_size=SIZE))


def remember(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute `tokens` in pages that the cache does not have, and end; return the pages."""
    found = cache.match(tokens)
    cache.hold(found)
    pages = found + cache.take(cache.pool.pages_for(len(tokens)) - len(found))
    cache.release(tokens, pages, num_full=len(tokens) // SIZE, num_shared=len(found))
    return pages


def test_a_prompt_finds_the_full_pages_that_it_begins_with(cache):
    pages = remember(cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert cache.match([1, 2, 3, 9, 5]) == pages[:1]
    assert cache.match([9, 2, 3, 4, 5]) == []


@pytest.mark.parametrize(("length", "num_found"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_the_last_token_of_a_prompt_is_never_found(cache, length, num_found):
    remember(cache, [1, 2, 3, 4, 5, 6])
    assert len(cache.match([1, 2, 3, 4, 5, 6][:length])) == num_found


def test_equal_pages_after_other_beginnings_are_different_pages(cache):
    first = remember(cache, [1, 1, 7, 7])
    second = remember(cache, [2, 2, 7, 7])
    assert cache.match([1, 1, 7, 7, 0]) == first
    assert cache.match([2, 2, 7, 7, 0]) == second
    assert not set(first) & set(second)


def test_a_page_that_is_not_full_is_not_kept(cache):
    remember(cache, [1, 2, 3])
    assert (cache.num_pages, cache.pool.num_free) == (1, 5)


def test_the_least_recently_used_is_reclaimed_first_leaf_before_parent(cache):
    old = remember(cache, [1, 1, 2, 2])
    new = remember(cache, [3, 3, 4, 4])
    again = cache.match([1, 1, 2, 2, 5])
    cache.hold(again)
    cache.release([1, 1, 2, 2], again, num_full=2, num_shared=2)
    # Two pages are free; of six, the four in the tree go one by one.
    cache.take(2)
    order = [cache.take(1)[0] for _ in range(4)]
    assert order == [new[1], new[0], old[1], old[0]]
    assert cache.num_reclaimed == 4


def test_pages_in_use_are_not_reclaimed(cache):
    remember(cache, [1, 1, 2, 2, 3, 3])
    held = cache.match([1, 1, 2, 2, 9])
    cache.hold(held)
    assert cache.num_available == 4
    taken = cache.take(4)
    assert not set(taken) & set(held)
    with pytest.raises(PageError, match="1 pages are asked for and 0 of 6 are free"):
        cache.take(1)


def test_what_cannot_be_given_is_not_reclaimed_for(cache):
    remember(cache, [1, 1, 2, 2])
    cache.take(3)
    with pytest.raises(PageError):
        cache.take(4)
    assert cache.num_pages == 2


def test_a_running_sequence_shares_pages_as_soon_as_they_are_full(cache):
    pages = cache.take(3)
    num_shared = cache.publish([1, 1, 2, 2, 3], pages, num_full=1, num_shared=0)
    assert num_shared == 1
    assert cache.match([1, 1, 2, 2, 3]) == pages[:1]
    assert cache.publish([1, 1, 2, 2, 3], pages, num_full=2, num_shared=1) == 2
    assert cache.match([1, 1, 2, 2, 3]) == pages[:2]
    assert cache.num_idle == 0


def test_pages_computed_twice_are_shared_once_and_the_rest_joins_at_the_end(cache):
    first, second = cache.take(2), cache.take(3)
    assert cache.publish([1, 1, 2, 2], first, num_full=2, num_shared=0) == 2
    tokens = [1, 1, 2, 2, 3, 3]
    # Its own copies of what is there stay its own, and so does what it computes behind them.
    assert cache.publish(tokens, second, num_full=3, num_shared=0) == 0
    assert cache.match([*tokens, 4]) == first
    cache.release([1, 1, 2, 2], first, num_full=2, num_shared=2)
    cache.release(tokens, second, num_full=3, num_shared=0)
    assert cache.match([*tokens, 4]) == [*first, second[2]]
    assert cache.pool.num_free == 3
    assert cache.num_idle == 3


def test_without_a_prefix_cache_nothing_is_kept():
    cache = PrefixCache(PagePool(4, page_size=SIZE), enabled=False)
    pages = cache.take(2)
    assert cache.publish([1, 1, 2, 2], pages, num_full=2, num_shared=0) == 0
    cache.release([1, 1, 2, 2], pages, num_full=2, num_shared=0)
    assert cache.match([1, 1, 2, 2, 3]) == []
    assert cache.pool.num_free == 4


def test_clearing_forgets_all_that_is_not_in_use(cache):
    remember(cache, [1, 1, 2, 2])
    remember(cache, [3, 3])
    held = cache.match([1, 1, 9])
    cache.hold(held)
    cache.clear()
    assert cache.num_pages == 1
    assert cache.match([1, 1, 9]) == held
    assert cache.match([3, 3, 9]) == []


class Sharing(RuleBasedStateMachine):
    """Sequences over a tree, beside a plain record of what was written into each page."""

    @initialize(num_pages=st.integers(1, 10))
    def begin(self, num_pages):
        self.cache = PrefixCache(PagePool(num_pages, page_size=SIZE))
        self.written = {}
        self.running = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens):
        found = self.cache.match(tokens)
        assert len(found) * SIZE < len(tokens)
        for i, page in enumerate(found):
            assert self.written[page] == tokens[: (i + 1) * SIZE]
        missing = self.cache.pool.pages_for(len(tokens)) - len(found)
        if missing > self.cache.num_available - self.cache.count_idle(found):
            return
        in_use = {page for run in self.running for page in run["pages"]}
        self.cache.hold(found)
        taken = self.cache.take(missing)
        assert not set(taken) & (in_use | set(found))
        pages = found + taken
        for i in range(len(found), len(pages)):
            self.written[pages[i]] = tokens[: (i + 1) * SIZE]
        self.running.append({"tokens": tokens, "pages": pages, "num_shared": len(found)})

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data):
        run = data.draw(st.sampled_from(self.running))
        full = data.draw(st.integers(run["num_shared"], len(run["tokens"]) // SIZE))
        run["num_shared"] = self.cache.publish(**run, num_full=full)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        place = data.draw(st.integers(0, len(self.running) - 1))
        run = self.running.pop(place)
        full = data.draw(st.integers(run["num_shared"], len(run["tokens"]) // SIZE))
        self.cache.release(**run, num_full=full)

    @invariant()
    def every_page_has_its_holders(self):
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        holders = Counter(page for run in self.running for page in run["pages"])
        kept = [page for page in range(pool.num_pages) if page in self.cache]
        assert self.cache.num_idle == sum(page not in holders for page in kept)
        holders.update(kept)
        assert [pool.references(p) for p in range(pool.num_pages)] == [
            holders[p] for p in range(pool.num_pages)
        ]
        assert pool.num_free == pool.num_pages - len(holders)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for run in self.running:
            self.cache.release(**run, num_full=run["num_shared"])
        self.cache.clear()
        assert self.cache.pool.num_free == self.cache.pool.num_pages


def test_no_page_is_mixed_up_in_random_operations():
    run_state_machine_as_test(
        Sharing, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_no_page_is_mixed_up_in_many_random_operations():
    run_state_machine_as_test(
        Sharing, settings=settings(max_examples=300, stateful_step_count=100, deadline=None)
    )
