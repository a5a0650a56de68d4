"""What the documents say is there: links, paths, commands, configs, and code that runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfound.config.load import load
from tests.architecture.source_tree import ROOT, project_files, relative

DOCUMENTS = [p for p in project_files() if p.suffix == ".md"]
CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
# A path in backquotes that starts in a folder of this tree.
QUOTED_PATH = re.compile(
    r"`(?P<path>(?:jaxfound|pallas_kernels|configs|tests|docs|notebooks)/[\w./-]*)`"
)
COMMAND = re.compile(r"(?:^|`)jaxfound (?P<name>[a-z][a-z-]*)", re.MULTILINE)
TARGET = re.compile(r"(?:^|`)make (?P<name>[a-z][a-z-]*)", re.MULTILINE)

# Text that only makes sense on one machine or one network; cut, so that this file has none.
FOREIGN = re.compile(
    "|".join(
        [
            "py" + r"pi\.org",
            "python" + "hosted",
            "registry" + r"\.npm",
            "crates" + r"\.io",
            r"(?<![\w.~-])/(?:root|work|home)" + "/",
        ]
    )
)

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=relative)


@each_document
def test_every_link_inside_the_project_leads_somewhere(path):
    lost = []
    for match in LINK.finditer(outside_fences(path)):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = (path.parent / target) if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(match["target"])
    assert lost == []


@each_document
def test_every_path_in_backquotes_exists(path):
    quoted = {m["path"] for m in QUOTED_PATH.finditer(outside_fences(path))}
    assert sorted(p for p in quoted if not (ROOT / p).exists()) == []


@each_document
def test_every_command_that_is_named_exists(path, commands):
    named = {m["name"] for m in COMMAND.finditer(path.read_text(encoding="utf-8"))}
    assert named - commands == set()


@each_document
def test_every_make_target_that_is_named_exists(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {m["name"] for m in TARGET.finditer(path.read_text(encoding="utf-8"))}
    assert named - targets == set()


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if "```python run" in p.read_text("utf-8")], ids=relative
)
def test_code_marked_run_runs(path, tmp_path):
    """Blocks of one document are one program, run from an empty folder beside `configs`."""
    blocks = FENCE.finditer(path.read_text(encoding="utf-8"))
    program = "\n".join(m["body"] for m in blocks if m["info"].strip() == "python run")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    result = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "32"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_yaml_in_configs_loads(path):
    assert load(path).name


def test_every_decision_says_context_choice_and_cost():
    headings = ["## Context", "## Choice", "## Cost"]
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    found = {p.name: re.findall(r"^## .*$", p.read_text("utf-8"), re.MULTILINE) for p in decisions}
    assert found, "docs/decisions is empty"
    assert {name: h for name, h in found.items() if h != headings} == {}


def test_contributing_fits_on_a_page():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_constraints_are_exact_pins_and_nothing_else():
    pin = re.compile(r"^[a-z0-9][a-z0-9-]*==[\w.+!]+(?: ; .+)?$")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not pin.match(line)] == []


def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    assert [hit for path in project_files() for hit in foreign_lines(path)] == []


@pytest.fixture(scope="module")
def commands() -> set[str]:
    """Names of the commands that `jaxfound --help` lists."""
    script = Path(sys.executable).with_name("jaxfound")
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^[\s│|]*([a-z][a-z-]*)\s{2,}\S", shown, re.MULTILINE))


def outside_fences(path: Path) -> str:
    """The document without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors that a forge makes from a document's headings."""
    titles = re.findall(r"^#+ (.*)$", outside_fences(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


def foreign_lines(path: Path) -> list[str]:
    """Lines of a text file that name another place; none for a binary file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    found = ((i, FOREIGN.search(line)) for i, line in enumerate(lines, 1))
    return [f"{relative(path)}:{i}: {hit[0]}" for i, hit in found if hit]
