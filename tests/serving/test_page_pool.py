"""Pages are lent and returned: none is lost, none has an owner too many."""

from collections import Counter

import pytest
from hypothesis import given, settings
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


def test_a_pool_lends_every_page_once():
    pool = PagePool(5, page_size=4)
    assert sorted(pool.take(5)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_page_is_free_when_its_last_holder_gives_it_back():
    pool = PagePool(2, page_size=4)
    (page,) = pool.take(1)
    pool.share([page])
    assert pool.give_back([page]) == 0
    assert pool.num_free == 1
    assert pool.give_back([page]) == 1
    assert pool.num_free == 2


def test_more_pages_than_are_free_are_refused_with_the_figures():
    pool = PagePool(4, page_size=4)
    pool.take(3)
    with pytest.raises(PageError, match="2 pages are asked for and 1 of 4 are free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_page_given_back_twice_is_refused_and_nothing_changes():
    pool = PagePool(4, page_size=4)
    first, second = pool.take(2)
    with pytest.raises(PageError, match=f"page {first} is given back 2 times and held 1 times"):
        pool.give_back([second, first, first])
    assert (pool.references(first), pool.references(second)) == (1, 1)


def test_a_free_page_cannot_be_shared():
    pool = PagePool(2, page_size=4)
    (page,) = pool.take(1)
    with pytest.raises(PageError, match="is free"):
        pool.share([page, 1 - page])
    assert pool.references(page) == 1


@pytest.mark.parametrize("page", [-1, 2])
def test_a_number_that_is_no_page_is_refused(page):
    with pytest.raises(PageError, match="not one of the 2"):
        PagePool(2, page_size=4).give_back([page])


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 64), (8, 0)])
def test_a_pool_without_room_is_refused(num_pages, page_size):
    with pytest.raises(PageError, match="at least 1"):
        PagePool(num_pages, page_size=page_size)


@given(num_tokens=st.integers(0, 10_000), page_size=st.integers(1, 128))
@settings(max_examples=200, deadline=None)
def test_pages_for_tokens_are_the_fewest_that_hold_them(num_tokens, page_size):
    count = PagePool(1, page_size=page_size).pages_for(num_tokens)
    assert count * page_size >= num_tokens > (count - 1) * page_size


class Lending(RuleBasedStateMachine):
    """A pool beside a plain count of who holds what."""

    @initialize(num_pages=st.integers(1, 12))
    def begin(self, num_pages):
        self.pool = PagePool(num_pages, page_size=4)
        self.held = Counter()

    @rule(count=st.integers(0, 13))
    def take(self, count):
        free = self.pool.num_pages - len(self.held)
        if count > free:
            with pytest.raises(PageError):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held), "a page was lent that somebody holds"
        self.held.update(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.pool.share(pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        after = self.held - Counter(pages)
        if any(n > self.held[page] for page, n in Counter(pages).items()):
            with pytest.raises(PageError):
                self.pool.give_back(pages)
            return
        assert self.pool.give_back(pages) == len(self.held) - len(after)
        self.held = after

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "pool"):
            every = range(self.pool.num_pages)
            assert {p: self.pool.references(p) for p in every} == {p: self.held[p] for p in every}
            assert self.pool.num_free == self.pool.num_pages - len(self.held)


def test_no_page_is_lost_or_lent_twice_in_random_operations():
    run_state_machine_as_test(
        Lending, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
def test_no_page_is_lost_or_lent_twice_in_many_random_operations():
    run_state_machine_as_test(
        Lending, settings=settings(max_examples=300, stateful_step_count=100, deadline=None)
    )
