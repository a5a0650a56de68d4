"""Damaged safetensors files and indexes are refused, each by its own name."""

import json
import struct

import numpy as np
import pytest

from jaxfound.models.weights import WeightsError, open_hub
from jaxfound.models.weights.folder import open_folder
from jaxfound.models.weights.layout import read_header
from tests.models.published import (
    SINGLE,
    published,
    read_folder,
    read_safetensors,
    write_safetensors,
)

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SIX = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, *, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def after(begin, *, shape=(2, 3), **changes):
    """An entry that begins at a byte."""
    size = 4 * int(np.prod(shape))
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, begin + size], **changes}


# Header, bytes after it, what the message says.
FILES = {
    "truncated": ({"a": SIX, "b": after(24)}, 40, "is truncated.*48 bytes.*has 40.*b is cut"),
    "bytes left over": ({"a": SIX}, 30, "6 bytes after its last array a"),
    "overlap": ({"a": SIX, "b": after(20)}, 44, "b at bytes 20…44 overlaps a"),
    "hole": ({"a": SIX, "b": after(28)}, 52, "b at bytes 28…52 leaves a hole after a"),
    "hole at the start": ({"a": after(4)}, 28, "a at bytes 4…28 leaves a hole after the header"),
    "size is not shape": ({"a": {**SIX, "shape": [2, 4]}}, 24, r"a: .*24 bytes.*\[2, 4\] has 32"),
    "offsets backwards": ({"a": {**SIX, "data_offsets": [24, 0]}}, 24, "a: offsets 24…0"),
    "negative size": ({"a": {**SIX, "shape": [-2, -3]}}, 24, "a: takes dtype, shape"),
    "unknown format": ({"a": {**SIX, "dtype": "F4"}}, 24, "a: dtype F4 is none of"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "a: takes dtype, shape"),
    "shape of text": ({"a": {**SIX, "shape": "23"}}, 24, "a: takes dtype, shape"),
    "entry is a list": ({"a": []}, 24, "a: takes dtype, shape"),
    "name twice": (
        b'{"a": ' + json.dumps(SIX).encode() + b', "a": ' + json.dumps(after(24)).encode() + b"}",
        48,
        "names a twice",
    ),
    "no JSON": (b"{'a': 1}", 0, "header is not JSON"),
    "no text": (b"\xff\xfe\xfd", 0, "header is not UTF-8"),
    "a list": ([1, 2], 0, "header is a list"),
}


@pytest.mark.parametrize(("header", "data", "message"), FILES.values(), ids=list(FILES))
def test_a_damaged_file_is_refused_by_name(tmp_path, header, data, message):
    path = write(tmp_path / SINGLE, header, data=bytes(data))
    with pytest.raises(WeightsError, match=message) as refused:
        read_header(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"1234567"], ids=["empty", "seven bytes"])
def test_a_file_without_room_for_a_header_is_refused(tmp_path, raw):
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(WeightsError, match="too short for a safetensors file"):
        read_header(tmp_path / SINGLE)


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused_and_not_read(tmp_path, length):
    path = write(tmp_path / SINGLE, {"a": SIX}, data=bytes(24), length=length)
    with pytest.raises(WeightsError, match=f"header has {length:,} bytes"):
        read_header(path)


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(WeightsError, match="git lfs pull"):
        read_header(tmp_path / SINGLE)


def test_a_file_that_shrinks_after_it_was_checked_is_refused(tmp_path):
    path = write(tmp_path / SINGLE, {"a": SIX}, data=bytes(24))
    stored = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="16 of 24 bytes"):
        stored.read()


def test_every_format_and_part_is_read_as_it_was_written():
    """fp8, bfloat16 and float32 beside an independent reader; rows alone are the rows."""
    for name in ("S06/ds_fp8", "S02/ds_no_qlora", "transformers/llama3"):
        folder = published(name)
        right, found = read_folder(folder), open_folder(folder).tensors
        assert found.keys() == right.keys()
        for key, stored in found.items():
            assert stored.read().tobytes() == right[key].raw
            assert (stored.dtype, stored.shape) == (right[key].dtype, right[key].shape)
            part = right[key].array[1:3]
            assert stored.read(1, min(3, stored.shape[0])).tobytes() == part.tobytes()


@pytest.fixture
def shards(tmp_path):
    """Two shards and their index, in a folder to spoil."""
    for file in published("S02/ds_no_qlora").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_shard_is_refused_by_name(shards):
    (shards / SECOND).unlink()
    with pytest.raises(WeightsError, match=f"1 of 2 shards are missing: {SECOND}"):
        open_hub(shards)


def test_an_array_in_another_shard_than_the_index_says_is_refused(shards):
    change_index(shards, lambda m: m.update({"model.norm.weight": swapped(m["model.norm.weight"])}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is in .*, the index says"):
        open_hub(shards)


def swapped(shard):
    return SECOND if shard == FIRST else FIRST


def test_an_index_that_names_an_array_no_shard_has_is_refused(shards):
    change_index(shards, lambda m: m.update({"model.ghost.weight": FIRST}))
    with pytest.raises(WeightsError, match=f"model.ghost.weight is in no shard.*says {FIRST}"):
        open_hub(shards)


def test_an_array_that_the_index_leaves_out_is_refused(shards):
    change_index(shards, lambda m: m.pop("model.norm.weight"))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight of .* is not in the index"):
        open_hub(shards)


def test_an_array_in_two_shards_is_refused(shards):
    first, second = (read_safetensors((shards / f).read_bytes()) for f in (FIRST, SECOND))
    name = next(iter(second))
    write_safetensors(shards / FIRST, {**first, name: second[name]})
    with pytest.raises(WeightsError, match=f"{name} is in {FIRST} and {SECOND}"):
        open_hub(shards)


def test_an_index_may_not_lead_out_of_the_folder(shards):
    change_index(shards, lambda m: m.update({"model.norm.weight": "../other.safetensors"}))
    with pytest.raises(WeightsError, match=r"outside the folder: \.\./other"):
        open_hub(shards)


def test_one_file_and_an_index_together_are_refused(shards):
    (shards / SINGLE).write_bytes((shards / FIRST).read_bytes())
    with pytest.raises(WeightsError, match=r"both .*remove the stale one"):
        open_hub(shards)


@pytest.mark.parametrize("there", [(), ("pytorch_model.bin",)], ids=["nothing", "pickles"])
def test_a_folder_without_arrays_is_refused_with_what_is_there(tmp_path, there):
    (tmp_path / "config.json").write_text("{}")
    for name in there:
        (tmp_path / name).touch()
    with pytest.raises(WeightsError, match="holds neither") as refused:
        open_hub(tmp_path)
    assert all(name in str(refused.value) for name in there)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read"), ("{", "is not JSON"), ("[1]", "holds a list")],
    ids=["missing", "cut", "a list"],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        open_hub(tmp_path)
