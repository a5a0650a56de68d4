"""`jaxfound bench decode`: the table, the record, what is refused."""

import json

import pytest

from jaxfound.cli.main import main
from jaxfound.config.presets import PRESETS

YAML = """\
preset: tiny-mla-moe
name: small
precision: {compute: float32}
model: {num_layers: 2, num_dense_layers: 1, embed_dim: 32, ffn_dim: 48, mtp_depth: 0}
train: {steps: 1, batch_size: 1, seq_len: 8}
serve: {page_size: 8}
"""
LAYERS, CONTEXT, STEPS, FLOAT32 = 2, 32, 4, 4


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """Runs the command on a small model: what is printed and the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    config = tmp_path / "small.yaml"
    config.write_text(YAML, "utf-8")
    sizes = ("--context", CONTEXT, "--steps", STEPS, "--rounds", 2, "--commit", "1234567")

    def call(*args):
        with pytest.raises(SystemExit) as left:
            main(["bench", "decode", str(config), *map(str, (*sizes, *args))])
        return "".join(capsys.readouterr()), left.value.code or 0

    return call


def test_a_call_is_added_to_the_record_of_its_device(bench, tmp_path):
    out = tmp_path / "new" / "decode.json"
    text, code = bench("--rows", "1,3", "--head-rows", "3", "--out", out)
    assert code == 0
    assert "pages, 3 rows" in text
    record = json.loads(out.read_text("utf-8"))
    (call,) = record["calls"]
    assert (record["format_version"], call["commit"], call["model"]) == (1, "1234567", "small")
    points = {(p["cache"], p["rows"]): p for p in call["points"]}
    assert set(points) == {("pages", 1), ("pages", 3), ("heads", 3)}
    for point in points.values():
        assert len(point["median_step_s_by_round"]) == 2
        assert point["least_step_s"] <= point["token_s"] <= point["largest_step_s"]
        assert point["share_of_floor"] == point["floor_s"] / point["token_s"]
    model = PRESETS["tiny-mla-moe"]
    mla = model["mla"]
    read = 3 * (CONTEXT - STEPS // 2) * LAYERS * FLOAT32
    latent = mla["kv_lora_rank"] + mla["qk_rope_head_dim"]
    assert points["pages", 3]["cache_bytes_read"] == read * latent
    channels = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"] + mla["v_head_dim"]
    assert points["heads", 3]["cache_bytes_read"] == read * model["num_heads"] * channels

    record["calls"][0]["device"] = "another"
    out.write_text(json.dumps(record), "utf-8")
    text, code = bench("--rows", "1", "--out", out)
    assert code != 0
    assert "holds measurements of another" in " ".join(text.split())


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--rows", "1,many"], "rows are numbers with commas between"),
        (["--rows", "0"], "rows must be at least 1"),
        (["--rows", "1", "--context", "10"], "Use a longer context or fewer steps"),
    ],
)
def test_a_load_that_cannot_be_is_refused(bench, args, told):
    text, code = bench(*args)
    assert code != 0
    assert told in " ".join(text.split())
