"""I and W together are the backward pass; between them lies little, and nothing twice."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from jaxfound.config.model import ModelConfig
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.presets import PRESETS
from jaxfound.models.build import Frame
from jaxfound.models.decoder import walk
from jaxfound.models.execution import Execution
from jaxfound.parallelism.axes import TABLE_RULES
from jaxfound.parallelism.pipeline import split
from jaxfound.parallelism.pipeline.split import split_backward
from tests.models.tiny import FAST_TO_COMPILE, relative_error, weights_of

ROWS, TOKENS, EMBED, FFN = 2, 6, 8, 24
# Without excess precision a bfloat16 number is rounded inside a fusion too, as it is between parts.
jit = partial(jax.jit, compiler_options={**FAST_TO_COMPILE, "xla_allow_excess_precision": False})


def drawn(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, dtype)


def params_of_layer(seed=0):
    return {
        **{name: drawn(EMBED, EMBED, seed=seed + i) for i, name in enumerate("qkvo")},
        "scale": drawn(EMBED, seed=seed + 4) + 1,
        "up": drawn(EMBED, FFN, seed=seed + 5),
        "down": drawn(FFN, EMBED, seed=seed + 6),
    }


def normalised(x, scale):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale.reshape(1, 1, -1)).astype(x.dtype)


def mlp(p, x):
    hidden = jax.nn.silu(normalised(x, p["scale"]) @ p["up"].astype(x.dtype))
    return x + hidden @ p["down"].astype(x.dtype)


def attention(p, x):
    normed = normalised(x, p["scale"])
    q, k, v = (jnp.einsum("btd,de->bte", normed, p[name].astype(x.dtype)) for name in "qkv")
    order = jnp.arange(x.shape[1])
    # A call with a literal among its arguments.
    scores = jax.jit(lambda a, b: a * b)(jnp.einsum("bte,bse->bts", q, k), 0.5)
    scores = jnp.where(order[None, :, None] >= order[None, None, :], scores, -1e30)
    mixed = jnp.einsum("bts,bse->bte", jax.nn.softmax(scores), v)
    return x + mixed @ p["o"].astype(x.dtype)


def layer(p, x):
    return mlp(p, attention(p, x))


def rounded(p, x):
    return layer(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16))


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, jnp.einsum("...d,...f->df", saved[0], g)),
)


def own_backward(p, x):
    return product(jnp.tanh(product(x, p["up"])), p["down"])


def two_layers(p, x, *, unroll, one):
    stacked = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), p)
    return lax.scan(lambda x, p: (one(p, x), None), x, stacked, unroll=unroll)[0]


# A stage, and the weights that it multiplies by.
STAGES = {
    "mlp": (mlp, 2),
    "attention": (attention, 4),
    "bfloat16": (rounded, 6),
    "checkpoint": (jax.checkpoint(layer), 6),
    "custom_vjp": (own_backward, 2),
    "unrolled_scan": (partial(two_layers, unroll=2, one=layer), 12),
    "unrolled_checkpoints": (partial(two_layers, unroll=2, one=jax.checkpoint(layer)), 12),
}
each_stage = pytest.mark.parametrize(("stage", "num_weights"), STAGES.values(), ids=STAGES)


def backward_of(stage):
    def backward(params, x, cotangent):
        y, pull = jax.vjp(stage, params, x)
        of_params, of_x = pull(cotangent)
        # Beside the gradients: what nothing differentiates, with a custom derivative inside.
        return of_params, {"x": of_x, "y": y, "report": jax.nn.relu(y).sum()}

    return backward


def arguments(stage, params=None, x=None):
    params = params_of_layer() if params is None else params
    x = drawn(ROWS, TOKENS, EMBED, seed=9) if x is None else x
    y = jax.eval_shape(stage, params, x)
    return params, x, drawn(*y.shape, seed=10, dtype=y.dtype)


def both_parts(parts, params, *operands):
    outputs, kept = jit(parts.input_part)(params, *operands)
    return jit(parts.weight_part)(params, kept), outputs


def operations(program):
    """Operations of a jaxpr and of those inside it, of a scan's as often as it has steps."""
    for eqn in program.eqns:
        yield eqn
        for inner in [*core.jaxprs_in_params(eqn.params)] * eqn.params.get("length", 1):
            yield from operations(inner)


def nbytes(arrays):
    return sum(a.size * a.dtype.itemsize for a in arrays)


@each_stage
def test_two_parts_give_the_bits_of_one(stage, num_weights):
    args = arguments(stage)
    parts = split_backward(backward_of(stage), *args)
    found = both_parts(parts, *args)
    jax.tree.map(np.testing.assert_array_equal, found, jit(backward_of(stage))(*args))


@each_stage
def test_each_product_is_in_one_part_and_those_for_weights_in_w(stage, num_weights):
    args = arguments(stage)
    parts = split_backward(backward_of(stage), *args)
    whole = [e.primitive.name for e in operations(jax.make_jaxpr(backward_of(stage))(*args))]
    assert parts.weight_products == num_weights
    assert parts.input_products + parts.weight_products == whole.count("dot_general")
    assert parts.is_cut


@pytest.mark.parametrize(
    ("stage", "by_token", "item_bytes"),
    [
        # Both operands of each weight's gradient: the inputs of the product and its cotangent.
        (mlp, (EMBED + FFN) + (FFN + EMBED), 4),
        # Three weights share an input.
        (attention, (EMBED + 3 * EMBED) + (EMBED + EMBED), 4),
        (rounded, 8 * EMBED + 2 * FFN, 2),
        (jax.checkpoint(layer), 8 * EMBED + 2 * FFN, 4),
    ],
)
def test_operands_of_weight_products_are_kept_and_little_else(stage, by_token, item_bytes):
    parts = split_backward(backward_of(stage), *arguments(stage))
    # A norm's gradient is summed over tokens in I: it is smaller than its operands.
    summed = EMBED * item_bytes
    assert parts.kept_bytes <= ROWS * TOKENS * by_token * item_bytes + summed


@pytest.mark.parametrize("stage", [mlp, attention, layer, rounded])
def test_less_is_kept_than_the_backward_pass_keeps(stage):
    params, x, cotangent = arguments(stage)
    pull = jax.eval_shape(lambda *args: jax.vjp(stage, *args)[1], params, x)
    shapes = {a.shape for a in jax.tree.leaves(params)}
    residuals = [a for a in jax.tree.leaves(pull) if a.shape not in shapes]
    parts = split_backward(backward_of(stage), params, x, cotangent)
    assert parts.kept_bytes < nbytes(residuals)


@each_stage
def test_neither_parameters_nor_their_casts_are_kept(stage, num_weights):
    params, *operands = arguments(stage)
    parts = split_backward(backward_of(stage), params, *operands)
    matrices = {a.shape for a in jax.tree.leaves(params) if a.ndim == 2}
    assert matrices.isdisjoint(a.shape for a in parts.kept)


def test_what_is_kept_is_known_before_anything_runs():
    args = arguments(layer)
    parts = split_backward(backward_of(layer), *jax.eval_shape(lambda *a: a, *args))
    kept = jax.eval_shape(parts.input_part, *args).kept
    assert [(a.shape, a.dtype) for a in kept] == [(a.shape, a.dtype) for a in parts.kept]
    assert parts.kept_bytes == nbytes(kept) > 0


def test_a_narrow_array_is_kept_and_not_its_wide_copy():
    def backward(w, x, cotangent):
        wide = x.astype(jnp.float32)
        return wide.T @ cotangent, (jnp.sin(wide) @ w, wide)

    x, cotangent = drawn(6, 4, dtype=jnp.bfloat16), drawn(6, 3)
    parts = split_backward(backward, drawn(4, 3), x, cotangent)
    assert [a.dtype for a in parts.kept] == [jnp.bfloat16, jnp.float32]


def test_what_only_w_needs_is_left_to_w_where_that_costs_no_memory():
    def backward(w, x, cotangent):
        return jnp.exp(x).T @ cotangent, cotangent @ w.T

    args = drawn(4, 3), drawn(6, 4), drawn(6, 3)
    kept = split_backward(backward, *args).input_part(*args).kept
    jax.tree.map(np.testing.assert_array_equal, kept, [*args[1:]])


def test_gradients_that_are_zeros_parameters_or_operands_pass_through():
    def backward(params, x):
        grads = {"zero": jnp.zeros(3), "same": params["same"], "x": x, "one": 1.0}
        return grads, (x + 1, params["zero"])

    params, x = {"zero": drawn(3), "same": drawn(2)}, drawn(5)
    parts = split_backward(backward, params, x)
    found = both_parts(parts, params, x)
    jax.tree.map(np.testing.assert_array_equal, found, backward(params, x))
    assert [a.shape for a in parts.kept] == [(5,)]


def test_a_scan_over_layers_stays_in_i_and_says_so():
    stage = partial(two_layers, unroll=1, one=jax.checkpoint(layer))
    args = arguments(stage)
    parts = split_backward(backward_of(stage), *args)
    found = both_parts(parts, *args)
    jax.tree.map(np.testing.assert_array_equal, found, jit(backward_of(stage))(*args))
    # The loop forward has 8 products a layer and is no concern of W; the loop back has the rest.
    assert parts.uncut == (f"scan with {parts.input_products - 16} matrix products",)
    assert parts.weight_products == 0
    assert not parts.is_cut


def test_side_effects_are_refused():
    def noisy(params, x):
        jax.debug.print("{}", x.sum())
        return mlp(params, x)

    with pytest.raises(ValueError, match=r"side effects .*debug prints"):
        split_backward(backward_of(noisy), *arguments(mlp))


def test_a_value_of_the_surrounding_trace_reaches_w_by_being_kept():
    params, x, cotangent = arguments(mlp)

    @jit
    def run(mask, params, x, cotangent):
        stage = lambda p, x: mlp(p, x * mask)
        parts = split_backward(backward_of(stage), params, x, cotangent)
        kept = parts.input_part(params, x, cotangent).kept
        # Another branch, in which a value of the first would not exist.
        return lax.cond(
            x.sum() > 1e9, lambda k: params, lambda k: parts.weight_part(params, k), kept
        )

    mask = (drawn(ROWS, TOKENS, 1, seed=3) > 0).astype(jnp.float32)
    expected, _ = jit(backward_of(lambda p, x: mlp(p, x * mask)))(params, x, cotangent)
    found = run(mask, params, x, cotangent)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def blocks(preset, **execution):
    """Two unrolled layers of a preset, their parameters and an input."""
    config = {**PRESETS[preset], "num_layers": 2, "num_dense_layers": 0, "mtp_depth": 0}
    run = Execution(layers_per_scan_step=0, **execution)
    frame = Frame(ModelConfig.model_validate(config), execution=run)
    arrays, buffers = weights_of(frame)
    params = {path: a for path, a in arrays.items() if path.startswith("layers.")}
    others = {path: a for path, a in arrays.items() if path not in params}
    tokens = jnp.zeros((ROWS, TOKENS), jnp.int32)

    def stage(params, x):
        model = frame.bind({**params, **others}, buffers)
        return walk(model.layers, x, model.row(tokens, None, None), execution=run)[0]

    return stage, params, drawn(ROWS, TOKENS, frame.cfg.embed_dim, dtype=run.dtype)


@pytest.mark.parametrize(
    ("preset", "compute"),
    [("tiny-dense", "float32"), ("tiny-dense", "bfloat16"), ("tiny-mla-moe", "float32")],
)
def test_layers_of_a_model_are_cut(preset, compute):
    stage, params, x = blocks(preset, precision=PrecisionConfig(compute=compute), remat="full")
    args = arguments(stage, params, x)
    parts = split_backward(backward_of(stage), *args)
    grads, _ = both_parts(parts, *args)
    expected, _ = jit(backward_of(stage))(*args)
    # The same operations in three programs, up to the roundings of what a compiler fuses.
    assert max(map(relative_error, grads.values(), expected.values())) < 1e-6
    # At least each linear layer's kernel of each layer, experts apart.
    kernels = [path for path in params if path.endswith(".kernel")]
    assert parts.weight_products >= 2 * len(kernels)
    # Off the GPU one loop over tiles of tokens makes both gradients of an expert's product.
    loops = {"while with 2 matrix products"} if preset == "tiny-mla-moe" else set()
    assert {*parts.uncut} <= loops


@pytest.mark.multidevice
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_parts_run_in_branches_of_a_scan_on_several_devices(dtype):
    mesh = jax.make_mesh(
        (2, 2), ("pipeline", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    num_microbatches = 3

    def stage(p, x):
        up = TABLE_RULES.gather(p["up"].astype(x.dtype), "embed", "ffn")
        down = TABLE_RULES.gather(p["down"].astype(x.dtype), "ffn", "embed")
        hidden = jax.nn.silu(normalised(attention(p, x), p["scale"]) @ up)
        return x + TABLE_RULES.constrain(hidden @ down, None, None, "embed")

    backward = backward_of(jax.checkpoint(stage))
    params = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), params_of_layer())
    shape = (2, num_microbatches, ROWS, TOKENS, EMBED)
    xs, cotangents = drawn(*shape, seed=1, dtype=dtype), drawn(*shape, seed=2, dtype=dtype)

    def vary(tree):
        same = lambda a: "pipeline" in jax.typeof(a).manual_axis_type.varying
        cast = lambda a: a if same(a) else lax.pcast(a, "pipeline", to="varying")
        return jax.tree.map(cast, tree)

    def on_rank(params, xs, cotangents, ops, microbatches):
        params, xs, cotangents, ops, microbatches = jax.tree.map(
            lambda a: a[0], (params, xs, cotangents, ops, microbatches)
        )
        parts = split_backward(backward, params, xs[0], cotangents[0])
        slots = [jnp.zeros((num_microbatches, *a.shape), a.dtype) for a in parts.kept]
        carry = vary((slots, jnp.zeros_like(xs), jax.tree.map(jnp.zeros_like, params)))

        def run_i(carry, m):
            slots, of_xs, sums = carry
            outputs, kept = parts.input_part(params, xs[m], cotangents[m])
            slots = [s.at[m].set(a) for s, a in zip(slots, kept, strict=True)]
            return slots, of_xs.at[m].set(outputs["x"]), sums

        def run_w(carry, m):
            slots, of_xs, sums = carry
            grads = parts.weight_part(params, [s[m] for s in slots])
            return slots, of_xs, jax.tree.map(jnp.add, sums, grads)

        def tick(carry, row):
            op, m = row
            return lax.switch(op, [lambda c, m: c, run_i, run_w], carry, m), None

        (_, of_xs, sums), _ = lax.scan(tick, carry, (ops, microbatches))
        return jax.tree.map(lambda a: a[None], (sums, of_xs))

    # At each tick of each rank: 0 nothing, 1 I, 2 W; and of which micro-batch.
    ops = jnp.asarray([[1, 1, 2, 1, 2, 2, 0], [0, 1, 1, 1, 2, 2, 2]])
    microbatches = jnp.asarray([[0, 1, 0, 2, 2, 1, 0], [0, 0, 1, 2, 1, 0, 2]])
    args = params, xs, cotangents, ops, microbatches
    with jax.set_mesh(mesh):
        rank = P("pipeline")
        run = jax.shard_map(on_rank, in_specs=(rank,) * 5, out_specs=rank, axis_names={"pipeline"})
        sums, of_xs = jit(run)(*args)

    def one(params, xs, cotangents):
        each = jax.vmap(partial(backward, params))(xs, cotangents)
        return jax.tree.map(lambda a: a.sum(axis=0), each[0]), each[1]["x"]

    expected_sums, expected_xs = jit(jax.vmap(one))(params, xs, cotangents)
    # Roundings: a program for several micro-batches at once orders and fuses differently.
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    for name, total in sums.items():
        assert relative_error(total, expected_sums[name]) < tolerance, name
    assert relative_error(of_xs, expected_xs) < tolerance


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("jit_p", "jaxpr"),
        ("remat_p", "jaxpr prevent_cse differentiated"),
        ("custom_jvp_call_p", "call_jaxpr"),
        ("custom_vjp_call_p", "call_jaxpr"),
        ("scan_p", "jaxpr length reverse unroll ft_in"),
    ],
)
def test_jax_still_says_of_an_operation_what_the_cut_reads(name, read):
    def program(x):
        x, _ = lax.scan(lambda x, _: (jax.nn.relu(x), None), product(x, x), length=2)
        return jax.checkpoint(jnp.sin)(x).sum()

    traced = jax.make_jaxpr(lambda x: (program(x), jax.grad(program)(x)))(drawn(3, 3))
    said = [e for e in operations(traced) if e.primitive is getattr(core.primitives, name)]
    assert said, f"JAX no longer writes {name} for its call: adapt {split.__name__}"
    missing = {*read.split()} - {*said[-1].params}
    assert not missing, f"{name} no longer says {missing}: adapt {split.__name__}"
    assert hasattr(said[-1].source_info, "name_stack")
