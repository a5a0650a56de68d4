"""The notebooks run from an empty folder, and are stored as a reader wants to find them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
# A path of the machine it ran on, or a trace of an error, would be in the way of a reader.
UNWANTED = re.compile(r"/(?:tmp|root|home|work|Users)/|Traceback|Warning", re.IGNORECASE)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def output_text(cells):
    """Everything the cells printed or returned, as one text."""
    found = [o for c in cells for o in c.outputs]
    return "\n".join(str(o.get("text") or o.get("data") or o) for o in found)


@pytest.mark.notebook
@pytest.mark.multidevice
@each_notebook
def test_a_notebook_runs_from_an_empty_folder(path, tmp_path):
    # A process of its own: the kernel's event loop and sockets are none of this project's, and
    # leave warnings that this process would take for failures.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    # As a reader runs it; a notebook computes for longer than it compiles.
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    result = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path), "executed.ipynb"],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    ran = code_cells(tmp_path / "executed.ipynb")
    assert [c.execution_count for c in ran] == list(range(1, len(ran) + 1))
    assert not UNWANTED.search(output_text(ran))


@each_notebook
def test_a_notebook_is_stored_with_the_outputs_of_one_run_and_nothing_of_its_machine(path):
    cells = code_cells(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    assert all(o.output_type != "error" for c in cells for o in c.outputs)
    text = output_text(cells)
    assert text
    assert not UNWANTED.search(text)
    metadata = nbformat.read(path, as_version=4).metadata
    assert metadata.kernelspec.name == "python3"
    assert set(metadata) <= {"kernelspec", "language_info"}
