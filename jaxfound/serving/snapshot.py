"""What the scheduler holds at one moment, as figures: what /metrics reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """Pages, tokens and requests between two steps; counters run since the start.

    Attributes:
        num_pages: pages of the cache; in use + cached + free.
        pages_in_use: held by requests that run.
        pages_cached: held by nobody and kept for prompts that begin alike; reclaimed when needed.
        pages_free: empty.
        page_size: tokens of a page.
        tokens_cached: tokens whose keys and values (latents) lie in pages in use or cached, those
            of a shared page once.
        num_waiting: requests that wait for a row or for pages, preempted ones included.
        num_prefilling: requests that run and whose known tokens are not all computed.
        num_decoding: requests that run and draw a token a step.
        num_preempted: times that a request lost its pages.
        num_reclaimed: cached pages that were given to others.
        prompt_tokens: of all requests when they first ran.
        reused_tokens: of those, found in the prefix cache.
        drafted_tokens: guesses that were checked.
        accepted_tokens: of those, the ones that were right.
    """

    num_pages: int
    pages_in_use: int
    pages_cached: int
    pages_free: int
    page_size: int
    tokens_cached: int
    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_preempted: int
    num_reclaimed: int
    prompt_tokens: int
    reused_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self.num_prefilling + self.num_decoding

    @property
    def utilisation(self) -> float:
        """Share of the slots in held pages that hold a token; 1 where no page is held."""
        held = (self.pages_in_use + self.pages_cached) * self.page_size
        return self.tokens_cached / held if held else 1.0

    @property
    def fragmentation(self) -> float:
        """Share of the whole cache that is lost in pages that are not full.

        There is no other loss: any free page serves any request, so that free pages need not lie
        side by side.
        """
        held = (self.pages_in_use + self.pages_cached) * self.page_size
        return (held - self.tokens_cached) / (self.num_pages * self.page_size)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the prefix cache."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the checked guesses that were right."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
