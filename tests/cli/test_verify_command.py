"""`jaxfound verify` on devices that are here: what cannot be is told before anything runs."""

import jax
import pytest

from jaxfound.cli.main import main

CONFIG = "configs/tiny-dense.yaml"


def test_all_layouts_are_not_tried_on_what_is_here(monkeypatch, capsys):
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["verify", CONFIG, "--lattice", "1/16", "--whole"])
    assert left.value.code == 2
    assert "leave --here and --whole out" in " ".join(capsys.readouterr().err.split())


def test_a_mesh_that_is_larger_than_what_is_here_is_refused_before_anything_runs(
    monkeypatch, capsys
):
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["verify", CONFIG, "--mesh", "fsdp=64,tensor=2", "--here"])
    assert left.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the mesh has 128 devices, and here are {jax.device_count()} x cpu" in said
    assert "leave --here out" in said
