"""Every key is described, and the room needs no JAX."""

import subprocess
import sys

import pytest
from pydantic import BaseModel

from jaxfound.config import RunConfig, parse, rows
from jaxfound.config.run import FORMAT_VERSION
from jaxfound.config.yaml_source import flow

BASE = {"preset": "tiny-dense", "train": {"steps": 50, "batch_size": 4, "seq_len": 16}}


def leaves(section, prefix=""):
    """Yield the dotted path of every field that holds no section."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_there_is_a_row_for_every_key():
    assert [row.key for row in rows() if "[]" not in row.key] == list(leaves(RunConfig))


def test_every_row_says_what_the_key_takes_and_means():
    assert all(row.type and row.meaning and row.takes and row.default for row in rows())


def test_the_default_in_a_row_is_the_default_of_a_run():
    cfg = parse({**BASE, "format_version": FORMAT_VERSION})
    for row in rows():
        if row.key.startswith(("optimizer.", "checkpoint.", "parallel.", "data.")):
            section, name = row.key.split(".")
            value = getattr(cfg, section).model_dump(mode="json")[name]
            assert row.default == flow(value), row.key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.steps", ("whole number", "required", "steps", ">= 1")),
        ("optimizer.beta1", ("number", "0.9", "", ">= 0, < 1")),
        ("model.tie_embeddings", ("true or false", "false", "", "")),
        ("model.mixer", ("one of gqa, mla", "gqa", "", "")),
        ("parallel.data", ("whole number or auto", "auto", "", ">= 1")),
        ("data.source", ("text or list of text", "pydocs", "", "")),
        ("precision.rules", ("list of {pattern, format}", "[]", "", "")),
        (
            "precision.rules[].format",
            ("one of float32, bfloat16, fp8, fp8_weights", "required", "", ""),
        ),
    ],
)
def test_a_row_says_type_default_unit_and_range_in_words(key, expected):
    (row,) = [row for row in rows() if row.key == key]
    assert (row.type, row.default, row.unit, row.range) == expected


def test_reading_a_config_imports_no_jax():
    code = "import sys, jaxfound.config.load; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
