"""Each side has the device to itself, in turns; a peer that cannot do the work says so."""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxfound.config import RunConfig
from jaxfound.config.load import load
from jaxfound.training import turns
from jaxfound.training.events import TrainingError
from jaxfound.training.measure import Asked, Measured
from jaxfound.training.torch_peer import NO_TORCH, PeerModel, PeerTimes
from jaxfound.training.turns import (
    OURS,
    PEER,
    SideError,
    in_turns,
    peer_model,
    question,
    run_side,
    timed_peer,
)
from tests.training.test_train_record import measured

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DENSE = CONFIGS / "dense-1.3b.yaml"
ASKED = Asked(steps=3, rounds=2, loop_rounds=1, profiled=2, ceiling=True)
TINY = PeerModel(
    embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32, vocab_size=64,
    ties_embeddings=True, batch_size=2, seq_len=8, rounds=2, steps_per_round=2,
)  # fmt: skip
TIMES = {"torch": "2", "parameters": 1, "compile_s": 1.0, "step_s": [0.5], "peak_bytes": 0,
         "loss": 1.0}  # fmt: skip


@pytest.fixture
def sides(monkeypatch):
    """Answers of sides that are not started, and what was asked of each in order."""
    asked, answers = [], {OURS: measured().as_data(), PEER: TIMES}

    def answer(module, question, *, env, limit_s=None):
        asked.append((module, question, dict(env), limit_s))
        if isinstance(answers[module], SideError):
            raise answers[module]
        return answers[module]

    monkeypatch.setattr(turns, "run_side", answer)
    return asked, answers


def all_of(*, times=2, peer=TINY):
    cfg = load(DENSE)
    return list(in_turns(cfg, ASKED, turns=times, peer=peer, limit_s=7))


def test_sides_take_turns_whose_order_turns(sides):
    found = all_of()
    assert [module for module, *_ in sides[0]] == [OURS, PEER, PEER, OURS]
    assert [type(one) for one in found] == [Measured, PeerTimes, PeerTimes, Measured]
    assert {limit for module, _, _, limit in sides[0] if module == PEER} == {7}


def test_our_side_has_a_cache_that_is_empty_at_first_and_most_of_the_memory(sides):
    all_of()
    ours = [env for module, _, env, _ in sides[0] if module == OURS]
    assert ours[0] == ours[1]
    assert ours[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    # A folder of this call, which ends with it.
    assert not Path(ours[0]["JAX_COMPILATION_CACHE_DIR"]).exists()


def test_a_step_is_taken_apart_and_the_loop_is_timed_in_the_first_turn_alone(sides):
    all_of(peer=None)
    asked = [question["asked"] for _, question, _, _ in sides[0]]
    assert [(one["profiled"], one["loop_rounds"]) for one in asked] == [(2, 1), (0, 0)]
    assert [one["rounds"] for one in asked] == [2, 2]


def test_a_peer_that_fails_says_why_once_and_ours_goes_on(sides):
    sides[1][PEER] = SideError("it had not finished after 7 s")
    found = all_of(times=3)
    assert [type(one) for one in found] == [Measured, SideError, Measured, Measured]


def test_ours_on_several_devices_has_no_peer(sides):
    sides[1][OURS] = measured(num_devices=4).as_data()
    found = all_of()
    assert [type(one) for one in found] == [Measured, SideError, Measured]
    assert "ours on 4" in str(found[1])


def test_ours_that_fails_ends_the_call(sides):
    sides[1][OURS] = SideError("out of memory")
    with pytest.raises(SideError, match="out of memory"):
        all_of()


@pytest.mark.parametrize(
    ("config", "keys", "reason"),
    [
        ("deepseek-v2-lite", (), "model.mixer=mla, model.ffn=moe"),
        ("dense-1.3b", ("train.documents=apart",), "train.documents=apart"),
        ("dense-1.3b", ("optimizer.name=muon",), "optimizer.name=muon"),
        ("dense-1.3b", ("precision.compute=float32",), "precision.compute=float32"),
        ("dense-1.3b", ("model.rope={scaling: linear, factor: 2}",), "rope.scaling=linear"),
    ],
)
def test_what_the_peer_does_not_do_is_refused_by_name(config, keys, reason):
    with pytest.raises(TrainingError, match=reason):
        peer_model(load(CONFIGS / f"{config}.yaml", keys), ASKED)


def test_the_peer_is_told_of_the_same_model():
    peer = peer_model(load(DENSE), ASKED)
    assert (peer.embed_dim, peer.num_layers, peer.ffn_dim) == (2048, 24, 5632)
    assert (peer.batch_size, peer.seq_len, peer.ties_embeddings) == (16, 2048, True)
    assert (peer.rounds, peer.steps_per_round) == (2, 3)


def test_a_run_arrives_as_it_was_sent():
    cfg = load(DENSE, ["precision.rules=[{pattern: layers.*, format: fp8}]"])
    sent = json.loads(json.dumps(question(cfg, ASKED)))
    assert RunConfig.model_validate_json(sent["config"]) == cfg
    assert Asked(**sent["asked"]) == ASKED


def side(monkeypatch, tmp_path, program):
    (tmp_path / "a_side.py").write_text(program, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_side"


def test_what_a_side_writes_last_is_its_answer(monkeypatch, tmp_path):
    program = "import sys, json; print('noise'); print(json.dumps(json.load(sys.stdin)))"
    name = side(monkeypatch, tmp_path, program)
    assert run_side(name, {"a": 1}, env={}) == {"a": 1}


def test_a_side_that_ends_with_an_error_is_told_with_its_last_words(monkeypatch, tmp_path):
    name = side(monkeypatch, tmp_path, "import sys; sys.exit('no room for the weights')")
    with pytest.raises(SideError, match="a_side ended with 1: no room for the weights"):
        run_side(name, {}, env={})


def test_a_side_that_takes_too_long_is_ended_with_what_it_started(monkeypatch, tmp_path):
    program = (
        "import subprocess, sys, pathlib, time\n"
        f"started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(started.pid))\n"
        "time.sleep(60)\n"
    )
    name = side(monkeypatch, tmp_path, program)
    with pytest.raises(SideError, match="had not finished after 2 s"):
        run_side(name, {}, env={}, limit_s=2)
    state = Path("/proc") / (tmp_path / "pid").read_text() / "stat"

    def is_gone():
        # Or dead and not yet fetched by who fetches orphans.
        return not state.exists() or state.read_text().split(") ")[1][0] in "ZX"

    # A process that was killed takes a moment to die; by itself this one would live for a minute.
    until = time.monotonic() + 20
    while not is_gone() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_gone()


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is here")
def test_without_pytorch_the_peer_says_so():
    found = timed_peer(TINY, limit_s=120)
    assert isinstance(found, SideError)
    assert NO_TORCH in str(found)


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_with_pytorch_the_peer_trains_a_tiny_model():
    found = timed_peer(TINY, limit_s=300)
    assert isinstance(found, PeerTimes), found
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert found.parameters == 64 * 16 + layer + 16
    assert len(found.step_s) == 2
    assert found.torch == sys.modules.get("torch", __import__("torch")).__version__
