"""Weights go out as they came in: the same names, formats and bytes (cases S02, S06, S07, S09)."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.weights import (
    WeightsError,
    export_hub,
    load_weights,
    open_hub,
    origin_of,
    reformat_hub,
)
from jaxfound.models.weights.fp8 import quantize
from jaxfound.models.weights.writer import Planned, split
from tests.models.published import (
    load_published,
    published,
    read_config,
    read_folder,
    tensor,
    with_mtp,
    with_redundant_head,
    write_folder,
)
from tests.models.tiny import (
    MODELS,
    forward,
    jit,
    model_config,
    weights_of,
)

SOURCES = {
    "deepseek": lambda: published("S02/ds_default"),
    "deepseek with mtp": with_mtp,
    "deepseek in two shards": lambda: published("S02/ds_no_qlora"),
    "deepseek in fp8": lambda: published("S06/ds_fp8"),
    "deepseek tied": lambda: published("S07/ds_tied"),
    "deepseek-v2 in bfloat16": lambda: published("transformers/deepseek_v2"),
    "llama": lambda: published("S09/llama_headdim24"),
    "llama tied": lambda: published("S07/llama_tied"),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_every_array_goes_out_with_its_name_format_and_bytes(tmp_path, monkeypatch, source):
    """In one stretch of rows after another, some of an array of several."""
    monkeypatch.setattr("jaxfound.models.weights.export.STRETCH", 3000)
    hub = open_hub(source())
    origin = origin_of(hub.folder)
    out = tmp_path / "out"
    export_hub(out, hub.model, load_weights(hub), origin=origin, max_shard_bytes=300_000)
    before, after = read_folder(source()), read_folder(out)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == []
    again = open_hub(out)
    assert again.model == hub.model
    assert again.config.dtype == hub.config.dtype
    assert again.config.fp8_block == hub.config.fp8_block


def test_shards_have_an_index_that_describes_them(tmp_path):
    hub = open_hub(published("S02/ds_default"))
    export_hub(tmp_path / "out", hub.model, load_weights(hub), max_shard_bytes=300_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = read_folder(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(t.raw) for t in tensors.values())


def test_files_are_filled_in_order_and_a_large_array_has_its_own():
    sizes = {"a": 40, "b": 60, "c": 300, "d": 10, "e": 10}
    planned = [Planned(name, "I8", (size,)) for name, size in sizes.items()]
    names = [[p.name for p in shard] for shard in split(planned, max_shard_bytes=100)]
    assert names == [["a", "b"], ["c"], ["d", "e"]]


def test_a_tied_head_is_written_once_and_the_flag_stays(tmp_path):
    """Case S07: with a redundant head in the file too."""
    hub = open_hub(with_redundant_head())
    export_hub(tmp_path / "out", hub.model, load_weights(hub), origin=origin_of(hub.folder))
    assert "lm_head.weight" not in read_folder(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert open_hub(tmp_path / "out").model == hub.model


def test_after_a_step_a_tied_models_head_is_still_its_embedding(tmp_path):
    """Case S07: one table takes the gradients of both uses, and goes out once."""
    hub = open_hub(published("S07/llama_tied"))
    frame, (params, buffers) = Frame(hub.model), load_weights(hub)
    tokens = jnp.asarray([[7, 2, 250, 31, 9]], jnp.int32)
    loss = lambda params: -jax.nn.log_softmax(frame.bind(params, buffers)(tokens))[..., 3].sum()
    moved = jax.tree.map(lambda p, g: p - 0.01 * g, params, jit(jax.grad(loss))(params))
    table = np.asarray(moved["embedding.table"])
    model = frame.bind(moved, buffers)
    np.testing.assert_array_equal(model.head.matrix(model.embedding), table.T)
    # As a head it moves for every id, as an embedding only for those that were read.
    assert (table != np.asarray(params["embedding.table"])).any(axis=1).all()
    export_hub(tmp_path / "out", hub.model, Arrays(moved, buffers), origin=origin_of(hub.folder))
    written = read_folder(tmp_path / "out")
    np.testing.assert_array_equal(written["model.embed_tokens.weight"].array, table)
    assert "lm_head.weight" not in written


@pytest.mark.parametrize("removed", ["rope_parameters", "rope_theta"])
def test_logits_are_the_same_for_a_reader_of_one_spelling(tmp_path, removed):
    """Case S09: theta 500000 must not fall back to 10000."""
    hub = open_hub(published("S09/llama_headdim24"))
    export_hub(tmp_path / "out", hub.model, load_weights(hub))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    del config[removed]
    path.write_text(json.dumps(config))
    tokens = jnp.asarray([[7, 2, 250, 31, 9]], jnp.int32)
    before = forward(load_published(published("S09/llama_headdim24")), tokens)
    np.testing.assert_array_equal(forward(load_published(tmp_path / "out"), tokens), before)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trained_here_comes_back_bit_by_bit(tmp_path, name):
    """No published origin: every array is float32, the vocabulary's padding stays here."""
    model = model_config(name)
    arrays = weights_of(Frame(model))
    export_hub(tmp_path / "out", model, arrays)
    assert open_hub(tmp_path / "out").folder.tensors["model.embed_tokens.weight"].shape == (61, 32)
    back = load_weights(tmp_path / "out", model)
    table = describe(model)
    for before, after in zip(arrays, back, strict=True):
        assert after.keys() == before.keys()
        for path, array in before.items():
            real = tuple(
                slice(0, model.vocab_size) if dim == "vocab" else slice(None)
                for dim in table[path].dims
            )
            np.testing.assert_array_equal(
                np.asarray(after[path])[real], np.asarray(array)[real], err_msg=path
            )


def test_formats_are_chosen_and_the_routers_bias_stays_float32(tmp_path):
    hub = open_hub(published("S02/ds_default"))
    export_hub(tmp_path / "out", hub.model, load_weights(hub), dtype="bfloat16")
    before, after = read_folder(published("S02/ds_default")), read_folder(tmp_path / "out")
    for name, one in after.items():
        bias = name.endswith("e_score_correction_bias")
        assert one.dtype == ("F32" if bias else "BF16")
        rounded = before[name].array.astype(one.array.dtype)
        np.testing.assert_array_equal(one.array, rounded, err_msg=name)
    assert open_hub(tmp_path / "out").config.dtype == "bfloat16"


def test_fp8_can_be_written_and_is_within_the_formats_rounding(tmp_path):
    hub = open_hub(published("S02/ds_default"))
    arrays = load_weights(hub)
    export_hub(tmp_path / "out", hub.model, arrays, dtype="fp8")
    written = read_folder(tmp_path / "out")
    fp8 = {name for name, tensor in written.items() if tensor.dtype == "F8_E4M3"}
    assert {f"{name}_scale_inv" for name in fp8} == {n for n in written if n.endswith("_scale_inv")}
    assert "model.layers.0.mlp.down_proj.weight" in fp8
    assert not any("embed" in n or "norm" in n or ".gate.weight" in n for n in fp8)
    back = load_weights(tmp_path / "out")
    for path, array in {p: np.asarray(a) for p, a in arrays.params.items()}.items():
        error = np.abs(np.asarray(back.params[path]) - array).max()
        # Half of the last of three mantissa bits, of numbers up to the largest.
        assert error <= np.abs(array).max() / 16, path


def test_blocks_that_nobody_changed_keep_their_scale_and_others_get_their_own():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 100, (200, 150)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(1e-4, 1e-2, (2, 2)).astype(np.float32)
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:200, :150]
    w = values.astype(np.float32) * spread
    kept = quantize(w, block=(128, 128), earlier=scale)
    np.testing.assert_array_equal(kept.values.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(kept.scale, scale)
    changed = w.copy()
    changed[150, 140] *= 40
    other = quantize(changed, block=(128, 128), earlier=scale)
    same = other.scale == scale
    assert same.tolist() == [[True, True], [True, False]]
    assert np.isfinite(other.values.astype(np.float32)).all()
    assert float(other.values[150, 140]) == np.sign(w[150, 140]) * 448


def test_a_block_of_zeros_or_of_the_smallest_numbers_gives_finite_scales():
    w = np.zeros((130, 3), np.float32)
    w[129] = 1e-45
    found = quantize(w, block=(128, 128))
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    assert not found.values.astype(np.float32).any()


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        *(("deepseek in fp8", dtype) for dtype in ("stored", "float32", "bfloat16")),
        *(("deepseek with mtp", dtype) for dtype in ("stored", "fp8")),
    ],
)
def test_published_to_published_is_what_goes_through_a_model(tmp_path, monkeypatch, source, dtype):
    """In stretches of one row of fp8 blocks, or of a few rows."""
    monkeypatch.setattr("jaxfound.models.weights.reformat.STRETCH", 3000)
    hub = open_hub(SOURCES[source]())
    origin = origin_of(hub.folder)
    export_hub(tmp_path / "through", hub.model, load_weights(hub), dtype=dtype, origin=origin)
    reformat_hub(hub, tmp_path / "out", dtype=dtype)
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "through")
    config = (tmp_path / "out" / "config.json").read_text()
    assert config == (tmp_path / "through" / "config.json").read_text()


WAYS_OUT = {
    "directly": lambda hub, out: reformat_hub(hub, out, dtype="float16"),
    "through a model": lambda hub, out: export_hub(
        out, hub.model, load_weights(hub), dtype="float16"
    ),
}


@pytest.mark.parametrize("way_out", WAYS_OUT.values(), ids=list(WAYS_OUT))
def test_a_number_too_large_for_a_format_is_refused_by_name(tmp_path, way_out):
    tensors = read_folder(published("S09/llama_base"))
    name = "model.layers.1.mlp.up_proj.weight"
    large = tensors[name].array.copy()
    large[2, 3], large[4, 5] = -1e5, 7e4
    tensors[name] = tensor(large)
    hub = open_hub(write_folder(tmp_path / "large", read_config("S09/llama_base"), tensors))
    with pytest.raises(WeightsError, match=rf"{name}: 2 of its elements.*F16, up to 100000"):
        way_out(hub, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["large"]


def test_a_folder_that_is_there_is_not_touched(tmp_path):
    hub = open_hub(published("S07/llama_tied"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(WeightsError, match="mine is there already"):
        export_hub(tmp_path / "mine", hub.model, load_weights(hub))
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    hub = open_hub(published("S07/llama_tied"))
    arrays = load_weights(hub).params

    def broken(path):
        if path == "layers.ffn.up.kernel":
            raise OSError("the disk is gone")
        return np.asarray(arrays[path])

    with pytest.raises(OSError, match="the disk is gone"):
        export_hub(tmp_path / "out", hub.model, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_bias_that_the_published_router_has_not_is_refused(tmp_path):
    hub = open_hub(published("transformers/deepseek_v2"))
    params, buffers = load_weights(hub)
    learned = Arrays(params, {path: bias + 0.5 for path, bias in buffers.items()})
    with pytest.raises(WeightsError, match=r"layers\.ffn\.router\.bias is not zero"):
        export_hub(tmp_path / "out", hub.model, learned)
    assert list(tmp_path.iterdir()) == []
