"""What is public is documented, and what is listed as public is there."""

import ast
import re
import tomllib

import pytest

from tests.architecture.source_tree import (
    ROOT,
    package_files,
    project_files,
    public_definitions,
    relative,
)

MODULES = [pytest.param(p, id=relative(p)) for p in package_files()]

# Cut in two, so that this file does not hold them.
REMINDERS = ("TO" + "DO", "FIX" + "ME", "Placeholder " + "docstring")


@pytest.mark.parametrize("path", MODULES)
def test_every_public_symbol_is_documented(path):
    module = ast.parse(path.read_text(encoding="utf-8"))
    bare = [] if ast.get_docstring(module) else [relative(path)]
    bare += [w for w, n in public_definitions(path) if not ast.get_docstring(n) and not implied(n)]
    assert bare == []


def test_the_face_of_jaxfound_has_at_most_twelve_names():
    assert len(listed_names(ROOT / "jaxfound" / "__init__.py")) <= 12


def test_no_source_file_puts_work_off():
    sources = [p for p in project_files() if p.suffix in (".py", ".toml", ".yaml", ".ipynb")]
    late = [
        f"{relative(p)}: {word}"
        for p in sources
        for word in REMINDERS
        if re.search(rf"\b{word}\b", p.read_text(encoding="utf-8"))
    ]
    assert late == []


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "jaxfound" / "py.typed").exists()
    assert (ROOT / "pallas_kernels" / "py.typed").exists()


def implied(node: ast.AST) -> bool:
    """True where the meaning stands elsewhere: an overload, or an override."""
    names = {ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", [])}
    return bool(names & {"overload", "override", "setter"})


def listed_names(path) -> list[str]:
    """The strings of a module's `__all__`, or none."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


def test_shapes_are_checked_in_every_module_that_writes_them():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    given = options["tool"]["pytest"]["ini_options"]["addopts"]
    (checked,) = [word for word in given if word.startswith("--jaxtyping-packages=")]
    rooms = checked.partition("=")[2].split(",")[:-1]
    writers = [p for p in package_files() if "from jaxtyping import" in p.read_text("utf-8")]
    names = [relative(p).removesuffix(".py").replace("/", ".") for p in writers]
    assert len(names) > 50
    assert [n for n in names if not any(f"{n}.".startswith(f"{room}.") for room in rooms)] == []
