"""An exchange brings every run of rows to its peer and home again, bit for bit, and loses none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.communication import axes_crossed, collectives
from jaxfound.communication.dispatch import Exchange, announce
from pallas_kernels import deviceless

PEERS, ROWS, LONGEST, WIDTH = 4, 10, 7, 3
SIZES = {
    "uneven": [[2, 0, 5, 1], [0, 0, 0, 3], [7, 1, 1, 1], [1, 2, 3, 4]],
    "everything to one device": [[0, 0, 7, 0]] * PEERS,
    "nothing at all": [[0] * PEERS] * PEERS,
    "one device sends nothing": [[1, 1, 1, 1], [0, 0, 0, 0], [2, 3, 4, 1], [0, 7, 0, 3]],
    "each keeps its own": (5 * np.eye(PEERS, dtype=int)).tolist(),
}
each_case = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
REASON = deviceless.missing()


def documented_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What `jax.lax.ragged_all_to_all` says it does, written with what the CPU has.

    NaN where a receiver expects another number of rows than it is sent.
    """
    everyones = partial(jax.lax.all_gather, axis_name=axis_name)
    operands, offsets, sizes, places = map(
        everyones, (operand, input_offsets, send_sizes, output_offsets)
    )
    me, rows = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for sender in range(len(operands)):
        start, size = places[sender][me], sizes[sender][me]
        source = jnp.clip(offsets[sender][me] + rows - start, 0, len(operand) - 1)
        inside = (rows >= start) & (rows < start + size)
        output = jnp.where(inside[:, None], operands[sender][source], output)
    return jnp.where((recv_sizes == sizes[:, me]).all(), output, jnp.nan)


def expert_mesh(devices):
    return Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,))


def there_and_home(transport):
    """A function of all devices' rows [N R D], sizes [N N] and blocks [N N L D]."""
    way = Exchange("expert", ROWS, LONGEST, transport)

    def on_one(rows, sizes, blocks):
        (runs,) = announce(sizes, axis="expert")
        got, gradient_of_there = jax.vjp(lambda x: way.there(x, runs), rows[0])
        home, gradient_of_back = jax.vjp(lambda x: way.back(x, runs), blocks[0])
        results = {
            "there": got,
            "home again": way.back(got, runs),
            "home": home,
            "gradient of there": gradient_of_there(blocks[0])[0],
            "gradient of back": gradient_of_back(rows[0])[0],
        }
        return jax.tree.map(lambda x: x[None], results)

    return partial(jax.shard_map, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)(
        on_one
    )


@pytest.fixture(scope="module", params=["dense", "ragged"])
def exchanged(request):
    """Rows and blocks of all devices, and what becomes of them for some sizes."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(PEERS, ROWS, WIDTH)).astype(np.float32)
    blocks = rng.normal(size=(PEERS, PEERS, LONGEST, WIDTH)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_all_to_all", documented_ragged_all_to_all)
        with jax.set_mesh(expert_mesh(jax.devices()[:PEERS])):
            run = jax.jit(there_and_home(request.param))
            run = run.lower(rows, np.zeros((PEERS, PEERS), np.int32), blocks).compile()

    def results(sizes):
        sizes = np.array(sizes, np.int32)
        place = NamedSharding(expert_mesh(jax.devices()[:PEERS]), P("expert"))
        found = run(*jax.device_put((rows, sizes, blocks), place))
        return jax.tree.map(np.asarray, found)

    return rows, blocks, results


def at_peers(rows, sizes):
    """Rows of each device as they stand after the exchange."""
    sizes = np.array(sizes)
    expected = np.zeros((PEERS, PEERS, LONGEST, WIDTH), np.float32)
    for sender in range(PEERS):
        for receiver in range(PEERS):
            start, size = sizes[sender, :receiver].sum(), sizes[sender, receiver]
            expected[receiver, sender, :size] = rows[sender, start : start + size]
    return expected


def at_home(blocks, sizes):
    """Rows of each device as they stand when all blocks have been sent home."""
    sizes = np.array(sizes)
    expected = np.zeros((PEERS, ROWS, WIDTH), np.float32)
    for sender in range(PEERS):
        for receiver in range(PEERS):
            start, size = sizes[sender, :receiver].sum(), sizes[sender, receiver]
            expected[sender, start : start + size] = blocks[receiver, sender, :size]
    return expected


@pytest.mark.multidevice
@each_case
def test_every_run_stands_at_the_head_of_its_senders_block(exchanged, sizes):
    rows, _, results = exchanged
    np.testing.assert_array_equal(results(sizes)["there"], at_peers(rows, sizes))


@pytest.mark.multidevice
@each_case
def test_rows_that_were_sent_come_home_as_they_left(exchanged, sizes):
    rows, _, results = exchanged
    used = np.arange(ROWS)[None, :, None] < np.sum(sizes, axis=1)[:, None, None]
    np.testing.assert_array_equal(results(sizes)["home again"], np.where(used, rows, 0))


@pytest.mark.multidevice
@each_case
def test_only_the_rows_of_a_run_go_home(exchanged, sizes):
    """The blocks are full of numbers, of which those behind a run belong to nobody."""
    _, blocks, results = exchanged
    np.testing.assert_array_equal(results(sizes)["home"], at_home(blocks, sizes))


@pytest.mark.multidevice
@each_case
def test_each_ways_gradient_is_the_other_way_unscaled(exchanged, sizes):
    rows, blocks, results = exchanged
    found = results(sizes)
    np.testing.assert_array_equal(found["gradient of there"], at_home(blocks, sizes))
    np.testing.assert_array_equal(found["gradient of back"], at_peers(rows, sizes))


def lowered(devices):
    """The program that exchanges bfloat16 rows and numbers, and takes the rows' gradient."""
    way = Exchange("expert", ROWS, LONGEST)
    mesh = expert_mesh(devices)

    def on_one(rows, numbers, sizes):
        (runs,) = announce(sizes, axis="expert")
        of_rows = jax.grad(lambda x: (way.there(x[0], runs).astype(jnp.float32) ** 2).sum())(rows)
        return of_rows, way.there(numbers[0], runs)

    shapes = (
        ((PEERS, ROWS, 256), jnp.bfloat16),
        ((PEERS, ROWS, 2), jnp.int32),
        ((PEERS, PEERS), jnp.int32),
    )
    place = NamedSharding(mesh, P("expert"))
    structs = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    run = partial(jax.shard_map, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    with jax.set_mesh(mesh):
        return jax.jit(run(on_one)).lower(*structs)


def kinds(text):
    found = [(c.kind, axes_crossed(c, {"expert": PEERS})) for c in collectives(text)]
    assert {axes for _, axes in found} == {("expert",)}
    return [kind for kind, _ in found]


@pytest.mark.multidevice
def test_the_cpu_sends_blocks_densely():
    text = lowered(jax.devices()[:PEERS]).compile().as_text()
    assert set(kinds(text)) == {"all_to_all"}


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_an_h200_sends_the_rows_of_the_runs_alone_both_ways():
    """Rows, numbers and the rows' gradient; only the sizes of the runs go densely."""
    with deviceless.without_cache():
        devices = deviceless.topology("NVIDIA H200", devices_per_host=PEERS)
        text = lowered(devices).compile().as_text()
    assert sorted(kinds(text)) == ["all_to_all"] + ["ragged_all_to_all"] * 3
