"""Rules that name layers: each segment computes in its own formats, and nothing else changes."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.layer_formats import check_precision, segments_alike, stacks_of
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.schema import ConfigError
from jaxfound.models import Execution, describe, segments
from jaxfound.models.build import Frame
from jaxfound.models.cache import empty_cache
from jaxfound.models.pages import empty_pages, page_shapes, paged_view
from jaxfound.models.served import serving_arrays
from pallas_kernels.formats import Quantized
from tests.models.tiny import (
    extend,
    forward,
    jit,
    model_config,
    relative_error,
    run_config,
    tokens_of,
    weights_of,
)

# float32 roundings of sums that the compiler orders differently: about 1e-7 an operation.
ROUNDING = 3e-6
LAYERS, ROWS, LENGTH = 3, 2, 8


def precision(*rules, compute="float32"):
    made = [PrecisionRule(pattern=pattern, format=format) for pattern, format in rules]
    return PrecisionConfig(compute=compute, rules=tuple(made))


def in_policy(policy):
    return Execution(precision=policy)


# Names layers and changes no format.
NEVER = precision(("layers.1.*", "float32"))
POLICY = precision(("layers.1.*", "fp8"), ("layers.2.mixer.*", "bfloat16"))


@pytest.fixture(scope="module")
def mixed():
    """A model whose three layers have formats of their own, and its weights."""
    frame = Frame(model_config("gqa", num_layers=LAYERS), execution=in_policy(POLICY))
    return frame, weights_of(frame)


@cache
def results(policy):
    """Logits and gradients of a model under a policy."""
    return results_of(Frame(model_config("gqa", num_layers=LAYERS), execution=in_policy(policy)))


def results_of(frame):
    params, buffers = weights_of(frame)
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))

    @jit
    def of(params):
        def objective(params):
            logits = frame.bind(params, buffers)(tokens)[..., :61]
            return jnp.sin(logits).mean(), logits

        grads, logits = jax.grad(objective, has_aux=True)(params)
        return logits, grads

    return of(params)


def worst(found, expected):
    logits = relative_error(found[0], expected[0])
    return max(logits, *(relative_error(found[1][p], g) for p, g in expected[1].items()))


def same_bits(found, expected):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


def test_numbers_after_the_stack_name_layers_of_the_model():
    policy = precision(("layers.4-7.ffn.*", "fp8"), ("layers.5.mixer.out", "bfloat16"))
    formats = [policy.format_of("layers.ffn.down", n) for n in (3, 4, 7, 8, None)]
    assert formats == ["float32", "fp8", "fp8", "float32", "float32"]
    assert [policy.format_of("layers.mixer.out", n) for n in (4, 5)] == ["float32", "bfloat16"]
    assert policy.format_of("leading.ffn.down", 4) == "float32"


def test_segments_are_the_longest_runs_of_layers_with_the_same_formats():
    policy = precision(("layers.2.ffn.up", "fp8"), ("layers.3-4.*", "bfloat16"))
    operations = ("layers.mixer.out", "layers.ffn.up")
    assert segments_alike(policy, operations, range(7)) == [
        range(2),
        range(2, 3),
        range(3, 5),
        range(5, 7),
    ]
    # Layers whose formats are the same are one segment, whatever rule says so.
    same = precision(("layers.0.*", "fp8"), ("layers.1-6.*", "fp8"))
    assert segments_alike(same, operations, range(7)) == [range(7)]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (["layers.0-5.mixer.*"], r"`layers` of this model is layers 1-4.* 0 and 5 are not there"),
        (["layers.5.ffn.shared.up"], "5 is not there"),
        (["layers.4-2.mixer.*"], r"write layers\.2-4"),
        (["layers.1-2.mixr.*"], "matches no operation of this model"),
        (["layers.1-2"], "matches no operation of this model"),
        (["leading.1.mixer.*"], "`leading` of this model is layers 0,"),
        (["layers.1.mixer.*", "layers.3.mixer.*"], None),
    ],
)
def test_rules_for_layers_that_are_not_there_are_refused(rules, told):
    table = describe(model_config("mla_moe_yarn", num_layers=5))
    policy = precision(*((rule, "fp8") for rule in rules))
    if told is None:
        check_precision(policy, table)
        return
    with pytest.raises(ConfigError, match=told):
        check_precision(policy, table)


def test_more_than_four_segments_are_refused_with_what_they_are():
    table = describe(model_config("gqa", num_layers=6))
    check_precision(
        precision(("layers.1.*", "fp8"), ("layers.3.*", "fp8")),
        describe(model_config("gqa", num_layers=4)),
    )
    with pytest.raises(ConfigError, match=r"5 segments of `layers` \(0, 1, 2, 3, 4-5\)"):
        check_precision(precision(("layers.1.*", "fp8"), ("layers.3.*", "fp8")), table)


def test_rules_for_layers_are_refused_in_a_pipeline():
    model = model_config("gqa", num_layers=4)
    rules = [{"pattern": "layers.0-1.*", "format": "fp8"}]
    parallel = {"pipeline": 2, "num_microbatches": 2}
    sections = {"parallel": parallel, "precision": {"rules": rules}}
    with pytest.raises(ValueError, match=r"'layers.0-1.\*' names layers by number, .*pipeline=2"):
        run_config(model, **sections)


def test_a_rule_of_all_layers_by_number_is_the_rule_without_numbers():
    numbered = results(precision((f"layers.0-{LAYERS - 1}.ffn.*", "bfloat16")))
    assert same_bits(numbered, results(precision(("layers.ffn.*", "bfloat16"))))
    assert worst(numbered, results(precision())) > 1e-3


def test_three_segments_in_one_format_give_what_one_scan_gives(monkeypatch):
    monkeypatch.setattr(segments, "segments_alike", in_single_layers)
    cut = results_of(Frame(model_config("gqa", num_layers=LAYERS), execution=in_policy(NEVER)))
    assert worst(cut, results(precision())) <= ROUNDING


def test_the_expert_loads_of_all_segments_are_one_stack():
    def loads(policy):
        frame = Frame(model_config("mla_moe_yarn", num_layers=4), execution=in_policy(policy))

        def of(params, buffers, tokens):
            model = frame.bind(params, buffers)
            return model.hidden(tokens, model.row(tokens, None, None)).load

        return jax.eval_shape(of, *frame.shapes(), jax.ShapeDtypeStruct((2, 8), jnp.int32))

    whole = loads(precision())
    assert whole.expert_counts.shape == (3, 8)
    assert loads(precision(("layers.2.*", "fp8"))) == whole


# One dense layer and two with experts.
EXPERTS = model_config("mla_moe_yarn", num_layers=3)


@cache
def with_experts(policy):
    return results_of(Frame(EXPERTS, execution=in_policy(policy)))


@pytest.mark.parametrize(
    "format",
    [
        "fp8",
        *(pytest.param(other, marks=pytest.mark.slow) for other in ("fp8_weights", "bfloat16")),
    ],
)
def test_experts_take_their_formats_by_layer(format):
    everywhere, first = (("layers.ffn.experts", format), ("layers.1.ffn.*", format))
    check_precision(precision(everywhere, first), describe(EXPERTS))
    plain, all_of_them, one = (
        with_experts(precision(*rules))
        for rules in ((), (everywhere,), (("layers.1.ffn.experts", format),))
    )
    assert 1e-4 < worst(one, plain) < 1
    assert worst(one, all_of_them) > 1e-4


def test_served_experts_of_each_layer_are_kept_in_its_format():
    model = model_config("mla_moe_yarn", num_layers=3)
    policy = precision(("layers.2.ffn.experts", "fp8_weights"))
    frame = Frame(model, execution=in_policy(policy))
    kept = serving_arrays(frame, weights_of(frame)).params["layers.ffn.experts.up"]
    assert [isinstance(layer, Quantized) for layer in kept] == [False, True]
    assert kept[1].shape == (8, model.moe.expert_dim, model.embed_dim)


def in_single_layers(policy, operations, layers):
    return [range(n, n + 1) for n in layers]


def test_each_layer_computes_in_the_formats_of_its_number(mixed):
    frame, arrays = mixed
    operations = [path for stack in stacks_of(describe(frame.cfg)) for path in stack.operations]
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))

    @jit
    def one_by_one(arrays):
        model = frame.bind(*arrays)
        row = model.row(tokens, None, None)
        x = model.entering(tokens, row)
        for n in range(frame.cfg.num_layers):
            own = precision(*((path, POLICY.format_of(path, n)) for path in operations))
            alone = Frame(frame.cfg, execution=in_policy(own)).bind(*arrays).layers
            x, _ = jax.tree.map(lambda a, n=n: a[n], alone)(x, row)
        return model.logits(model.final_norm(x))

    found = forward(frame.bind(*arrays), tokens)
    assert relative_error(found[..., :61], one_by_one(arrays)[..., :61]) <= ROUNDING
    plain = Frame(frame.cfg).bind(*arrays)
    assert relative_error(found[..., :61], forward(plain, tokens)[..., :61]) > 1e-3


def test_caches_and_pages_compute_each_layer_in_its_own_formats(mixed):
    frame, arrays = mixed
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))
    whole = forward(frame.bind(*arrays), tokens)[..., :61]
    cache = empty_cache(frame.cfg, batch=ROWS, num_slots=LENGTH, dtype=jnp.float32)
    places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    cached, _ = extend(frame.bind(*arrays), tokens, cache, places)
    assert relative_error(cached[..., :61], whole) <= ROUNDING
    kept = serving_arrays(frame, arrays)
    for weights in (arrays, kept):
        paged = on_pages(frame.bind(*weights), tokens)
        assert relative_error(paged[..., :61], whole) <= ROUNDING
    in_8_bit = [isinstance(a, Quantized) for a in kept.params["layers.ffn.down.kernel"]]
    assert in_8_bit == [False, True, False]


@jit
def on_pages(model, tokens):
    shapes = page_shapes(model.cfg, num_pages=2 * ROWS, page_size=LENGTH, dtype=jnp.float32)
    zeros, whole = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, LENGTH)
    view = paged_view(
        zeros,
        whole,
        jnp.arange(ROWS)[:, None],
        num_tokens=LENGTH,
        page_size=LENGTH,
        num_pages=2 * ROWS,
        decoding=False,
    )
    return model.logits(model.extend_pages(tokens, empty_pages(shapes), view)[0])
