"""How many pages the pool has: as asked, or what the device has room for."""

from collections.abc import Mapping

from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig

# A pool that nobody sized, on a device that does not tell its memory, such as a CPU.
MODEST_BYTES = 256 * 2**20


def choose_num_pages(
    cfg: ServeConfig, *, page_bytes: int, max_length: int, memory: Mapping[str, int] | None
) -> int:
    """Return the pages of the pool.

    Args:
        cfg: num_pages, or memory_share of the device for weights and pages together.
        page_bytes: of one page over all layers, on one device.
        max_length: most tokens of a row; the pool must hold one row of it.
        memory: the device's `memory_stats` with the weights there; None where it has none.

    Raises:
        ConfigError: if the pool cannot hold one row, or the weights leave no room.
    """
    least = -(-max_length // cfg.page_size)
    if cfg.num_pages:
        return _enough(cfg.num_pages, least, cfg=cfg, max_length=max_length)
    wanted = least * cfg.max_rows
    if memory is None or "bytes_limit" not in memory:
        return max(least, min(wanted, MODEST_BYTES // page_bytes))
    used, limit = memory.get("bytes_in_use", 0), memory["bytes_limit"]
    room = int(limit * cfg.memory_share) - used
    if room < least * page_bytes:
        raise ConfigError(
            f"a device lets JAX have {limit:,} bytes, of which serve.memory_share="
            f"{cfg.memory_share} are for weights and pages; {used:,} are in use, and one request "
            f"of {max_length} tokens needs {least * page_bytes:,}. Serve on more devices, lower "
            "serve.max_length, or free memory"
        )
    # More than every row at its longest would only serve the prefix cache.
    return room // page_bytes if cfg.prefix_cache else min(room // page_bytes, wanted)


def _enough(num_pages: int, least: int, *, cfg: ServeConfig, max_length: int) -> int:
    if num_pages < least:
        raise ConfigError(
            f"serve.num_pages={num_pages} of page_size={cfg.page_size} hold "
            f"{num_pages * cfg.page_size} tokens, but a request may have max_length={max_length}. "
            f"Use at least {least} pages, or lower serve.max_length"
        )
    return num_pages


def check_room(*, temp_bytes: int, memory: Mapping[str, int] | None) -> None:
    """Refuse a pool beside which the hungriest program has no room.

    Args:
        temp_bytes: of that program, beside weights and pages.
        memory: the device's `memory_stats` with weights and pages there; None where it has none.

    Raises:
        ConfigError: says how much is missing.
    """
    if memory is None or "bytes_limit" not in memory:
        return
    free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
    if temp_bytes > free:
        raise ConfigError(
            f"programs need {temp_bytes:,} bytes beside weights and pages, and {free:,} are left: "
            "lower serve.memory_share, serve.num_pages or serve.token_budget"
        )
