"""Write pydocs.jsonl.xz: Python's documentation topics and standard-library docstrings, frozen.

Run once per snapshot with the Python whose text is wanted:
`python -m jaxfound.data.corpus.make_pydocs OUT_DIR`. The same Python release on Linux gives the
same bytes before compression; their SHA-256 is logged and is recorded in `data/source.py`.
"""

import ast
import builtins
import hashlib
import inspect
import json
import logging
import lzma
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

log = logging.getLogger(__name__)

SNAPSHOT = "pydocs.jsonl.xz"
LICENSE = "LICENSE-PSF.txt"
# Tests are not prose; applications are not the library; the rest differs from build to build.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip",
    "lib-dynload", "__pycache__",
}  # fmt: skip
# Private modules repeat the public ones (_pydecimal, _pyio) or describe the build.
SKIPPED_PREFIXES = ("_", "config-")
# `site` adds these at start-up, with text that depends on the installation.
SITE_NAMES = {"copyright", "credits", "license", "exit", "quit", "help"}
# Modules in C that every Linux build has; their docstrings exist only at run time.
C_MODULES = ("builtins", "itertools", "math", "time", "_operator", "_functools")
SHORTEST_TEXT = 12


def topic_documents() -> Iterator[tuple[str, str]]:
    """Yield (id, text) of every topic that `help()` knows."""
    for name, text in topics.items():
        yield f"topics/{name}", text


def source_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of every module, class and function written in Python."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS & set(parts) or parts[0].startswith(SKIPPED_PREFIXES):
            continue
        module = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        yield from docstrings(ast.parse(path.read_bytes()), module)


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the docstring of `node` and of every definition inside it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=True)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from docstrings(child, f"{name}.{child.name}" if named else name)


def runtime_documents(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a C module, its functions, its classes and their methods."""
    prefix = module.__name__
    yield prefix, inspect.cleandoc(module.__doc__ or "")
    for name, value in vars(module).items():
        if name in SITE_NAMES or (name.startswith("_") and module is builtins):
            continue
        if inspect.isroutine(value) or inspect.isclass(value):
            yield f"{prefix}.{name}", inspect.cleandoc(value.__doc__ or "")
        members = vars(value).items() if inspect.isclass(value) else ()
        for member, method in members:
            if inspect.isroutine(method) or inspect.isdatadescriptor(method):
                yield f"{prefix}.{name}.{member}", inspect.cleandoc(method.__doc__ or "")


def collect(root: Path) -> list[dict[str, str]]:
    """Return every document once, sorted by id; a text that occurs twice keeps its first id."""
    found = [*topic_documents(), *source_documents(root)]
    for name in C_MODULES:
        found += runtime_documents(import_module(name))
    seen: set[str] = set()
    documents: list[dict[str, str]] = []
    for name, text in sorted(found):
        clean = text.strip()
        if len(clean) < SHORTEST_TEXT or clean in seen:
            continue
        seen.add(clean)
        documents.append({"id": name, "text": clean})
    return documents


def main(out_dir: Path) -> None:
    """Write the snapshot and Python's licence into `out_dir`."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = collect(root)
    for document in documents:
        for place in (sys.prefix, sys.base_prefix, str(Path.home())):
            if len(place) > 1 and f"{place}/" in document["text"]:
                raise ValueError(f"{document['id']} names this machine's {place}: exclude it")
    data = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents).encode()
    (out_dir / SNAPSHOT).write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    (out_dir / LICENSE).write_bytes((root / "LICENSE.txt").read_bytes())
    log.info(
        "%d documents, %d bytes, sha256 %s, Python %s",
        len(documents),
        len(data),
        hashlib.sha256(data).hexdigest(),
        sys.version.split()[0],
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]))
