"""Pages that prompts with the same beginning share, and pages kept for prompts to come.

A radix tree whose edges are pages: a node is reached by the tokens of its page and of all pages
before it, so equal tokens after another beginning are another node. Keys and values depend on all
earlier tokens, therefore only such pages may be shared; and only full ones, as a page that is still
written to has one owner.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from jaxfound.serving.page_pool import PagePool

type PageTokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node:
    """A full page; the root has none."""

    page: int
    tokens: PageTokens
    parent: "_Node | None"
    children: dict[PageTokens, "_Node"] = field(default_factory=dict[PageTokens, "_Node"])


class PrefixCache:
    """Full pages by the tokens that lead to them; those that nobody uses go when room is needed.

    The tree holds each of its pages once. Of the tree's pages a sequence holds a path from the root
    without a gap: so a page that nobody but the tree holds (idle) has no children in use, and idle
    pages can all be reclaimed, leaves first.

    Attributes:
        pool: where the pages come from.
        num_reclaimed: pages that were taken from the tree since the start.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.num_reclaimed = 0
        self._enabled = enabled
        self._root = _Node(-1, (), None)
        self._nodes: dict[int, _Node] = {}
        # In the order in which they were last let go. A path is let go from its end to the root,
        # and whoever holds a page holds those before it: so children stand before their parents,
        # and the first is always a leaf. Not a dict: its first is found by a walk over all that
        # were deleted before it.
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        """Whether the tree holds `page`."""
        return page in self._nodes

    @property
    def num_pages(self) -> int:
        """Pages in the tree, in use or idle."""
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Pages that nobody but the tree holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free ones and idle ones."""
        return self.pool.num_free + len(self._idle)

    def match(self, tokens: Items[int]) -> list[int]:
        """Return the pages of the longest beginning of `tokens` in the tree; nobody holds them yet.

        The last token is never matched: a step has to compute it, or nothing could be drawn.
        """
        node, pages = self._root, list[int]()
        for i in range((len(tokens) - 1) // self.pool.page_size):
            child = node.children.get(self._page_tokens(tokens, i))
            if child is None:
                break
            pages.append(child.page)
            node = child
        return pages

    def count_idle(self, pages: Items[int]) -> int:
        """Return how many of `pages` are idle."""
        return sum(page in self._idle for page in pages)

    def hold(self, pages: Items[int]) -> None:
        """Hold pages that were matched; they are not reclaimed until they are released."""
        self.pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Return `count` pages; idle ones are reclaimed for them, the least recently used first.

        Raises:
            PageError: if `count` is more than `num_available`; nothing is reclaimed then.
        """
        if count <= self.num_available:
            while self.pool.num_free < count:
                self._reclaim(next(iter(self._idle)))
        return self.pool.take(count)

    def publish(
        self, tokens: Items[int], pages: Items[int], *, num_full: int, num_shared: int
    ) -> int:
        """Share full pages of a running sequence; return how many of its pages the tree holds now.

        Where the tree has other pages with the same tokens (two prompts were computed at the same
        time), the rest of the sequence's pages stay its own until it releases them: a page that a
        sequence holds below one that it does not hold could not be reclaimed in order.

        Args:
            tokens: of the sequence, from the first on.
            pages: of the sequence, in order.
            num_full: of `pages`, those whose tokens are known and computed, at least `num_shared`.
            num_shared: of `pages`, those that the tree holds already.
        """
        if not self._enabled:
            return 0
        node = self._nodes[pages[num_shared - 1]] if num_shared else self._root
        for i in range(num_shared, num_full):
            key = self._page_tokens(tokens, i)
            if key in node.children:
                return i
            node = self._add(node, key, page=pages[i])
        return num_full

    def release(
        self, tokens: Items[int], pages: Items[int], *, num_full: int, num_shared: int
    ) -> None:
        """Take the pages of a sequence that ends or is preempted: full ones stay in the tree.

        Args:
            tokens: of the sequence, from the first on.
            pages: all that the sequence holds, in order.
            num_full: of `pages`, those whose tokens are known and computed.
            num_shared: of `pages`, those that the tree holds already.
        """
        path = [self._nodes[page] for page in pages[:num_shared]]
        if self._enabled:
            node = path[-1] if path else self._root
            for i in range(num_shared, num_full):
                key = self._page_tokens(tokens, i)
                node = node.children.get(key) or self._add(node, key, page=pages[i])
                path.append(node)
        self.pool.give_back(pages)
        for node in reversed(path):
            if self.pool.references(node.page) == 1:
                self._idle[node.page] = None
                self._idle.move_to_end(node.page)

    def clear(self) -> None:
        """Forget every idle page; what is in use stays until it is released."""
        while self._idle:
            self._reclaim(next(iter(self._idle)))

    def _add(self, parent: _Node, key: PageTokens, *, page: int) -> _Node:
        self.pool.share([page])
        node = _Node(page, key, parent)
        parent.children[key] = node
        self._nodes[page] = node
        return node

    def _reclaim(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert node.parent is not None
        assert not node.children, "idle pages stand leaf first"
        del self._idle[page]
        del node.parent.children[node.tokens]
        self.pool.give_back([page])
        self.num_reclaimed += 1

    def _page_tokens(self, tokens: Items[int], i: int) -> PageTokens:
        size = self.pool.page_size
        return tuple(tokens[i * size : (i + 1) * size])
