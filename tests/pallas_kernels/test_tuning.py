"""Tuning tables: text round trip, precedence, and publishing that readers never see half of."""

import concurrent.futures
import json

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.fp8_matmul.cases import BENCH_ODD, tuning_key
from pallas_kernels.tuning import Table, TuningError


def make_table(value):
    table = Table("NVIDIA H200", (("jax", "0.11.2"),))
    for k in (128, 256):
        table = table.with_entry("fp8_matmul", f"m64_n64_k{k}", settings={"columns": value})
    return table


def test_a_table_comes_back_from_its_text():
    assert Table.from_json(make_table(3).to_json()) == make_table(3)
    assert Table.from_json(Table("cpu").to_json()) == Table("cpu")


def test_the_text_holds_no_path_and_one_entry_a_line():
    text = make_table(3).to_json()
    assert "/" not in text
    assert sum('"m64_' in line for line in text.splitlines()) == 2


def test_a_table_of_another_version_is_refused():
    text = json.dumps({**json.loads(make_table(1).to_json()), "format_version": 99})
    with pytest.raises(TuningError, match="99"):
        Table.from_json(text)


def test_an_override_wins_on_its_device_only_and_retraces():
    seen = []

    @jax.jit
    def f(x):
        found = tuning.find("fp8_matmul", "m64_n64_k128", device="NVIDIA H200")
        seen.append(found)
        return x

    with tuning.override(make_table(5)):
        f(1.0)
        assert tuning.find("fp8_matmul", "m64_n64_k128", device="NVIDIA H20") is None
    f(1.0)
    assert seen[0] == {"columns": 5}
    assert seen[1] != {"columns": 5}


def test_two_writers_at_once_leave_one_whole_table(tmp_path):
    path = tmp_path / "deep" / "table.json"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: tuning.publish(make_table(i), path), range(32)))
    assert tuning.read(path) in [make_table(i) for i in range(32)]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(("odd", "whole"), BENCH_ODD)
def test_an_odd_size_takes_the_tile_that_was_measured_for_the_whole_one(odd, whole):
    assert tuning_key(*odd) == tuning_key(*whole)
    settings = tuning.find("fp8_matmul", tuning_key(*odd), device="NVIDIA H200")
    assert settings is not None
