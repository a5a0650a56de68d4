"""How many requests fit: pages, tokens and cards, before anything is allocated.

The arithmetic of `jaxfound serve --plan`: the same memory with pages and with a reserved row for
each request, and for latent attention with the keys and values of every head in place of the
latent. Prefixes that requests share are not counted: they come on top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxfound.config.layer_formats import check_precision
from jaxfound.config.model import ModelConfig
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.models.build import Frame, describe
from jaxfound.models.execution import Execution
from jaxfound.models.pages import page_bytes, page_shapes
from jaxfound.models.served import serving_shapes
from jaxfound.parallelism.explain import bytes_text
from pallas_kernels.hardware import Hardware

type Compute = Literal["bfloat16", "float32"]

BYTES: dict[Compute, int] = {"bfloat16": 2, "float32": 4}
BFLOAT16 = PrecisionConfig()
MOST_CARDS = 1024


@dataclass(frozen=True)
class Load:
    """What is to be served at one time.

    Attributes:
        requests: that run at once.
        prompt_tokens: of each.
        new_tokens: most that each draws.
    """

    requests: int = 64
    prompt_tokens: int = 1024
    new_tokens: int = 256

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt_tokens, self.new_tokens) < 1:
            raise ConfigError(f"{self}: a load has at least 1 request of 1 prompt and 1 new token")

    @property
    def cached_tokens(self) -> int:
        """Most tokens that one request has in the cache: the last one drawn is never there."""
        return self.prompt_tokens + self.new_tokens - 1


@dataclass(frozen=True)
class Layout:
    """One way to keep the cache in the memory that is left beside the weights.

    Attributes:
        kept: what a token leaves in the cache.
        is_paged: pages as they are needed; else a row of slots for the longest request each.
        bytes_a_token: over all layers.
        slots_a_request: that a request of the load takes, its last page's empty ones included.
        cards_a_copy: fewest cards, a power of two, that hold the weights and one such request; they
            cut the weights, and the heads of keys and values; a latent is whole on each.
        concurrent: requests of the load that fit beside one copy of the weights.
        cards: that the load needs; 0 where not one request fits into serve.num_pages.
    """

    kept: str
    is_paged: bool
    bytes_a_token: int
    slots_a_request: int
    cards_a_copy: int
    concurrent: int
    cards: int


@dataclass(frozen=True)
class Capacity:
    """What cards of one kind hold of a model's cache.

    Attributes:
        kind: of card.
        memory_bytes: of one card.
        usable_bytes: of one card, for weights and pages: memory_bytes x serve.memory_share.
        weight_bytes: of one copy of the weights, on as many cards as the first layout takes.
        cache_bytes: of one card, beside its part of the weights.
        page_size: tokens of a page.
        page_bytes: of one page over all layers, on one card.
        num_pages: beside one copy of the weights.
        max_length: tokens of the longest request that may come.
        max_rows: requests that one engine runs at once.
        load: what is to be served.
        layouts: the cache as it is served first, then what it is compared with.
    """

    kind: str
    memory_bytes: int
    usable_bytes: int
    weight_bytes: int
    cache_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    max_length: int
    max_rows: int
    load: Load
    layouts: tuple[Layout, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages hold."""
        return self.num_pages * self.page_size


def plan_capacity(
    model: ModelConfig,
    serve: ServeConfig,
    *,
    hardware: Hardware,
    load: Load,
    precision: PrecisionConfig = BFLOAT16,
) -> Capacity:
    """Return what cards of one kind hold, and how many of them a load needs.

    Args:
        model: what is served.
        serve: page size, pages (0 = what fits), share of the memory, longest request.
        hardware: one card.
        load: what is to be served at one time.
        precision: formats of weights by operation, and of the cache where serve.cache_format is
            "compute".

    Raises:
        ConfigError: the memory of the card is not known, a request of the load is too long, a
            format does not fit the model, or no number of cards holds it.
    """
    if not hardware.memory_bytes:
        raise ConfigError(f"the memory of {hardware.kind!r} is not known: give another kind")
    longest = serve.max_length or model.max_positions
    if load.prompt_tokens + load.new_tokens > longest:
        raise ConfigError(
            f"a request of {load.prompt_tokens} + {load.new_tokens} tokens is longer than the "
            f"longest that is served, {longest}: ask for less, or raise serve.max_length"
        )
    usable = int(hardware.memory_bytes * serve.memory_share)
    check_precision(precision, describe(model))
    kept = kept_of(model, serve, compute=precision.compute)
    alone, shared = (
        weight_bytes(model, serve, precision=precision, is_alone=one) for one in (True, False)
    )
    memory = _Memory(usable, alone, shared)
    given = _given(kept[0], memory, serve=serve) if serve.num_pages else None
    layouts = tuple(
        _layout(what, memory, serve=serve, load=load, reserved=reserved, given=given)
        for what in kept
        for reserved in (0, longest)
    )
    cards = layouts[0].cards_a_copy
    page = serve.page_size * kept[0].on_a_card(cards)
    room = given.num_bytes if given else memory.room(cards)
    return Capacity(
        kind=hardware.kind,
        memory_bytes=hardware.memory_bytes,
        usable_bytes=usable,
        weight_bytes=memory.weights(cards),
        cache_bytes=room,
        page_size=serve.page_size,
        page_bytes=page,
        num_pages=room // page,
        max_length=longest,
        max_rows=serve.max_rows,
        load=load,
        layouts=layouts,
    )


def weight_bytes(
    model: ModelConfig,
    serve: ServeConfig,
    *,
    precision: PrecisionConfig = BFLOAT16,
    is_alone: bool = True,
) -> int:
    """Return the bytes of one copy of the weights; of modules that look ahead, those that draft.

    Args:
        model: what is served.
        serve: tokens to draft.
        precision: formats by operation.
        is_alone: whether one card has all of it: several keep in the compute format what is to be
            in 8 bits.
    """
    kept = model.model_copy(update={"mtp_depth": min(serve.draft_tokens, model.mtp_depth)})
    shapes = serving_shapes(Frame(kept, execution=Execution(precision)), is_alone=is_alone)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


class Kept(NamedTuple):
    """What a token leaves in the cache.

    Attributes:
        name: for a reader.
        bytes_a_token: over all layers.
        heads: of keys and values, which cards can cut; 1 for a latent, which all heads share.
    """

    name: str
    bytes_a_token: int
    heads: int

    def on_a_card(self, cards: int) -> int:
        """Return the bytes of a token on each of `cards`."""
        return self.bytes_a_token // cards if self.heads % cards == 0 else self.bytes_a_token


def kept_of(
    model: ModelConfig, serve: ServeConfig, *, compute: Compute = "bfloat16"
) -> tuple[Kept, ...]:
    """Return what a token leaves in the cache: what is served first.

    For latent attention the keys and values of every head follow: what the same layers would keep
    if the latent were expanded before it is stored.

    Raises:
        ConfigError: the 8-bit format is asked for and the model has no such latent.
    """
    # A module that drafts has attention of its own.
    layers = model.num_layers + min(serve.draft_tokens, model.mtp_depth)
    token = page_shapes(
        model,
        num_pages=1,
        page_size=1,
        dtype=compute,
        cache_format=serve.cache_format,
        num_layers=layers,
    )
    num_bytes = page_bytes(token, num_pages=1)
    if model.mixer != "mla":
        return (Kept("keys and values", num_bytes, model.gqa.num_kv_heads),)
    heads, mla = model.num_heads, model.mla
    expanded = layers * heads * (mla.qk_head_dim + mla.v_head_dim) * BYTES[compute]
    name = "latent" if serve.cache_format == "compute" else "latent in 8 bits"
    return Kept(name, num_bytes, 1), Kept("keys and values of every head", expanded, heads)


class _Memory(NamedTuple):
    """Usable bytes of one card, and bytes of the weights where one or several cards hold them."""

    usable: int
    alone: int
    shared: int

    def weights(self, cards: int) -> int:
        """Return the bytes of one copy of the weights on `cards`."""
        return self.alone if cards == 1 else self.shared

    def room(self, cards: int) -> int:
        """Return the bytes that each of `cards` has beside its part of the weights."""
        return self.usable - -(-self.weights(cards) // cards)

    def cards_for(self, what: Kept, num_tokens: int) -> int:
        """Return the fewest cards, a power of two, that hold weights and `num_tokens` tokens."""
        cards = 1
        while self.room(cards) < num_tokens * what.on_a_card(cards):
            cards *= 2
            if cards > MOST_CARDS:
                raise ConfigError(
                    f"weights of {bytes_text(self.shared)} and {num_tokens:,} tokens of "
                    f"{what.bytes_a_token:,} bytes do not fit on {MOST_CARDS} cards with "
                    f"{bytes_text(self.usable)} each to use: take a larger card"
                )
        return cards


class _Given(NamedTuple):
    """Pages that are not to be chosen: their bytes on each of the cards that they take."""

    cards: int
    num_bytes: int


def _given(what: Kept, memory: _Memory, *, serve: ServeConfig) -> _Given:
    tokens = serve.num_pages * serve.page_size
    cards = memory.cards_for(what, tokens)
    return _Given(cards, tokens * what.on_a_card(cards))


def _layout(
    what: Kept,
    memory: _Memory,
    *,
    serve: ServeConfig,
    load: Load,
    reserved: int,
    given: _Given | None,
) -> Layout:
    """Return one way to keep the cache; `reserved` slots for each request, or 0 for pages."""
    size = serve.page_size
    slots = reserved or -(-load.cached_tokens // size) * size
    cards = given.cards if given else memory.cards_for(what, slots)
    room = given.num_bytes if given else memory.room(cards)
    tokens = room // what.on_a_card(cards)
    concurrent = (tokens if reserved else tokens // size * size) // slots
    copies = -(-load.requests // concurrent) if concurrent else 0
    return Layout(
        kept=what.name,
        is_paged=not reserved,
        bytes_a_token=what.bytes_a_token,
        slots_a_request=slots,
        cards_a_copy=cards,
        concurrent=concurrent,
        cards=copies * cards,
    )


def capacity_lines(capacity: Capacity) -> Iterator[str]:
    """Yield the lines of `jaxfound serve --plan`."""
    c, load = capacity, capacity.load
    cards = c.layouts[0].cards_a_copy
    many = f"{cards} x " if cards > 1 else ""
    yield (
        f"{many}{c.kind}: {bytes_text(c.memory_bytes)} each, "
        f"{bytes_text(c.usable_bytes)} of it for weights and pages"
    )
    yield f"weights: {bytes_text(c.weight_bytes)}"
    yield (
        f"cache: {bytes_text(c.num_pages * c.page_bytes)} a card = {c.num_pages:,} pages of "
        f"{c.page_size} tokens ({c.page_bytes:,} bytes) = {c.num_tokens:,} tokens"
    )
    yield (
        f"load: {load.requests:,} requests at once, each of {load.prompt_tokens:,} prompt and "
        f"{load.new_tokens:,} new tokens; a reserved row holds {c.max_length:,}"
    )
    yield from _table(capacity)
    most = min(load.requests, c.layouts[0].concurrent)
    if c.max_rows < most:
        yield (
            f"serve.max_rows={c.max_rows} lets an engine run {c.max_rows} at once; "
            f"the pages would hold {most:,} of this load"
        )


def _table(capacity: Capacity) -> Iterator[str]:
    head = ("kept of a token", "room", "bytes a token", "slots a request", "at once", "cards")
    rows: list[tuple[str, ...]] = [head]
    for layout in capacity.layouts:
        beside = f" on {layout.cards_a_copy} cards" if layout.cards_a_copy > 1 else ""
        rows.append(
            (
                layout.kept,
                "pages" if layout.is_paged else "reserved",
                f"{layout.bytes_a_token:,}",
                f"{layout.slots_a_request:,}",
                f"{layout.concurrent:,}{beside}",
                f"{layout.cards:,}" if layout.cards else "none is enough",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        words = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        figures = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        yield "  " + "  ".join((*words, *figures))
