"""Few sizes are compiled, and one of them holds whatever a scheduler may hand out."""

import pytest

from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.serving.pool_size import check_room, choose_num_pages
from jaxfound.serving.program_sizes import program_sizes

DEFAULT = ServeConfig()
CASES = [
    pytest.param(DEFAULT, 4096, 1, id="default"),
    pytest.param(DEFAULT.model_copy(update={"max_rows": 64}), 16384, 1, id="many long rows"),
    pytest.param(DEFAULT.model_copy(update={"max_rows": 1}), 1, 1, id="the least"),
    pytest.param(DEFAULT.model_copy(update={"max_rows": 33, "page_size": 48}), 1000, 1, id="odd"),
    pytest.param(DEFAULT, 4096, 6, id="six devices"),
]


@pytest.mark.parametrize(("cfg", "max_length", "parts"), CASES)
def test_whatever_is_scheduled_fits_a_program_that_is_not_much_larger(cfg, max_length, parts):
    sizes = program_sizes(cfg, max_length=max_length, parts=parts)
    num_programs = len(sizes.rows) * len(sizes.widths) + len(sizes.prefills())
    assert num_programs <= 20
    assert all(rows % parts == 0 for rows in (*sizes.rows, *sizes.prefill_rows))
    for count in range(1, cfg.max_rows + 1):
        assert count <= sizes.rows_for(count) <= max(4 * count + parts, 8 + parts)
    for pages in range(1, sizes.max_pages + 1):
        assert pages <= sizes.width_for(pages)
    assert sizes.max_pages * cfg.page_size >= max_length
    longest = min(cfg.token_budget, max_length)
    assert sizes.chunk_for(longest) == longest
    assert sizes.rows[0] >= sizes.prefill_rows[0]
    assert sizes.rows[-1] >= sizes.prefill_rows[-1]


def test_more_than_the_server_was_started_for_is_refused():
    with pytest.raises(ValueError, match=r"33 were scheduled.*at most 32"):
        program_sizes(DEFAULT, max_length=4096).rows_for(33)


def test_pages_are_those_asked_for_or_what_there_is_room_for():
    def chosen(memory=None, **changes):
        cfg = DEFAULT.model_copy(update=changes)
        return choose_num_pages(cfg, page_bytes=1000, max_length=6400, memory=memory)

    full = {"bytes_limit": 10_000_000, "bytes_in_use": 4_000_000}
    assert chosen(num_pages=120) == 120
    assert chosen() == 32 * 100
    assert chosen(full) == 5000
    assert chosen(full, prefix_cache=False) == 3200
    with pytest.raises(ConfigError, match=r"hold 6336 tokens.*at least 100 pages"):
        chosen(num_pages=99)
    with pytest.raises(ConfigError, match=r"9,500,000 are in use.*needs 100,000"):
        chosen({"bytes_limit": 10_000_000, "bytes_in_use": 9_500_000})


def test_programs_have_room_beside_the_pool():
    memory = {"bytes_limit": 1000, "bytes_in_use": 900}
    check_room(temp_bytes=100, memory=memory)
    check_room(temp_bytes=101, memory=None)
    with pytest.raises(ConfigError, match=r"101 bytes.*100 are left"):
        check_room(temp_bytes=101, memory=memory)
