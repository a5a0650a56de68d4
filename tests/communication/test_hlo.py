"""Collectives are read from every spelling the compiler uses, and from a real program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.communication import Collective, axes_crossed, collectives

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, "
SPELLINGS = {
    "listed": ("replica_groups={{0,1},{2,3}}", [(0, 1), (2, 3)]),
    "range": ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
    "range, transposed": ("replica_groups=[4,2]<=[4,2]T(1,0)", [(0, 2), (4, 6), (1, 3), (5, 7)]),
    "range, reshaped and transposed": (
        "replica_groups=[4,2]<=[2,2,2]T(0,2,1)",
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
    "mesh, one axis": (
        "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}",
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
    "mesh, two axes": (
        "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
        [(0, 1, 4, 5), (2, 3, 6, 7)],
    ),
    "mesh, first factor of an axis": (
        "replica_groups=mesh['x'=8] {'x':(1)2}",
        [(0, 4), (1, 5), (2, 6), (3, 7)],
    ),
    "mesh, middle factor of an axis": (
        "replica_groups=mesh['x'=8] {'x':(2)2}",
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
    "everyone": ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
    "pairs": ("source_target_pairs={{0,2},{2,0}}", [(0, 2), (2, 0)]),
}


def program(line):
    return (
        f"{HEADER}num_partitions=8\n\n  %x.1 = {line}, metadata={{op_name='jit(f)/all-reduce'}}\n"
    )


def only(line):
    (found,) = collectives(program(line))
    return found


@pytest.mark.parametrize(("text", "groups"), SPELLINGS.values(), ids=list(SPELLINGS))
def test_groups_are_read_from_every_spelling(text, groups):
    found = only(f"f32[4,4]{{1,0}} all-reduce(%dot), channel_id=2, {text}, to_apply=%add")
    assert sorted(found.groups) == sorted(groups)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("all-reduce", "all_reduce"),
        ("all-reduce-start", "all_reduce"),
        ("all-gather", "all_gather"),
        ("all-gather-start", "all_gather"),
        ("reduce-scatter", "reduce_scatter"),
        ("all-to-all", "all_to_all"),
        ("ragged-all-to-all", "ragged_all_to_all"),
        ("collective-permute-start", "permute"),
    ],
)
def test_the_kind_is_the_operations_name(operation, kind):
    found = only(f"bf16[8]{{0}} {operation}(%p), replica_groups={{{{0,1}}}}")
    assert (found.kind, found.shape) == (kind, "bf16[8]{0}")


def test_the_type_of_several_results_is_kept_whole():
    found = only("(f32[4]{0}, f32[8]{0}) all-reduce(%a, %b), replica_groups={{0,1}}")
    assert found.shape == "(f32[4]{0}, f32[8]{0})"


@pytest.mark.parametrize(
    "line",
    [
        "f32[4]{0} all-reduce-done(%all-reduce-start)",
        "f32[4]{0} fusion(%all-reduce.1), kind=kLoop, calls=%all-reduce_computation",
        "f32[4]{0} get-tuple-element(%all-to-all), index=0",
    ],
)
def test_users_of_a_collective_are_not_collectives(line):
    assert not list(collectives(program(line)))


@pytest.mark.parametrize(
    "groups", ["replica_groups=@later", "replica_groups=mesh['a'=2], device_ids=(1,0) {'a'}", ""]
)
def test_an_unknown_spelling_is_refused_and_not_taken_for_silence(groups):
    with pytest.raises(ValueError, match="replica_groups"):
        only(f"f32[4]{{0}} all-reduce(%dot), channel_id=2, {groups}")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3)), ("tensor",)),
        (((0, 2), (1, 3)), ("fsdp",)),
        (((0, 4),), ("data",)),
        (((0, 6), (1, 7)), ("data", "fsdp")),
        ((tuple(range(8)),), ("data", "fsdp", "tensor")),
        (((0,), (1,)), ()),
    ],
)
def test_axes_crossed_are_those_along_which_members_differ(groups, axes):
    collective = Collective("all_reduce", "f32[4]{0}", groups)
    assert axes_crossed(collective, MESH) == axes
    assert collective.is_local == (axes == ())


@pytest.mark.multidevice
def test_a_compiled_program_shows_its_collectives():
    mesh = jax.make_mesh((2, 2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 3)

    def step(x_MK):
        def exchange(shard):
            swapped = jax.lax.ppermute(shard, "fsdp", [(0, 1), (1, 0)])
            turned = jax.lax.all_to_all(swapped, "tensor", 1, 0, tiled=True)
            return jax.lax.psum(turned, ("data", "tensor"))

        spec = P("data", "fsdp")
        return jax.shard_map(
            exchange, mesh=mesh, in_specs=spec, out_specs=P(None, "fsdp"), check_vma=False
        )(x_MK)

    shard = NamedSharding(mesh, P("data", "fsdp"))
    text = jax.jit(step, in_shardings=shard).lower(jnp.ones((8, 8))).compile().as_text()
    found = {(c.kind, axes_crossed(c, MESH)) for c in collectives(text)}
    assert found == {
        ("permute", ("fsdp",)),
        ("all_to_all", ("tensor",)),
        ("all_reduce", ("data", "tensor")),
    }
