"""The sizes that programs are compiled for: few, so that start-up is short, and never too small."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxfound.config.serve import ServeConfig

# Sizes of one kind are this factor apart: at most so much of a program's rows or tokens is padding.
STEP = 4
# Rows below which fewer save nothing: a step then takes as long as reading the weights.
FEW_ROWS = 8
# Tokens that the narrowest block table has room for.
NARROW_TOKENS = 1024
# Chunks shorter than this cost what this costs.
SHORT_CHUNK = 32
# Of a kind.
MOST_SIZES = 3


@dataclass(frozen=True)
class ProgramSizes:
    """Sizes by kind, each ascending, the last large enough for whatever is scheduled.

    Attributes:
        rows: of programs that decode and that draw.
        widths: pages of a decoding program's block table.
        chunks: tokens of a prompt that a prefill program takes of each row.
        prefill_rows: rows of a prefill program, but for the longest chunk, whose rows run alone.
        max_pages: pages of the longest row, the width of a prefill program's block table.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    chunks: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    max_pages: int

    def rows_for(self, num_rows: int) -> int:
        """Return the fewest rows that hold so many."""
        return smallest(self.rows, num_rows)

    def width_for(self, num_pages: int) -> int:
        """Return the narrowest block table that holds so many pages."""
        return smallest(self.widths, num_pages)

    def chunk_for(self, num_tokens: int) -> int:
        """Return the shortest chunk that holds so many tokens."""
        return smallest(self.chunks, num_tokens)

    def prefills(self) -> list[tuple[int, int]]:
        """Return the (rows, chunk) of each prefill program."""
        shared = [(rows, chunk) for chunk in self.chunks[:-1] for rows in self.prefill_rows]
        return [*shared, (self.prefill_rows[0], self.chunks[-1])]


def program_sizes(
    cfg: ServeConfig, *, max_length: int, parts: int = 1, one_width: bool = False
) -> ProgramSizes:
    """Return the sizes for a server.

    Args:
        cfg: its limits.
        max_length: most tokens of a row.
        parts: devices that rows are divided over; every number of rows is a multiple of it.
        one_width: whether a wide block table costs a decoding program no more than a narrow one.
    """

    def even(rows: int) -> int:
        return -(-rows // parts) * parts

    max_pages = -(-max_length // cfg.page_size)
    narrow = max_pages if one_width else max(NARROW_TOKENS // cfg.page_size, 1)
    longest = min(cfg.token_budget, max_length)
    return ProgramSizes(
        rows=ascending(even(rows) for rows in down_from(cfg.max_rows, FEW_ROWS)),
        widths=ascending(down_from(max_pages, narrow)[:MOST_SIZES]),
        chunks=ascending(down_from(longest, SHORT_CHUNK)[:MOST_SIZES]),
        prefill_rows=ascending((even(1), even(min(cfg.prefill_rows, cfg.max_rows)))),
        max_pages=max_pages,
    )


def down_from(largest: int, least: int) -> list[int]:
    """Return `largest` and what dividing it by `STEP` gives, rounded up, until `least` or less."""
    sizes = [largest]
    while sizes[-1] > least:
        sizes.append(-(-sizes[-1] // STEP))
    return sizes


def ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return sizes in order, each once."""
    return tuple(sorted(set(sizes)))


def smallest(sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest of `sizes` that is at least `wanted`.

    Raises:
        ValueError: if there is none: more was scheduled than the server was started for.
    """
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(
        f"{wanted} were scheduled, but programs were compiled for at most {sizes[-1]}. The "
        "scheduler and the runner must be given the same ServeConfig"
    )
