"""Small published checkpoints as folders on disk, unpacked from `tests/data` and changed at will.

Stored weights are the published ones rounded to 14-19 bits of mantissa and compressed, and rows
of an untied embedding that no reference sequence reads are zero; that moves logits by at most
3e-4. Those of S06 and of `transformers/` are exact. The reference logits are untouched.

Files are read and written here without the library, so that its own reader has something to be
compared with.
"""

import io
import json
import lzma
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxfound.models import Decoder, Execution
from jaxfound.models.build import Frame
from jaxfound.models.weights import load_weights, open_hub

DATA = Path(__file__).resolve().parents[1] / "data"
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
}
SINGLE = "model.safetensors"
# Gone when the tests end.
_UNPACKED = TemporaryDirectory(prefix="jaxfound-published-")


class Tensor(NamedTuple):
    """One array of a file: its format's name there, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.raw, DTYPES[self.dtype]).reshape(self.shape)


def tensor(array: np.ndarray) -> Tensor:
    name = next(n for n, dtype in DTYPES.items() if np.dtype(dtype) == array.dtype)
    return Tensor(name, array.shape, np.ascontiguousarray(array).tobytes())


def read_safetensors(raw: bytes) -> dict[str, Tensor]:
    """The arrays of one file: an u64 header length, a JSON header, raw little-endian bytes."""
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: Tensor(info["dtype"], tuple(info["shape"]), raw[start + begin : start + end])
        for name, info in header.items()
        for begin, end in [info["data_offsets"]]
    }


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, position = {}, 0
    for name, one in tensors.items():
        offsets = [position, position + len(one.raw)]
        header[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": offsets}
        position += len(one.raw)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(t.raw for t in tensors.values()))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every array of a folder, whatever the number of its files."""
    files = sorted(folder.glob("*.safetensors"))
    return {n: t for file in files for n, t in read_safetensors(file.read_bytes()).items()}


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / SINGLE, tensors)
    return folder


def read_config(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text())


def published(config: str, weights: str = "") -> Path:
    """The checkpoint with the config.json of one folder of `tests/data` and the arrays of another.

    Shared by tests: nobody writes into it.
    """
    return _unpack(config, weights or config)


@cache
def _unpack(config: str, weights: str) -> Path:
    source = DATA / weights
    folder = Path(_UNPACKED.name) / f"{config}-with-{weights}".replace("/", "-")
    files = sorted(source.glob("*.safetensors.xz"))
    plain = {f.stem: lzma.decompress(f.read_bytes()) for f in files}
    folder.mkdir()
    (folder / "config.json").write_text((DATA / config / "config.json").read_text())
    for name, raw in plain.items():
        (folder / name).write_bytes(raw)
    if len(files) > 1:
        weight_map = {n: file for file, raw in plain.items() for n in read_safetensors(raw)}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    return folder


@cache
def with_mtp() -> Path:
    """S02's checkpoint with a next-token-prediction layer; its own numbers are drawn here."""
    rng = np.random.default_rng(2)
    tensors = read_folder(published("S02/ds_default"))
    shapes = json.loads((DATA / "S02/ds_mtp_extra/mtp_shapes.json").read_text())
    for name, shape in shapes.items():
        tensors[name] = tensor(rng.normal(0, 0.2, shape).astype(np.float32))
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    folder = Path(_UNPACKED.name) / "with-mtp"
    return write_folder(folder, read_config("S02/ds_mtp_extra"), tensors)


@cache
def with_redundant_head() -> Path:
    """S07's tied checkpoint with the head in the file as well."""
    tensors = read_folder(published("S07/llama_tied"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    folder = Path(_UNPACKED.name) / "redundant-head"
    return write_folder(folder, read_config("S07/llama_tied"), tensors)


def read_logits(path: Path) -> np.ndarray:
    logits = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return logits.reshape(-1, logits.shape[-1])


def load_published(folder: Path, *, execution: Execution | None = None) -> Decoder:
    """The decoder of a published folder, on one device."""
    hub = open_hub(folder)
    frame = Frame(hub.model, execution=execution or Execution())
    return frame.bind(*load_weights(hub))
