"""Files, functions and configs stay small enough to be read in one go."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from jaxfound.config.run import RunConfig
from tests.architecture.source_tree import (
    ROOT,
    Function,
    definitions,
    is_backend,
    nesting,
    package_files,
    project_files,
    relative,
)

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 150
MAX_NESTING = 3
MAX_CONFIG_KEYS = 150
MAX_ROOM_FACE_LINES = 40
MAX_YAML_LINES = 40
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "common", "misc", "impl", "base_")

MODULES = [pytest.param(p, id=relative(p)) for p in package_files()]
FACES = [p for p in package_files() if p.name == "__init__.py" and p.parent != ROOT / "jaxfound"]


@pytest.mark.parametrize("path", MODULES)
def test_a_module_is_short(path):
    limit = MAX_KERNEL_FILE_LINES if is_backend(path) else MAX_FILE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_a_test_file_is_short():
    lengths = {
        relative(p): len(p.read_text(encoding="utf-8").splitlines())
        for p in project_files()
        if p.suffix == ".py" and p.is_relative_to(ROOT / "tests")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("path", MODULES)
def test_a_function_is_short(path):
    limit = MAX_KERNEL_FUNCTION_LINES if is_backend(path) else MAX_FUNCTION_LINES
    lengths = {
        where: node.end_lineno - node.lineno + 1
        for where, node in definitions(path)
        if isinstance(node, Function)
    }
    assert {where: n for where, n in lengths.items() if n > limit} == {}


@pytest.mark.parametrize("path", MODULES)
def test_blocks_nest_three_deep_at_most(path):
    depths = {w: nesting(node) for w, node in definitions(path) if isinstance(node, Function)}
    assert {where: depth for where, depth in depths.items() if depth > MAX_NESTING} == {}


@pytest.mark.parametrize("path", [pytest.param(p, id=relative(p)) for p in FACES])
def test_the_face_of_a_room_is_imports_and_a_list_of_names(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_ROOM_FACE_LINES
    assert not list(definitions(path)), "a room's __init__.py holds no logic"
    assert "import" not in text or "__all__" in text, "a face that imports says what is public"


def test_no_file_is_named_for_what_it_is_not():
    stems = {relative(p): p.stem.lower() for p in project_files()}
    bad = [
        name
        for name, stem in stems.items()
        if stem in FORBIDDEN_NAMES or any(stem.endswith(f"_{word}") for word in FORBIDDEN_NAMES)
    ]
    assert bad == []


def test_the_config_tree_has_at_most_150_keys():
    keys = list(leaf_keys(RunConfig))
    assert len(keys) <= MAX_CONFIG_KEYS


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=relative)
def test_a_yaml_names_a_preset_and_its_differences_and_no_more(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_YAML_LINES


def leaf_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys that hold a value, not a section."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaf_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name
