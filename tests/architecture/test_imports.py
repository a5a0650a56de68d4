"""Importing is cheap: no JAX backend, no wait; and the import floors hold when they are tested."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

MAX_IMPORT_S = 1.5
MAX_HELP_S = 1.0

# Prints a JSON object: modules that started a backend, modules that could not be imported, and
# names in a module's __all__ that it does not have.
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import jaxfound, pallas_kernels

def names(package):
    yield package.__name__
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield found.name

seen = {"modules": 0, "started": [], "missing": {}, "unresolved": []}
for name in [*names(jaxfound), *names(pallas_kernels)]:
    try:
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", [])
        seen["unresolved"] += [f"{name}.{n}" for n in listed if not hasattr(module, n)]
    except ModuleNotFoundError as error:
        seen["missing"][name] = error.name
    seen["modules"] += 1
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        seen["started"].append(name)
        break
print(json.dumps(seen))
"""

# What a user may leave out: the packages of the extras.
OPTIONAL = {
    "grain",
    "jax_triton",
    "jax_cuda13_plugin",
    "jinja2",
    "matplotlib",
    "prometheus_client",
    "pyarrow",
    "starlette",
    "tokenizers",
    "triton",
    "uvicorn",
}


@pytest.fixture(scope="module")
def imported() -> dict:
    return json.loads(python("-c", IMPORT_EVERYTHING).splitlines()[-1])


def test_importing_any_module_starts_no_jax_backend(imported):
    assert imported["modules"] > 0
    assert imported["started"] == []


def test_only_modules_of_an_extra_may_miss_a_package(imported):
    missing = {m: p for m, p in imported["missing"].items() if p.partition(".")[0] not in OPTIONAL}
    assert missing == {}


def test_every_name_that_is_listed_as_public_exists(imported):
    assert imported["unresolved"] == []


def test_importing_jaxfound_takes_less_than_a_second_and_a_half():
    assert best_of_three_s("-c", "import jaxfound", limit_s=MAX_IMPORT_S) < MAX_IMPORT_S


def test_help_takes_less_than_a_second():
    script = str(Path(sys.executable).with_name("jaxfound"))
    assert best_of_three_s(script, "--help", limit_s=MAX_HELP_S) < MAX_HELP_S


ROOMS = (
    *("cli", "training", "serving", "models", "parallelism"),
    *("communication", "resources", "data", "config"),
)
OPS = ("quantize", "fp8_matmul", "grouped_matmul", "flash_attention", "mla_decode")

# Each row: a module of a small copy of the tree, an import that is planted there, the contract.
BREACHES = [
    ("jaxfound/config/run.py", "import jaxfound.data", "floors"),
    ("jaxfound/data/batch.py", "import jaxfound.resources", "floors"),
    ("jaxfound/training/loop.py", "import jaxfound.serving", "floors"),
    ("jaxfound/models/build.py", "import jaxfound.training", "floors"),
    ("pallas_kernels/fp8_matmul/op.py", "import pallas_kernels.mla_decode", "kernel-floors"),
    ("pallas_kernels/formats.py", "import pallas_kernels.linear", "kernel-floors"),
    ("pallas_kernels/linear.py", "import flax", "pallas-kernels"),
    ("pallas_kernels/linear.py", "import jaxfound.config", "pallas-kernels"),
    ("pallas_kernels/fp8_matmul/op.py", "import jax_triton", "jax-triton"),
    ("jaxfound/config/run.py", "import numpy", "config"),
    ("jaxfound/resources/topology.py", "import pallas_kernels.formats", "resources"),
    ("jaxfound/resources/checkpoint/manager.py", "import orbax.checkpoint", "orbax"),
    ("jaxfound/data/batch.py", "import jax.numpy", "data"),
    ("jaxfound/communication/cost.py", "import pallas_kernels.linear", "communication"),
    ("jaxfound/parallelism/plan.py", "import jaxfound.data", "parallelism"),
    ("jaxfound/models/build.py", "import jaxfound.resources", "models"),
    ("jaxfound/training/loop.py", "import rich", "training"),
    ("jaxfound/serving/engine.py", "import optax", "serving"),
    ("jaxfound/cli/train.py", "import orbax.checkpoint", "cli"),
    ("jaxfound/data/batch.py", "import jaxfound.data.loader", "no-circles"),
]

# Imports that look like a breach and are allowed.
ALLOWED = [
    ("jaxfound/resources/topology.py", "import pallas_kernels.hardware"),
    ("jaxfound/resources/checkpoint/storage.py", "import orbax.checkpoint"),
    ("jaxfound/communication/cost.py", "import pallas_kernels.formats"),
    ("pallas_kernels/fp8_matmul/jax_triton.py", "import jax_triton"),
    ("pallas_kernels/fp8_matmul/op.py", "import pallas_kernels.quantize"),
]


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A tree with the rooms and the modules of the tables above, all empty."""
    faces = [f"jaxfound/{room}/__init__.py" for room in ROOMS]
    faces += [f"pallas_kernels/{op}/__init__.py" for op in OPS]
    faces += ["jaxfound/__init__.py", "pallas_kernels/__init__.py"]
    faces += ["jaxfound/resources/checkpoint/__init__.py", "pallas_kernels/hardware.py"]
    for name in [*faces, *(row[0] for row in BREACHES), *(row[0] for row in ALLOWED)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "jaxfound/data/loader.py").write_text("import jaxfound.data.batch\n")
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("module", "planted", "contract"), BREACHES)
def test_a_planted_import_breaks_its_contract(small_tree, module, planted, contract):
    (small_tree / module).write_text(f"{planted}\n")
    assert broken_contracts(small_tree, only=contract) == [contract]


@pytest.mark.parametrize(("module", "planted"), ALLOWED)
def test_an_allowed_import_breaks_nothing(small_tree, module, planted):
    (small_tree / module).write_text(f"{planted}\n")
    assert broken_contracts(small_tree) == []


def broken_contracts(tree: Path, *, only: str | None = None) -> list[str]:
    """Ids of the contracts in `tree` that do not hold, of all or of one."""
    lint = Path(sys.executable).with_name("lint-imports")
    chosen = ["--contract", only] if only else []
    result = subprocess.run(
        [lint, "--no-cache", *chosen],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        return []
    assert "BROKEN" in result.stdout, result.stdout + result.stderr
    return [only or result.stdout]


def python(*arguments: str) -> str:
    """Run this interpreter in the checkout and return what it printed."""
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def best_of_three_s(*arguments: str, limit_s: float) -> float:
    """CPU time of the cheapest of up to three runs; stops at the first one under the limit.

    Not wall time: other tests run beside this one.
    """
    best = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, spent)
        if best < limit_s:
            break
    return best
