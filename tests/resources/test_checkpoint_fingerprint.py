"""One number a leaf: the same on every mesh, another after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfound.resources.checkpoint.fingerprint import MULTIPLIER, Prints, differing

FORMATS = [
    "int4", "float4_e2m1fn", "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16",
    "float16", "float32", "int32", "complex64",
]  # fmt: skip


def number(x):
    return Prints({("x",): x}).read()[("x",)]


def by_hand(words):
    """The formula, element by element, in Python's integers."""
    total = 0
    for index in np.ndindex(words.shape):
        weight = 0
        for position in index:
            weight = weight * MULTIPLIER + position
        total += int(words[index]) * (2 * weight + 1)
    return total % 2**32


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (0, 4)])
def test_the_number_is_that_of_the_formula(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert number(jnp.asarray(x)) == by_hand(np.asarray(x).view(np.uint32).reshape(shape))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("spec", [P(), P("x", "y"), P("y")], ids=str)
def test_an_array_looked_at_in_parts_has_the_number_of_the_devices(dtype, spec, monkeypatch):
    monkeypatch.setattr("jaxfound.resources.checkpoint.fingerprint.PART_BYTES", 64)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 7, (8, 4, 6)), dtype)
    table = {("x",): jax.device_put(x, NamedSharding(mesh, spec)), ("y",): x[0, 0, 0]}
    assert Prints(table, when="on_read").read() == Prints(table).read()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_format_has_a_number_that_sees_every_element(dtype):
    x = np.asarray(jnp.arange(6).astype(dtype)).reshape(2, 3)
    first = number(jnp.asarray(x))
    for index in np.ndindex(x.shape):
        changed = x.copy()
        changed[index] = np.asarray(jnp.asarray(1, dtype) if x[index] == 0 else x.dtype.type(0))
        assert number(jnp.asarray(changed)) != first, index


def test_formats_of_64_bits_count_all_of_them():
    with jax.enable_x64(True):
        for x in (np.array([1.5, -2.0]), np.array([2**40 + 1, 3]), np.array([1 + 2j, 3])):
            assert number(jnp.asarray(x)) == by_hand(x.view(np.uint32).reshape(*_halves(x)))


def _halves(x):
    return (*x.shape, 2, 2) if x.dtype.kind == "c" else (*x.shape, 2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_have_the_number_of_the_integers_behind_them(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    assert number(keys) == number(jax.random.key_data(keys))
    assert number(keys) != number(keys[::-1])


def test_one_bit_anywhere_changes_the_number():
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    first = number(jnp.asarray(x))
    seen = set()
    for bit in range(0, 8 * x.nbytes, 7):
        changed = x.copy()
        changed.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
        seen.add(number(jnp.asarray(changed)))
    assert first not in seen


def test_rows_in_another_order_have_another_number():
    x = jnp.arange(12.0).reshape(4, 3)
    assert len({number(x), number(x[::-1]), number(x[jnp.array([1, 0, 2, 3])]), number(x.T)}) == 4


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P(None, "a"), P()])
def test_the_mesh_does_not_matter(shape, spec):
    x = jnp.arange(128.0).reshape(8, 16)
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    placed = jax.device_put(x, NamedSharding(jax.sharding.Mesh(devices, ("a", "b")), spec))
    assert number(placed) == number(x)


@pytest.mark.multidevice
def test_leaves_on_different_devices_are_each_counted_where_they_are():
    first, last = (jax.device_put(jnp.arange(3.0), d) for d in (jax.devices()[0], jax.devices()[7]))
    found = Prints({("a",): first, ("b",): last}).read()
    assert found[("a",)] == found[("b",)]


def test_what_differs_is_named():
    have = {("a", "b"): 1, ("c",): 2, ("new",): 3}
    assert differing(have, {("a", "b"): 1, ("c",): 2}) == []
    assert "leaf a.b has fingerprint 00000001" in differing(have, {("a", "b"): 15})[0]
