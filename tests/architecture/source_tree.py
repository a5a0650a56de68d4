"""The tracked files of the checkout, and the definitions inside its modules."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxfound", "pallas_kernels")

# Files of an op's folder that are not a backend.
NOT_BACKENDS = ("__init__.py", "op.py", "reference.py", "cases.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


class Named(NamedTuple):
    """A definition and where it stands, e.g. `jaxfound/config/run.py:RunConfig`."""

    where: str
    node: Definition


@cache
def project_files() -> tuple[Path, ...]:
    """Files that git tracks or would track; without git, every file outside hidden folders."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        names = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        hidden = [p for p in ROOT.iterdir() if p.name.startswith(".")]
        names = [p for p in ROOT.rglob("*") if not any(p.is_relative_to(h) for h in hidden)]
    return tuple(sorted(p for p in names if p.is_file()))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_files() -> list[Path]:
    """Every Python module of the two packages."""
    found = [p for p in project_files() if p.suffix == ".py"]
    return [p for p in found if p.relative_to(ROOT).parts[0] in PACKAGES]


def is_backend(path: Path) -> bool:
    """True for `pallas_kernels/<op>/<backend>.py`, whose functions are kernel bodies."""
    parts = path.relative_to(ROOT).parts
    return parts[0] == "pallas_kernels" and len(parts) == 3 and parts[2] not in NOT_BACKENDS


def definitions(path: Path) -> Iterator[Named]:
    """Every function and class of a module, methods and nested functions included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _inside(tree, prefix=f"{relative(path)}:")


def public_definitions(path: Path) -> Iterator[Named]:
    """Module-level functions and classes, and methods of the latter, without a leading `_`."""
    for named in _inside(ast.parse(path.read_text(encoding="utf-8")), prefix="", functions=False):
        if not any(part.startswith("_") for part in named.where.split(".")):
            yield Named(f"{relative(path)}:{named.where}", named.node)


def _inside(node: ast.AST, *, prefix: str, functions: bool = True) -> Iterator[Named]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from _inside(child, prefix=prefix, functions=functions)
            continue
        yield Named(prefix + child.name, child)
        if functions or isinstance(child, ast.ClassDef):
            yield from _inside(child, prefix=f"{prefix}{child.name}.", functions=functions)


def nesting(function: Function) -> int:
    """Depth of loops, branches, `with`, `try` and `match` in a function; `elif` adds none."""
    return max((_depth(statement) for statement in function.body), default=0)


def _depth(node: ast.AST) -> int:
    if isinstance(node, Definition | ast.Lambda):
        return 0
    blocks = ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith | ast.Try
    here = int(isinstance(node, blocks | ast.TryStar | ast.Match))
    deepest = max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        branches = (*node.body, node.test)
        return max(1 + max(_depth(b) for b in branches), _depth(node.orelse[0]))
    return here + deepest
