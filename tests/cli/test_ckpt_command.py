"""`jaxfound ckpt`: what there is, whether it is whole, and copies; exit codes 0, 1 and 2."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.cli.main import main
from jaxfound.resources.checkpoint import CheckpointManager, Tiers, remote

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "checkpoints"


def run(monkeypatch, capsys, *args):
    """The exit code and what was printed."""
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["ckpt", *map(str, args)])
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out + printed.err


@pytest.fixture
def steps(tmp_path):
    """A run with steps 2 and 4, and a save that never ended."""
    directory = tmp_path / "run" / "checkpoints"
    with CheckpointManager(directory, keep=0, mode="sync", layout={"data": 2}) as manager:
        for step in (2, 4):
            manager.save(step, {"w": jnp.arange(8.0) + step}, {"data_position": step})
    (directory / "6.saving").mkdir()
    return tmp_path / "run"


def damage(run_directory, step):
    file = max(
        (run_directory / "checkpoints" / str(step)).rglob("d/*"), key=lambda p: p.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    return file


def test_ls_lists_what_there_is_on_each_tier(monkeypatch, capsys, steps):
    code, out = run(monkeypatch, capsys, "ls", steps)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert [line[:3] for line in lines[1:]] == [
        ["2", "shared", "committed"],
        ["4", "shared", "committed"],
        ["6", "shared", "saving"],
    ]
    assert "data=2" in out


def test_ls_as_json_has_every_field(monkeypatch, capsys, steps):
    code, out = run(monkeypatch, capsys, "ls", steps, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["step"] for row in rows] == ["2", "4", "6"]
    assert rows[0].keys() == {
        "step", "tier", "state", "num_bytes", "layout", "attempt", "where", "faults"
    }  # fmt: skip


def test_verify_says_intact_or_names_the_file_and_exits_1(monkeypatch, capsys, steps):
    code, out = run(monkeypatch, capsys, "verify", steps)
    assert (code, out.count("committed, intact")) == (0, 2)
    file = damage(steps, 4)
    code, out = run(monkeypatch, capsys, "verify", steps)
    assert code == 1
    assert file.name in out
    assert run(monkeypatch, capsys, "verify", steps, "--step", 2)[0] == 0


def test_a_damaged_manifest_is_listed_as_damaged(monkeypatch, capsys, steps):
    path = steps / "checkpoints" / "2" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    code, out = run(monkeypatch, capsys, "verify", steps)
    assert code == 1
    assert "was changed after it was written" in out


@pytest.mark.parametrize(
    "args",
    [
        ["ls", "nowhere"],
        ["verify", "{run}", "--step", "9"],
        ["verify", "{run}", "--tier", "near"],
        ["pull", "{run}", "{out}", "--step", "9"],
        ["pull", "memory://nothing/there", "{out}"],
        ["export", "{run}", "{run}"],
    ],
)
def test_what_cannot_be_done_is_said_and_exits_2(monkeypatch, capsys, steps, tmp_path, args):
    args = [arg.format(run=steps, out=tmp_path / "out") for arg in args]
    code, out = run(monkeypatch, capsys, *args)
    assert code == 2
    assert out.startswith("error: ")


def test_pull_copies_the_newest_step_from_a_folder_or_a_store(monkeypatch, capsys, steps, tmp_path):
    url = "memory://test-ckpt-command/run"
    remote.push(steps / "checkpoints" / "4", url)
    for source in (steps, url):
        out = tmp_path / f"from-{'url' if source == url else 'run'}"
        assert run(monkeypatch, capsys, "pull", source, out)[0] == 0
        with CheckpointManager(out, keep=0) as manager:
            assert manager.latest_good() == 4


def test_pull_of_a_damaged_step_leaves_nothing(monkeypatch, capsys, steps, tmp_path):
    damage(steps, 4)
    code, out = run(monkeypatch, capsys, "pull", steps, tmp_path / "out")
    assert code == 2
    assert "checksum" in out
    assert list((tmp_path / "out").iterdir()) == []


def test_export_gives_what_plain_orbax_opens(monkeypatch, capsys, steps, tmp_path):
    import orbax.checkpoint as ocp

    assert run(monkeypatch, capsys, "export", steps, tmp_path / "out")[0] == 0
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out", {"w": jnp.zeros(8)})
    np.testing.assert_array_equal(tree["w"], np.arange(8.0) + 4)
    shutil.rmtree(tmp_path / "out")
    damage(steps, 4)
    assert run(monkeypatch, capsys, "export", steps, tmp_path / "out")[0] == 0
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out", {"w": jnp.zeros(8)})
    np.testing.assert_array_equal(tree["w"], np.arange(8.0) + 2), "the newest intact one"
    assert run(monkeypatch, capsys, "export", steps, tmp_path / "o", "--step", 4)[0] == 2


@pytest.mark.parametrize("name", ["format-1", "format-2", "format-2-of-two-hosts"])
def test_every_format_is_verified(monkeypatch, capsys, name):
    assert run(monkeypatch, capsys, "verify", GOLDEN / name)[0] == 0


def test_all_tiers_of_a_config_are_listed_and_verified(monkeypatch, capsys, tmp_path):
    from jaxfound.config import load
    from jaxfound.config.load import save
    from jaxfound.resources.checkpoint import uploader

    monkeypatch.setattr(uploader, "start", lambda options, *, root: None)
    there, local, url = tmp_path / "run", tmp_path / "disk", "memory://test-ckpt-tiers/run"
    config = Path(__file__).resolve().parents[2] / "configs" / "tiny-dense.yaml"
    changes = [f"checkpoint.local_dir={local}", f"checkpoint.remote={url}"]
    there.mkdir()
    save(load(config, changes), there / "config.yaml")
    tiers = Tiers(local=local, remote=url)
    with CheckpointManager(there / "checkpoints", mode="sync", tiers=tiers) as manager:
        manager.save(2, {"w": jnp.arange(8.0)}, {})
        work = uploader.Uploader(
            manager._transit.local, uploader.SharedTier(manager.directory), url=url, patience_s=0
        )
        assert work.run()
    code, out = run(monkeypatch, capsys, "verify", there, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["tier"], row["state"]) for row in rows] == [
        ("local", "part 0 of 1, intact"),
        ("shared", "committed, intact"),
        ("remote", "committed, intact"),
    ]
