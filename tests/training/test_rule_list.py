"""Rules from a ranking: what is kept stays kept, segments are few, and no fewer would pass."""

from itertools import combinations, groupby

import pytest

from jaxfound.config.layer_formats import check_precision, stacks_of
from jaxfound.models import describe
from jaxfound.training.rule_list import fewest_kept, rules_keeping, units_of, widened
from tests.models.tiny import model_config


def segments(kept, num_layers):
    return len(list(groupby(range(num_layers), kept.__contains__)))


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_widening_keeps_what_was_kept_and_adds_the_fewest_layers(most):
    everything = range(6)
    subsets = [set(c) for n in range(7) for c in combinations(everything, n)]
    for kept in subsets:
        found = set(widened(kept, everything, most=most))
        legal = [s for s in subsets if s >= kept and segments(s, 6) <= most]
        assert found in legal
        assert len(found) == min(map(len, legal))


def test_numbers_are_of_the_model_where_a_stack_begins_later():
    assert widened([3, 5], range(3, 9), most=2) == [3, 4, 5]


def rules(kept, table, *, by="layers", most=4):
    stacks = stacks_of(table)
    units = [unit for unit in units_of(stacks, by) if unit.pattern in kept]
    assert len(units) == len(kept)
    found = rules_keeping(units, stacks, compute="bfloat16", most_segments=most)
    check_precision(found, table)
    return [(rule.pattern, rule.format) for rule in found.rules]


def test_layers_that_are_kept_come_before_fp8_for_the_rest():
    table = describe(model_config("gqa", num_layers=8))
    assert rules(["layers.0.*", "layers.1.*", "layers.7.*"], table) == [
        ("layers.0-1.*", "bfloat16"),
        ("layers.7.*", "bfloat16"),
        ("layers.*", "fp8"),
    ]
    assert rules([], table) == [("layers.*", "fp8")]
    assert rules([f"layers.{n}.*" for n in range(8)], table) == []


def test_a_leading_stack_has_rules_of_its_own():
    table = describe(model_config("mla_moe_yarn", num_layers=5))
    assert rules(["leading.0.*", "layers.2.*", "layers.4.*"], table) == [
        ("layers.2.*", "bfloat16"),
        ("layers.4.*", "bfloat16"),
        ("layers.*", "fp8"),
    ]


def test_operations_that_are_kept_are_named_in_every_layer():
    table = describe(model_config("gqa", num_layers=3))
    kept = ["layers.ffn.down", "layers.mixer.out"]
    found = rules(kept, table, by="operations")
    assert sorted(found[:2]) == [(path, "bfloat16") for path in kept]
    assert found[2:] == [("layers.*", "fp8")]
    every = [unit.pattern for unit in units_of(stacks_of(table), "operations")]
    assert all(format == "bfloat16" for _, format in rules(every, table, by="operations"))


def test_scattered_layers_are_widened_to_four_segments():
    table = describe(model_config("gqa", num_layers=9))
    found = rules(["layers.1.*", "layers.3.*", "layers.7.*"], table)
    assert found == [
        ("layers.1-3.*", "bfloat16"),
        ("layers.7-8.*", "bfloat16"),
        ("layers.*", "fp8"),
    ]


@pytest.mark.parametrize("needed", range(6))
def test_the_fewest_that_pass_are_kept_and_few_are_tried(needed):
    tried = []

    def keep(count):
        tried.append(count)
        return count

    assert fewest_kept(5, keep, lambda count: count >= needed) == needed
    assert len(tried) <= 5
