"""How a model is served: the cache's pages, a step's budget, and the server's limits."""

from typing import Literal

from pydantic import model_validator

from jaxfound.config.schema import Section, key

CacheFormat = Literal["compute", "fp8"]


class ServeConfig(Section):
    """Sizes fixed at start-up: every program is compiled for them before the first request."""

    page_size: int = key(64, "tokens of one page of the cache", ge=1)
    num_pages: int = key(0, "pages of the cache; 0 = what memory_share leaves room for", ge=0)
    memory_share: float = key(0.9, "share of a device's memory for weights and pages", gt=0, le=1)
    cache_format: CacheFormat = key("compute", "format of cached tokens")
    max_rows: int = key(32, "requests that run at once", ge=1)
    max_length: int = key(0, "tokens of prompt and continuation; 0 = model.max_positions", ge=0)
    token_budget: int = key(512, "tokens of one step, prefill chunks and decoding together", ge=1)
    prefill_rows: int = key(4, "prompts that one step can prefill at once", ge=1)
    prefix_cache: bool = key(True, "keep pages of finished requests for prompts that begin alike")
    draft_tokens: int = key(0, "tokens that the MTP heads draft a step; 0 = no drafts", ge=0)
    max_waiting: int = key(256, "requests that may wait; more are refused with 503", ge=0)
    max_body_bytes: int = key(1 << 20, "longest body of a request", ge=1)
    request_timeout_s: float = key(600.0, "longest life of a request", gt=0)
    drain_timeout_s: float = key(30.0, "after SIGTERM, time for running requests to end", ge=0)

    @model_validator(mode="after")
    def _budget_holds_a_step(self) -> "ServeConfig":
        decoded = self.max_rows * (1 + self.draft_tokens)
        if self.token_budget < decoded:
            raise ValueError(
                f"token_budget={self.token_budget} is less than one decoding step of "
                f"max_rows={self.max_rows} x (1 + draft_tokens={self.draft_tokens}) = {decoded} "
                "tokens: raise token_budget or lower max_rows"
            )
        return self
