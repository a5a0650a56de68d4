"""A chunk gone back layer by layer gives the gradients of JAX's own walk, and holds few of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfound.parallelism.pipeline.chunk import (
    Chunk,
    Layers,
    walk_adding,
    walk_apart,
    walk_forward,
)
from jaxfound.parallelism.remat import POLICIES
from tests.models.tiny import FAST_TO_COMPILE

CHUNKS, LAYERS, ROWS, WIDTH = 2, 4, 6, 8
jit = partial(jax.jit, compiler_options=FAST_TO_COMPILE)


def layer(params, fixed, x, piece):
    """A layer with a loss of its own and a report; one whose place is empty changes nothing."""
    hidden = jnp.tanh(x @ params["up"] + piece["shift"]) * fixed["scale"][None]
    there = fixed["place"] >= 0
    y = jnp.where(there, x + hidden @ params["down"], x)
    return y, jnp.where(there, (hidden**2).mean(), 0.0), {"mean": hidden.mean(), "y": y.sum()}


def drawn(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def arrays(num_layers=LAYERS, width=WIDTH):
    several = (CHUNKS, num_layers)
    params = {
        "up": drawn(*several, width, 2 * width, seed=0),
        "down": drawn(*several, 2 * width, width, seed=1),
    }
    places = jnp.arange(CHUNKS * num_layers).reshape(several)
    fixed = {"scale": drawn(*several, 2 * width, seed=2), "place": places.at[:, -1].set(-1)}
    piece = {"shift": drawn(ROWS, 2 * width, seed=3)}
    return params, fixed, piece, drawn(ROWS, width, seed=4), drawn(ROWS, width, seed=5)


def expected(number):
    """Output, reports and gradients by JAX, of one chunk."""
    params, fixed, piece, x, of_y = arrays()
    of_chunk, fixed = jax.tree.map(lambda a: a[number], (params, fixed))

    def walk(of_chunk, x):
        def one(x, at):
            y, loss, report = layer(*at, x, piece)
            return y, (loss, report)

        y, (losses, reports) = lax.scan(one, x, (of_chunk, fixed))
        return (y, losses.sum()), reports

    (y, _), pull, reports = jax.vjp(walk, of_chunk, x, has_aux=True)
    return y, reports, *pull((of_y, jnp.ones(())))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("in_a_step", [1, 3, 0], ids=["one", "three", "all"])
@pytest.mark.parametrize("policy", POLICIES)
def test_sums_get_the_gradients_of_one_chunk_and_no_other_is_touched(policy, in_a_step):
    params, fixed, piece, x, of_y = arrays()
    layers, sums = Layers(layer, policy, in_a_step), jax.tree.map(jnp.ones_like, params)

    @jit
    def run(params, sums, number):
        chunk = Chunk(params, fixed, number)
        passed = walk_adding(layers, chunk, x, piece, sums=sums, pin=lambda sums: sums)
        return passed.output, passed.report, *passed.pull(of_y)

    for number in range(CHUNKS):
        y, report, added, of_x = run(params, sums, jnp.int32(number))
        wanted = expected(number)
        jax.tree.map(close, (y, report, of_x), (wanted[0], wanted[1], wanted[3]))
        one_more = {name: sums[name].at[number].add(g) for name, g in wanted[2].items()}
        jax.tree.map(close, added, one_more)


def test_an_unrolled_walk_gives_the_gradients_apart():
    params, fixed, piece, x, of_y = arrays()
    of_chunk, fixed = jax.tree.map(lambda a: a[1], (params, fixed))

    @jit
    def run(of_chunk):
        passed = walk_apart(Layers(layer), of_chunk, fixed, x, piece)
        return passed.output, passed.report, *passed.pull(of_y)

    jax.tree.map(close, run(of_chunk), expected(1))


def test_a_forward_pass_alone_gives_the_same_output():
    params, fixed, piece, x, _ = arrays()
    found = jit(lambda x: walk_forward(Layers(layer), Chunk(params, fixed, 1), x, piece))(x)
    close(found, expected(1)[0])


def loops(jaxpr):
    """The scans of a program, in order."""
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


@pytest.mark.parametrize(("policy", "kept"), [("full", WIDTH), ("matmul_outputs", 3 * WIDTH)])
def test_between_forth_and_back_lies_what_the_policy_keeps_and_no_parameter(policy, kept):
    params, fixed, piece, x, of_y = arrays()

    def run(params, sums):
        chunk = Chunk(params, fixed, 0)
        passed = walk_adding(Layers(layer, policy), chunk, x, piece, sums=sums, pin=lambda a: a)
        return passed.pull(of_y)

    forth, back = loops(jax.make_jaxpr(run)(params, params).jaxpr)
    stacked = [v.aval for v in forth.outvars if v in back.invars and v.aval.shape[:1] == (LAYERS,)]
    assert {a.shape[1:-1] for a in stacked if a.ndim > 1} == {(ROWS,)}
    assert sum(a.shape[-1] for a in stacked if a.ndim > 1) == kept


def temporary_bytes(num_layers, *, width=256):
    """Bytes that going back through so many layers takes beside its arguments and results."""
    params, fixed, piece, x, of_y = arrays(num_layers, width)

    def run(params, sums):
        chunk = Chunk(params, fixed, 1)
        passed = walk_adding(Layers(layer), chunk, x, piece, sums=sums, pin=lambda a: a)
        return passed.pull(of_y)

    compiled = jax.jit(run, donate_argnums=1).lower(params, params).compile(FAST_TO_COMPILE)
    return compiled.memory_analysis().temp_size_in_bytes, 4 * width * 4 * width


def test_eight_layers_take_the_room_of_two():
    (few, of_layer), (many, _) = temporary_bytes(2), temporary_bytes(8)
    assert many - few < of_layer
    assert many < 3 * of_layer
