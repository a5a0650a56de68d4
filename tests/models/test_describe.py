"""A model as plain data: every array, its shape and what each dimension is."""

import jax
import numpy as np
import pytest

from jaxfound.config.params import ParamSpec
from jaxfound.models import build, describe
from jaxfound.models.build import Frame, arrays_of, dotted
from tests.models.tiny import MODELS, model_config, weights_of

VOCAB, D, F, LAYERS, HEADS = 64, 32, 48, 2, 4
VOCABULARY = {
    "layers", "leading_layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "ffn",
    "experts", "latent", None,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_array_is_described_once_with_a_name_for_each_dimension(name):
    cfg = model_config(name)
    table = describe(cfg)
    paths = [spec.path for spec in table]
    assert len(set(paths)) == len(paths)
    shapes = Frame(cfg).shapes()
    assert set(paths) == set(shapes.params) | set(shapes.buffers)
    for spec in table:
        assert len(spec.dims) == len(spec.shape), spec
        assert set(spec.dims) <= VOCABULARY, spec
        assert (spec.dims[0] == "layers") == spec.path.startswith("layers."), spec
        assert (spec.dims[0] == "leading_layers") == spec.path.startswith("leading."), spec
        assert spec.dtype == "float32", spec
        assert spec.kind == ("buffer" if spec.path in shapes.buffers else "param"), spec


def test_a_dense_model_has_the_count_worked_out_by_hand():
    cfg = model_config("gqa", tie_embeddings=False)
    one_layer = (
        2 * D  # two norms
        + D * HEADS * 8  # query
        + 2 * D * 2 * 8  # key and value, two heads
        + HEADS * 8 * D  # out
        + 3 * D * F  # gate, up, down
    )
    assert describe(cfg).size == 2 * VOCAB * D + LAYERS * one_layer + D


def test_a_tied_head_is_counted_once():
    own = describe(model_config("gqa", tie_embeddings=False)).size
    assert own - describe(model_config("gqa", tie_embeddings=True)).size == VOCAB * D


def test_a_latent_model_with_experts_has_the_count_worked_out_by_hand():
    attention = (
        D * 24 + 24  # query down and its norm
        + 24 * HEADS * (8 + 4)  # query up
        + D * 16 + 16  # latent and its norm
        + D * 4  # the key with position
        + 16 * HEADS * 8 + 16 * HEADS * 12  # key up and value up
        + HEADS * 12 * D  # out
    )  # fmt: skip
    dense = attention + 2 * D + 3 * D * F
    experts = attention + 2 * D + D * 8 + 8 * 3 * D * 16 + 3 * D * 16
    ahead = experts + 2 * D + 2 * D * D + D
    table = describe(model_config("mla_moe_mtp"))
    assert table.size == 2 * VOCAB * D + dense + experts + D + 2 * ahead
    buffers = {spec.path: spec.size for spec in table if spec.kind == "buffer"}
    assert buffers == {
        "layers.ffn.router.bias": 8,
        "mtp.0.block.ffn.router.bias": 8,
        "mtp.1.block.ffn.router.bias": 8,
    }


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_biases_are_no_matrices_though_layers_are_stacked(name):
    for spec in describe(model_config(name)):
        vector = spec.path.endswith(("scale", "bias"))
        assert spec.is_matrix != vector, spec


def test_an_experts_vector_would_be_no_matrix():
    spec = ParamSpec("x", (2, 8, 5), "float32", ("layers", "experts", "ffn"))
    assert not spec.is_matrix


def test_a_frame_binds_the_arrays_that_a_model_gives():
    frame = Frame(model_config("mla_moe_mtp"))
    arrays = weights_of(frame)
    again = arrays_of(frame.bind(*arrays))
    assert again.params.keys() == arrays.params.keys()
    for path, array in {**again.params, **again.buffers}.items():
        assert array is (arrays.params | arrays.buffers)[path]


def test_a_missing_array_is_named():
    frame = Frame(model_config("gqa"))
    params, buffers = weights_of(frame)
    del params["layers.mixer.key.kernel"]
    with pytest.raises(KeyError, match=r"layers\.mixer\.key\.kernel"):
        frame.bind(params, buffers)


def test_an_array_that_belongs_nowhere_is_named():
    frame = Frame(model_config("gqa"))
    params, buffers = weights_of(frame)
    with pytest.raises(KeyError, match=r"layers\.mixer\.keys\.kernel"):
        frame.bind({**params, "layers.mixer.keys.kernel": params["final_norm.scale"]}, buffers)


STD = 0.05


def initial(seed):
    return arrays_of(build(model_config("gqa", init_std=STD), seed=seed)).params


@pytest.fixture(scope="module")
def params():
    return initial(1)


def test_initial_weights_have_the_deviation_the_config_asks_for(params):
    for path, array in params.items():
        values = np.asarray(array)
        if path.endswith("scale"):
            assert (values == 1).all(), path
            continue
        # The last matrix of a residual branch: scaled by the number of branches.
        branches = 2 * LAYERS if path.endswith(("out.kernel", "down.kernel")) else 1
        np.testing.assert_allclose(values.std(), STD / branches**0.5, rtol=0.06, err_msg=path)
        assert abs(values.mean()) < 0.01, path


def test_layers_of_a_stack_begin_with_different_weights(params):
    kernel = np.asarray(params["layers.ffn.up.kernel"])
    assert not np.allclose(kernel[0], kernel[1])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(params):
    jax.tree.map(np.testing.assert_array_equal, params, initial(1))
    assert not np.array_equal(params["embedding.table"], initial(2)["embedding.table"])


def test_a_path_is_its_parts_joined_by_dots():
    assert dotted(("mtp", 0, "join", "kernel")) == "mtp.0.join.kernel"
