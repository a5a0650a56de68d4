"""The pages of the cache: all there at start-up, taken and given back by reference count."""

from collections import Counter
from collections.abc import Iterable


class PageError(ValueError):
    """Pages are taken that are not there, or given back by one who does not hold them."""


class PagePool:
    """Numbers of pages and how many hold each; the arrays themselves are the runner's.

    Every page serves every request, so free pages are never too scattered to be of use: what can be
    lost is only the unused end of each sequence's last page. Takes O(1) a page.

    Attributes:
        num_pages: pages of the pool, numbered from 0.
        page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, *, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise PageError(
                f"num_pages={num_pages} and page_size={page_size} must be at least 1: a pool "
                "without a page serves nothing. Raise serve.num_pages or serve.memory_share"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        # A stack: the page that was given back last is the likeliest to be in a device's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def references(self, page: int) -> int:
        """Return how many hold `page`."""
        # Python would count negative numbers from the end.
        if not 0 <= page < self.num_pages:
            raise PageError(f"page {page} is not one of the {self.num_pages} from 0")
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Return `count` free pages, each held once from now on.

        Raises:
            PageError: if fewer are free; nothing is taken then.
        """
        if not 0 <= count <= len(self._free):
            raise PageError(
                f"{count} pages are asked for and {len(self._free)} of {self.num_pages} are free. "
                "Give pages back first"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Let one more hold each of `pages`.

        Raises:
            PageError: if one of them is free; nothing is shared then.
        """
        pages = list(pages)
        for page in pages:
            if not self.references(page):
                raise PageError(f"page {page} is free: it holds nothing that could be shared")
        for page in pages:
            self._references[page] += 1

    def give_back(self, pages: Iterable[int]) -> int:
        """Let one hold each of `pages` no longer; return how many became free.

        Raises:
            PageError: if one is given back more often than it is held; nothing changes then.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            if times > self.references(page):
                raise PageError(
                    f"page {page} is given back {times} times and held {self.references(page)} "
                    "times. Each holder gives a page back once"
                )
        before = len(self._free)
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
        return len(self._free) - before
