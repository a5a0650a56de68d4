"""`jaxfound bench train`: what it prints, writes, draws and refuses."""

import json
import sys

import pytest

from jaxfound.cli.main import main
from jaxfound.cli.pages.train_chart import COLOURS, write_chart
from jaxfound.config import save
from jaxfound.config.schema import ConfigError
from jaxfound.training.step_profile import PARTS
from jaxfound.training.train_record import as_record
from jaxfound.training.turns import SideError
from tests.training.test_train_record import MADE, PEER, measured, row
from tests.training.tiny import tiny


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs the command on a config of which nothing is measured: exit code and output."""
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    monkeypatch.setattr("jaxfound.cli.bench_train.is_on_accelerator", lambda: False)
    monkeypatch.setattr("jaxfound.training.measure.measure_training", lambda cfg, asked: measured())
    path = tmp_path / "tiny.yaml"
    save(tiny(tmp_path), path)

    def run(*args):
        with pytest.raises(SystemExit) as left:
            main(["bench", "train", str(path), *map(str, args)])
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err

    return run


def test_it_prints_the_formula_both_conventions_and_where_the_time_goes(command):
    code, out, err = command()
    assert code == 0, err
    assert "MFU full" in out
    assert "MFU causal" in out
    assert "FLOPs of a step: 3 x 128 tokens x" in out
    assert "MFU is against 989.4 TFLOP/s, dense bfloat16 as published" in out
    assert "a bare bfloat16 product ran at 791 TFLOP/s" in out
    assert "planned and measured" in out
    assert all(part in out for part in PARTS)
    assert "slow input" in out


def test_rows_join_under_the_names_of_their_runs(command, tmp_path):
    out = tmp_path / "train.json"
    assert command("--out", out, "--commit", "abc", "--note", "quiet")[0] == 0
    assert command("name=other", "--out", out)[0] == 0
    record = json.loads(out.read_text())
    assert list(record["rows"]) == ["tiny", "other"]
    assert record["rows"]["tiny"]["note"] == "quiet"
    assert set(record["explained"]) >= {"mfu", "ceiling", "peer", "parts"}


def test_a_record_of_another_device_is_refused(command, tmp_path):
    out = tmp_path / "train.json"
    out.write_text(json.dumps({"device": "TPU v5p"}), "utf-8")
    code, _, err = command("--out", out)
    assert code == 2
    assert "the record is of TPU v5p" in err


def test_with_a_peer_sides_run_elsewhere_and_both_are_told(command, monkeypatch):
    def sides(cfg, asked, *, turns, peer, limit_s):
        assert (turns, peer.seq_len, limit_s) == (2, 16, 9)
        yield measured()
        yield PEER
        yield SideError("out of memory")

    monkeypatch.setattr("jaxfound.training.turns.in_turns", sides)
    joined = ("train.documents=joined", "precision.compute=bfloat16")
    code, out, err = command(*joined, "--peer", "torch", "--turns", 2, "--peer-limit-s", 9)
    assert code == 0, err
    assert "jaxfound: 677.0 ms a step" in out
    assert "torch: 500.0 ms a step" in out
    assert "no peer: out of memory" in out
    assert "torch 2.11.0" in out
    assert "0.739 times the tokens/s of the peer" in out


def test_a_peer_of_another_kind_of_model_is_refused_before_anything_runs(command):
    code, _, err = command("--peer", "torch")
    assert code == 2
    assert "train.documents=apart" in err


def test_a_picture_is_of_a_record(command):
    code, _, err = command("--png", "train.png")
    assert code == 2
    assert "give both" in err


def test_the_picture_is_drawn_of_rows_with_and_without_peer_parts_and_ceiling(tmp_path):
    pytest.importorskip("matplotlib")
    bare = row("dense-2.7b", ours=(measured(with_parts=False),), peer=())
    record = as_record(as_record({}, row(), **MADE), bare, **MADE)
    record["rows"]["dense-2.7b"]["ceiling_flops"] = None
    write_chart(record, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes()[:4] == b"\x89PNG"
    assert set(COLOURS) == set(PARTS)


def test_without_matplotlib_the_picture_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"jaxfound\[plots\]"):
        write_chart(as_record({}, row(), **MADE), tmp_path / "train.png")
