"""GGUF files (llama.cpp's format) as plain arrays under the names that the Hub gives them.

Layout, little-endian: `GGUF`, u32 version, u64 tensors, u64 metadata entries; the entries; for each
tensor its name, dims (fastest first), type and offset; padding to `general.alignment`; the data.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxfound.models.weights.errors import WeightsError, listed
from jaxfound.models.weights.folder import HubFolder, Json
from jaxfound.models.weights.layout import Stored

MAGIC = b"GGUF"
# Ends the name of such a file.
SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32
BLOCK = 32  # values that share one scale in the Qn_m formats

# Numbers of the metadata's value types, as struct spells them; text and lists apart.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9


@dataclass(frozen=True)
class GgufTensor(Stored):
    """One tensor of the file; read as floats, whole or some of its rows.

    Attributes:
        path: the file.
        dtype: what `read` gives: F32 for every block format, else as stored.
        shape: rows first, as numpy has it.
        offset: first byte in the file.
        name: as llama.cpp calls it.
        form: how it is stored, a key of FORMATS.
        num_heads: 0, or the heads whose rows `read` puts back into the Hub's order.
    """

    name: str = ""
    form: str = "F32"
    num_heads: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return FORMATS[self.form].size(math.prod(self.shape))

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows from `start` to `stop`, dequantised; the whole tensor by default."""
        row_bytes = FORMATS[self.form].size(math.prod(self.shape[1:]))
        rows = (self.shape[0], row_bytes)
        stored = np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=rows)
        if self.num_heads:
            raw = stored[unpermuted(np.arange(self.shape[0]), self.num_heads)[start:stop]]
        else:
            raw = np.array(stored[start:stop])
        return FORMATS[self.form].values(raw.reshape(-1)).reshape(-1, *self.shape[1:])


@dataclass(frozen=True)
class Gguf:
    """What a file holds.

    Attributes:
        path: the file.
        metadata: its entries by dotted key; lists stay lists.
        tensors: in the file's order, unread.
    """

    path: Path
    metadata: Json
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> Gguf:
    """Return the metadata and the tensors of a GGUF file; values are read when asked for.

    Raises:
        WeightsError: if it is no GGUF file, of another version, cut short, or holds a tensor in a
            format that is not in FORMATS; names the tensor.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as err:
        raise WeightsError(f"cannot read {path}: {err}") from err
    cursor = _Cursor(path, data)
    magic, version = cursor.bytes(4), cursor.number("I")
    if magic != MAGIC:
        raise WeightsError(f"{path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    if version not in VERSIONS:
        raise WeightsError(
            f"{path} is GGUF version {version}; versions {VERSIONS} are read (a huge number means "
            "a big-endian file). Convert it with llama.cpp"
        )
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata: Json = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = _count(metadata.get("general.alignment", ALIGNMENT), "general.alignment", path)
    start = -(-cursor.at // alignment) * alignment
    tensors = tuple(replace(header, offset=start + header.offset) for header in headers)
    _check_bounds(tensors, path=path, file_bytes=len(data))
    return Gguf(path, metadata, tensors)


def gguf_folder(file: Gguf) -> HubFolder:
    """Return a file of a Llama model as the published folder that it was made from.

    Rows of q and k come out in the Hub's order (`unpermuted`).

    Raises:
        WeightsError: as `hub_config`, and for a tensor that has no place in a Llama model.
    """
    config = hub_config(file)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, Stored] = {}
    for tensor in file.tensors:
        name = hub_name(tensor.name)
        if name is None:
            raise WeightsError(
                f"{file.path} holds {tensor.name} {list(tensor.shape)}, which a Llama model has no "
                "place for"
            )
        num_heads = heads.get(tensor.name.split(".")[-2], 0)
        found[name] = replace(tensor, num_heads=num_heads)
    return HubFolder(file.path, config, found)


def hub_config(file: Gguf) -> Json:
    """Return what a config.json of the same model says, in the Hub's keys.

    Embeddings are tied where the file has no `output.weight`.

    Raises:
        WeightsError: if the architecture is not `llama`, a number is missing, or positions are
            scaled (`rope_freqs.weight`, `llama.rope.scaling.*`).
    """
    meta, path = file.metadata, file.path
    _refuse_variants(file)

    def count(key: str) -> int:
        return _count(meta.get(f"llama.{key}"), f"llama.{key}", path)

    heads, embed = count("attention.head_count"), count("embedding_length")
    default_kv = meta.get("llama.attention.head_count_kv", heads)
    head_dim = meta.get("llama.attention.key_length", meta.get("llama.rope.dimension_count"))
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    if "token_embd.weight" not in rows:
        raise WeightsError(f"{path} has no token_embd.weight: it holds no whole model")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": rows["token_embd.weight"],
        "hidden_size": embed,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(default_kv, "llama.attention.head_count_kv", path),
        "head_dim": embed // heads if head_dim is None else _count(head_dim, "head size", path),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": _real(meta.get("llama.attention.layer_norm_rms_epsilon"), path=path),
        "rope_theta": _real(meta.get("llama.rope.freq_base", 10_000.0), path=path),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in rows,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def hub_name(name: str) -> str | None:
    """Return the Hub's name of a tensor, e.g. `blk.0.attn_q.weight`; None if it has none."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def unpermuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return q's or k's rows [heads·H, D] in the order that rotates i with i + H/2.

    llama.cpp rotates neighbours, 2i with 2i + 1, and stores a Llama head's rows as
    0, H/2, 1, H/2 + 1, … so that both give the same scores. A head is therefore [H/2, 2] rows
    there and [2, H/2] rows here: the two dims change places.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Format(NamedTuple):
    """How values are stored.

    Attributes:
        code: its number in the file.
        block_values: values that are stored together.
        block_bytes: bytes of them.
        values: raw bytes, whole blocks, to values in order.
    """

    code: int
    block_values: int
    block_bytes: int
    values: Callable[[np.ndarray], np.ndarray]

    def size(self, num_values: int) -> int:
        """Return the bytes of `num_values` values, a multiple of block_values."""
        return num_values // self.block_values * self.block_bytes


def _scales(block: np.ndarray, place: int) -> np.ndarray:
    """Return the float16 at `place` of each block as float32 [blocks 1]."""
    return block[:, 2 * place : 2 * place + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(block: np.ndarray) -> np.ndarray:
    """Return 4-bit numbers: the low halves are a block's first 16 values, the high its last."""
    return np.concatenate([block & 15, block >> 4], axis=1).astype(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """Return (q - 8) · scale."""
    block = raw.reshape(-1, 18)
    return (_nibbles(block[:, 2:]) - 8) * _scales(block, 0)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """Return q · scale + least."""
    block = raw.reshape(-1, 20)
    return _nibbles(block[:, 4:]) * _scales(block, 0) + _scales(block, 1)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """Return q · scale, q signed."""
    block = raw.reshape(-1, 34)
    return block[:, 2:].view(np.int8).astype(np.float32) * _scales(block, 0)


FORMATS: dict[str, Format] = {
    "F32": Format(0, 1, 4, lambda raw: raw.view("<f4")),
    "F16": Format(1, 1, 2, lambda raw: raw.view("<f2")),
    "BF16": Format(30, 1, 2, lambda raw: raw.view(ml_dtypes.bfloat16)),
    "Q4_0": Format(2, BLOCK, 18, _q4_0),
    "Q4_1": Format(3, BLOCK, 20, _q4_1),
    "Q8_0": Format(8, BLOCK, 34, _q8_0),
}
CODES = {stored.code: name for name, stored in FORMATS.items()}
# Known to llama.cpp, not read here: for the message only.
OTHERS = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}


class _Cursor:
    """Reads forward; the end of the file is an error that names the file and the place."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.at = 0
        self._data = data

    def bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise WeightsError(
                f"{self.path} is cut short or damaged: {count} bytes are wanted at byte {self.at} "
                f"of {len(self._data)}"
            )
        self.at += count
        return self._data[self.at - count : self.at].tobytes()

    def number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self.bytes(struct.calcsize(kind)))[0]

    def text(self) -> str:
        raw = self.bytes(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            raise WeightsError(
                f"{self.path}: text before byte {self.at} is not UTF-8: {err}"
            ) from err

    def value(self, kind: int) -> object:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self._list(self.number("I"), self.number("Q"))
        if kind not in SCALARS:
            raise WeightsError(f"{self.path}: unknown kind of value {kind} before byte {self.at}")
        return self._list(kind, 1)[0]

    def _list(self, kind: int, count: int) -> list[object]:
        if kind in SCALARS:
            raw = self.bytes(count * struct.calcsize(SCALARS[kind]))
            return list(struct.unpack(f"<{count}{SCALARS[kind]}", raw))
        return [self.value(kind) for _ in range(count)]


def _tensor_header(cursor: _Cursor) -> GgufTensor:
    """Return a tensor's entry, its offset counted from where the data begin."""
    name = cursor.text()
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    code, offset = cursor.number("I"), cursor.number("Q")
    if code not in CODES:
        raise WeightsError(
            f"{cursor.path}: {name} is stored as {OTHERS.get(code, f'type {code}')}; "
            f"{', '.join(FORMATS)} are read. Take such a file of this model"
        )
    stored = FORMATS[CODES[code]]
    # Rows are read apart; in a list of values each is a row.
    row = dims[0] if len(dims) > 1 else 1
    if not dims or not all(dims) or row % stored.block_values:
        raise WeightsError(
            f"{cursor.path}: {name} has the dims {dims}; {CODES[code]} stores rows of whole blocks "
            f"of {stored.block_values} values"
        )
    form, dtype = CODES[code], "F32" if stored.block_values > 1 else CODES[code]
    return GgufTensor(cursor.path, dtype, tuple(reversed(dims)), offset, name, form)


def _check_bounds(tensors: tuple[GgufTensor, ...], *, path: Path, file_bytes: int) -> None:
    twice = [name for name, count in Counter(t.name for t in tensors).items() if count > 1]
    if twice:
        raise WeightsError(f"{path} holds more than one tensor called {listed(twice)}")
    for tensor in tensors:
        end = tensor.offset + tensor.stored_bytes
        if end > file_bytes:
            raise WeightsError(
                f"{path} is cut short: {tensor.name} ends at byte {end}, the file has {file_bytes}"
            )


def _refuse_variants(file: Gguf) -> None:
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise WeightsError(
            f"{file.path} holds a model of architecture {architecture!r}; GGUF files of `llama` "
            "are read. Convert the model's safetensors instead"
        )
    scaled = [tensor.name for tensor in file.tensors if tensor.name.startswith("rope_freqs")]
    scaled += [
        key
        for key, value in file.metadata.items()
        if key.startswith("llama.rope.scaling") and value not in ("none", 0, 1)
    ]
    if scaled:
        raise WeightsError(
            f"{file.path} scales positions ({listed(scaled)}), which is not read from GGUF. "
            "Convert the model's safetensors instead"
        )


def _count(value: object, key: str, path: Path) -> int:
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{path}: {key} is {value!r}, not a positive number")
    return value


def _real(value: object, *, path: Path) -> float:
    if not isinstance(value, float):
        raise WeightsError(f"{path}: {value!r} stands where a number is needed")
    # The file keeps float32: 1e-5 comes out as 9.999999747378752e-06. The shortest decimal that
    # rounds to the same float32 is what was meant.
    return float(str(np.float32(value)))
