"""Published weights come in whole: every array is used, repeated, reported or refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.models import Execution
from jaxfound.models.weights import WeightsError, load_weights, open_hub
from jaxfound.models.weights.load import Reader
from tests.models.published import (
    DATA,
    published,
    read_config,
    read_folder,
    tensor,
    with_mtp,
    with_redundant_head,
    write_folder,
)

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def llama(tmp_path):
    """A config and arrays to spoil, and a folder to write them into."""
    tensors = read_folder(published("S09/llama_base"))
    return read_config("S09/llama_base"), tensors, tmp_path / "spoilt"


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(a), np.asarray(other[path])) for path, a in one.items()
    )


def test_fp8_blocks_are_scaled_element_by_element_also_where_they_are_cut():
    """Case S06: element (i, j) times scale[i // 128, j // 128], in a model of 192 channels."""
    hub = open_hub(published("S06/ds_fp8"))
    arrays = load_weights(hub).params
    expected = np.load(DATA / "S06" / "ds_fp8" / "dequant_samples.npz")
    ours = {
        "model.layers.0.mlp.gate_proj.weight": arrays["leading.ffn.gate.kernel"][0].T,
        "model.layers.0.self_attn.q_b_proj.weight": arrays["leading.mixer.query_up.kernel"][0]
        .reshape(72, 128)
        .T,
        "model.layers.1.mlp.experts.3.down_proj.weight": arrays["layers.ffn.experts.down"][0, 3].T,
    }
    assert ours.keys() == set(expected.files)
    for name, found in ours.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=0, err_msg=name)


def test_both_spellings_of_rope_give_the_same_model():
    """Case S09: rope_theta, or rope_parameters."""
    old, new = (open_hub(published(f"S09/llama_headdim24{n}", "S09/llama_headdim24"))
                for n in ("", "_newcfg"))  # fmt: skip
    assert new.model == old.model
    assert new.model.rope.theta == 500_000
    assert new.model.gqa.head_dim == 24


def test_a_head_that_repeats_the_embedding_is_taken_and_told():
    """Case S07: the flag says tied, and the file has the head as well."""
    hub = open_hub(with_redundant_head())
    assert any(line.startswith(f"{HEAD} repeats {TABLE}") for line in hub.report())
    arrays = load_weights(hub)
    assert "head.kernel" not in arrays.params
    assert same(arrays.params, load_weights(published("S07/llama_tied")).params)


def test_a_tied_head_with_other_numbers_is_refused(tmp_path):
    tensors = read_folder(with_redundant_head())
    tensors[HEAD] = tensor(tensors[HEAD].array + 1)
    folder = write_folder(tmp_path / "other", read_config("S07/llama_tied"), tensors)
    with pytest.raises(WeightsError, match=rf"{HEAD} is not equal to {TABLE}.*tie_word_embedd"):
        load_weights(folder)


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    """Case S07: nothing is filled with random numbers."""
    config = read_config("S07/llama_tied") | {"tie_word_embeddings": False}
    folder = write_folder(tmp_path / "lost", config, read_folder(published("S07/llama_tied")))
    with pytest.raises(WeightsError, match=rf"missing \(1\): {HEAD}[\s\S]*tie_word_embeddings"):
        open_hub(folder)


def test_the_next_token_prediction_layer_goes_into_its_module():
    """Case S02: eh_proj, enorm, hnorm, shared_head; the main model is untouched."""
    hub = open_hub(with_mtp())
    assert hub.model.mtp_depth == 1
    params, buffers = load_weights(hub)
    tensors = read_folder(with_mtp())
    layer = "model.layers.3."
    pairs = {
        "mtp.0.embed_norm.scale": tensors[f"{layer}enorm.weight"].array,
        "mtp.0.hidden_norm.scale": tensors[f"{layer}hnorm.weight"].array,
        "mtp.0.join.kernel": tensors[f"{layer}eh_proj.weight"].array.T,
        "mtp.0.final_norm.scale": tensors[f"{layer}shared_head.norm.weight"].array,
        "mtp.0.block.ffn.shared.down.kernel": tensors[
            f"{layer}mlp.shared_experts.down_proj.weight"
        ].array.T,
    }
    for path, expected in pairs.items():
        np.testing.assert_array_equal(params[path], expected, err_msg=path)
    bias = tensors[f"{layer}mlp.gate.e_score_correction_bias"].array
    np.testing.assert_array_equal(buffers["mtp.0.block.ffn.router.bias"], bias)
    main = load_weights(published("S02/ds_default"))
    assert same({p: a for p, a in params.items() if p in main.params}, main.params)
    assert same({p: a for p, a in buffers.items() if p in main.buffers}, main.buffers)


def test_a_next_token_prediction_layer_that_is_left_out_is_told_array_by_array():
    hub = open_hub(with_mtp(), mtp="drop")
    told = [line for line in hub.report() if "multi-token prediction" in line]
    left = [name for name in read_folder(with_mtp()) if name.startswith("model.layers.3.")]
    assert len(told) == len(left) > 0
    assert same(load_weights(hub).params, load_weights(published("S02/ds_default")).params)


def test_a_next_token_prediction_layer_with_an_embedding_of_its_own_is_refused(tmp_path):
    tensors = read_folder(with_mtp())
    name = "model.layers.3.embed_tokens.weight"
    tensors[name] = tensor(tensors[name].array * 2)
    folder = write_folder(tmp_path / "own", read_config("S02/ds_mtp_extra"), tensors)
    with pytest.raises(WeightsError, match=rf"{name} is not equal to {TABLE}.*mtp=drop"):
        load_weights(folder)


def test_a_config_that_promises_a_layer_the_file_has_not_is_refused(tmp_path):
    config = read_config("S02/ds_default") | {"num_nextn_predict_layers": 1}
    folder = write_folder(tmp_path / "promised", config, read_folder(published("S02/ds_default")))
    with pytest.raises(WeightsError, match=r"model\.layers\.3\.eh_proj\.weight[\s\S]*mtp=drop"):
        open_hub(folder)
    assert load_weights(open_hub(folder, mtp="drop")).params


def test_a_missing_array_is_refused_with_the_nearest_name(llama):
    config, tensors, folder = llama
    tensors["model.layers.1.self_attn.q.weight"] = tensors.pop(QUERY)
    write_folder(folder, config, tensors)
    with pytest.raises(WeightsError, match=rf"{QUERY} \(there is .*layers\.1\.self_attn\.q\.weig"):
        open_hub(folder)


def test_a_wrong_shape_is_refused_with_both_shapes_and_a_transpose_is_called_one(llama):
    config, tensors, folder = llama
    key, value = (QUERY.replace("q_proj", f"{name}_proj") for name in "kv")
    tensors[key] = tensor(np.ascontiguousarray(tensors[key].array.T))
    tensors[value] = tensor(tensors[value].array[:-1])
    write_folder(folder, config, tensors)
    with pytest.raises(WeightsError) as refused:
        open_hub(folder)
    assert f"{key} has shape [64, 32], which is the transpose; the config asks for [32, 64]" in str(
        refused.value
    )
    assert f"{value} has shape [31, 64]; the config asks for [32, 64]" in str(refused.value)


@pytest.mark.parametrize("name", ["S09/llama_base", "S02/ds_default"])
def test_layers_beyond_the_configs_are_refused_unless_they_predict_further_tokens(tmp_path, name):
    """A model cut short would load, and be wrong."""
    config, tensors = read_config(name), read_folder(published(name))
    config["num_hidden_layers"] -= 1
    folder = write_folder(tmp_path / "short", config, tensors)
    last = f"model.layers.{config['num_hidden_layers']}.input_layernorm.weight"
    with pytest.raises(WeightsError, match=rf"not part of this model .*{last}"):
        open_hub(folder)


def test_a_config_of_another_model_is_told_in_a_few_lines(tmp_path):
    config = read_config("S02/ds_default") | {"moe_intermediate_size": 40}
    folder = write_folder(tmp_path / "other", config, read_folder(published("S02/ds_default")))
    with pytest.raises(WeightsError, match=r"has shape .*; the config asks for") as refused:
        open_hub(folder)
    assert len(str(refused.value).splitlines()) == 10
    assert str(refused.value).endswith("more like these")


def test_an_array_that_is_not_known_is_refused_or_told(llama):
    config, tensors, folder = llama
    name = QUERY.replace("weight", "bias")
    tensors[name] = tensor(np.zeros(64, np.float32))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensor(np.ones(8, np.float32))
    write_folder(folder, config, tensors)
    with pytest.raises(WeightsError, match=rf"not part of this model \(1\): {name}"):
        open_hub(folder)
    told = open_hub(folder, allow_unused=True).report()
    assert f"{name} is not used: not part of this model" in told
    assert any("inv_freq is not used: the frequencies follow" in line for line in told)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_names_and_counts(llama, bad):
    config, tensors, folder = llama
    broken = tensors[QUERY].array.copy()
    broken[3, :5] = bad
    tensors[QUERY] = tensor(broken)
    norm = tensors["model.norm.weight"].array.copy()
    norm[0] = bad
    tensors["model.norm.weight"] = tensor(norm)
    write_folder(folder, config, tensors)
    with pytest.raises(WeightsError) as refused:
        load_weights(folder)
    assert "in 2 arrays" in str(refused.value)
    assert f"{QUERY}: 5 of its elements" in str(refused.value)
    assert "model.norm.weight: 1 of its elements" in str(refused.value)
    taken = load_weights(folder, allow_nan=True).params["layers.mixer.query.kernel"]
    np.testing.assert_array_equal(taken[1].reshape(64, 64).T, broken)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("no scale", "there is no"),
        ("scale of another block", r"blocks of \[128, 128\]"),
        ("no block", "no quantization_config"),
        ("integers", "format I64"),
    ],
)
def test_fp8_whose_scales_are_not_sure_is_refused(tmp_path, spoil, named):
    config, tensors = read_config("S06/ds_fp8"), read_folder(published("S06/ds_fp8"))
    name = "model.layers.0.mlp.gate_proj.weight"
    if spoil == "no scale":
        del tensors[f"{name}_scale_inv"]
    elif spoil == "scale of another block":
        tensors[f"{name}_scale_inv"] = tensor(np.ones((2, 3), np.float32))
    elif spoil == "no block":
        del config["quantization_config"]
    else:
        tensors[name] = tensor(np.ones((160, 192), np.int64))
    folder = write_folder(tmp_path / "fp8", config, tensors)
    with pytest.raises(WeightsError, match=named) as refused:
        open_hub(folder)
    assert name in str(refused.value)


def test_the_bias_of_a_softmax_router_is_zero_and_not_drawn():
    buffers = load_weights(published("transformers/deepseek_v2")).buffers
    assert buffers
    assert not any(np.asarray(bias).any() for bias in buffers.values())


def test_rows_that_pad_the_vocabulary_are_zero():
    hub = open_hub(published("S09/llama_base"))
    wider = hub.model.model_copy(update={"vocab_multiple": 96})
    params = load_weights(published("S09/llama_base"), wider).params
    exact = load_weights(hub).params
    assert params["embedding.table"].shape == (288, 64)
    assert params["head.kernel"].shape == (64, 288)
    for found, right in (
        (params["embedding.table"], exact["embedding.table"]),
        (params["head.kernel"].T, exact["head.kernel"].T),
    ):
        np.testing.assert_array_equal(found[:256], right)
        assert not np.asarray(found[256:]).any()


def test_parameters_come_in_bfloat16_when_asked_and_the_routers_bias_stays_float32():
    arrays = load_weights(published("S02/ds_default"), dtype="bfloat16")
    full = load_weights(published("S02/ds_default"))
    assert {a.dtype for a in arrays.params.values()} == {jnp.dtype("bfloat16")}
    assert same(arrays.buffers, full.buffers)
    path = "layers.ffn.experts.up"
    np.testing.assert_array_equal(arrays.params[path], full.params[path].astype(jnp.bfloat16))


def test_only_the_rows_of_a_shard_are_read(monkeypatch):
    """Tensor parallelism splits rows of the published matrices; their other rows stay on disk."""
    hub = open_hub(published("S02/ds_default"))
    read = []
    original = type(hub.folder.tensors[TABLE]).read

    def counted(stored, start=0, stop=None):
        found = original(stored, start, stop)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(type(hub.folder.tensors[TABLE]), "read", counted)
    part = (slice(0, 2), slice(0, 8), slice(0, 64), slice(8, 16))
    found = Reader(hub).piece("layers.ffn.experts.gate", part, np.dtype(np.float32))
    assert sum(read) == found.nbytes == 2 * 8 * 64 * 8 * 4
    whole = load_weights(hub).params["layers.ffn.experts.gate"]
    np.testing.assert_array_equal(found, whole[part])
    assert Execution().rules.param_spec(("experts", "embed", "ffn"))[2] == "tensor"
