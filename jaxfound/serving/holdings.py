"""What each sequence holds of the cache: pages that it shares, and pages of its own."""

from collections.abc import Iterable

from jaxfound.serving.page_pool import PagePool
from jaxfound.serving.prefix_cache import PrefixCache
from jaxfound.serving.request import Sequence


class Holdings:
    """Gives pages to sequences and takes them; keeps their counts of pages and cached tokens.

    Attributes:
        pool: all pages.
        cache: those that can be shared.
    """

    def __init__(self, pool: PagePool, *, share: bool) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, enabled=share)
        self._share = share

    def reusable(self, sequence: Sequence) -> list[int]:
        """Return pages in the cache that hold the beginning of a sequence's tokens."""
        if _needs_every_logit(sequence):
            return []
        return self.cache.match(sequence.tokens)

    def is_under_way(
        self, sequence: Sequence, *, reusable: list[int], ahead: Iterable[Sequence]
    ) -> bool:
        """Whether one ahead is computing the page that comes after the reusable ones.

        Waiting for it costs no time, because whoever is ahead gets its chunk of each step first. So
        of prompts that begin alike and come at once, one computes what they share.
        """
        size = self.pool.page_size
        first, end = len(reusable) * size, (len(reusable) + 1) * size
        if not self._share or _needs_every_logit(sequence) or end >= sequence.num_tokens:
            return False
        wanted = sequence.tokens[first:end]
        return any(
            s.pages[: s.num_shared] == reusable and s.tokens[first:end] == wanted for s in ahead
        )

    def enter(self, sequence: Sequence, *, reusable: list[int], spare: int) -> bool:
        """Give a sequence the pages of all its known tokens, if `spare` pages are left then.

        Returns:
            False, and nothing is given, if there are not as many.
        """
        missing = self.pool.pages_for(sequence.num_tokens) - len(reusable)
        room = self.cache.num_available - self.cache.count_idle(reusable)
        if missing + spare > room:
            return False
        self.cache.hold(reusable)
        sequence.pages = reusable + self.cache.take(missing)
        sequence.num_shared = len(reusable)
        sequence.num_cached = len(reusable) * self.pool.page_size
        return True

    def grow(self, sequence: Sequence, *, num_tokens: int) -> bool:
        """Give a sequence the pages that it lacks for `num_tokens`; False if they are not there."""
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing > self.cache.num_available:
            return False
        if missing > 0:
            sequence.pages += self.cache.take(missing)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others share the pages of a sequence that are full."""
        num_full = self._num_full(sequence)
        if num_full > sequence.num_shared:
            sequence.num_shared = self.cache.publish(
                sequence.tokens,
                sequence.pages,
                num_full=num_full,
                num_shared=sequence.num_shared,
            )

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take all pages of a sequence.

        Args:
            sequence: that ends or is preempted.
            keep: leave full pages that nobody could share before in the cache.
        """
        self.cache.release(
            sequence.tokens,
            sequence.pages,
            num_full=self._num_full(sequence) if keep else 0,
            num_shared=sequence.num_shared,
        )
        sequence.pages = []
        sequence.num_cached = sequence.num_shared = 0

    def _num_full(self, sequence: Sequence) -> int:
        # A page is found by its tokens: those that are still on the device, or are drafts, are not
        # known yet.
        return min(sequence.num_cached, len(sequence.tokens)) // self.pool.page_size


def _needs_every_logit(sequence: Sequence) -> bool:
    # The log-probabilities of a prompt are complete when it has drawn a token.
    return sequence.request.prompt_logprobs and not sequence.num_drawn
