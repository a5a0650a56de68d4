"""Every published array accounted for: taken, known to be of no use, or refused by name."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxfound.config.model import ModelConfig
from jaxfound.models.weights.errors import MAX_NAMED, WeightsError, listed
from jaxfound.models.weights.folder import HubFolder
from jaxfound.models.weights.fp8 import SCALE, scale_shape
from jaxfound.models.weights.layout import FP8, WEIGHTS
from jaxfound.models.weights.rows import Entry, copies

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# A multi-token-prediction layer has it, and no other.
JOIN = "eh_proj.weight"
LAYER = re.compile(r"^model\.layers\.(?P<layer>\d+)\.")
# Names that old exporters wrote and nobody reads.
USELESS = (
    (re.compile(r"rotary_emb\.inv_freq$"), "the frequencies follow from rope_theta"),
    (re.compile(r"attn\.masked_bias$|attn\.bias$"), "a causal mask"),
)


class Unused(NamedTuple):
    """A published array that was left where it is, and why."""

    name: str
    why: str


class Audit(NamedTuple):
    """What became of the arrays of a folder.

    Attributes:
        copies: arrays that must repeat another one: name, and the name of the other.
        unused: arrays that were left.
    """

    copies: dict[str, str]
    unused: tuple[Unused, ...]


def check_tensors(
    folder: HubFolder,
    cfg: ModelConfig,
    wanted: Sequence[Entry],
    *,
    fp8_block: tuple[int, int] | None,
    allow_unused: bool = False,
) -> Audit:
    """Return what becomes of each array, judged by the headers alone.

    Args:
        folder: the checkpoint.
        cfg: the model.
        wanted: the arrays it has.
        fp8_block: block of fp8 scales, None when the config names none.
        allow_unused: leave arrays that are not known here, instead of refusing them.
    Raises:
        WeightsError: names what is missing, mis-shaped, transposed, in a wrong format, or unknown.
    """
    shapes = {entry.hub: entry.shape for entry in wanted}
    repeated = {name: of for name, of in copies(cfg).items() if name in folder.tensors}
    if cfg.tie_embeddings and HEAD in folder.tensors:
        repeated[HEAD] = TABLE
    faults = _missing(folder, cfg, shapes)
    wrong = [
        fault
        for name, shape in {**shapes, **{n: shapes[of] for n, of in repeated.items()}}.items()
        if name in folder.tensors
        for fault in _wrong(folder, name, shape, fp8_block=fp8_block)
    ]
    # A config of another model is wrong of every array.
    faults += wrong[:MAX_NAMED]
    if len(wrong) > MAX_NAMED:
        faults.append(f"… and {len(wrong) - MAX_NAMED} more like these")
    scales = {name + SCALE for name in shapes if _is_fp8(folder, name)}
    rest = [n for n in folder.tensors if n not in shapes and n not in repeated and n not in scales]
    unused = [Unused(name, _reason(name, cfg, folder)) for name in rest]
    unknown = [one.name for one in unused if not one.why]
    if unknown and not allow_unused:
        faults.append(
            f"not part of this model ({len(unknown)}): {listed(unknown)}. A model that has them "
            "computes something else; if they do not matter, leave them with allow_unused"
        )
    if faults:
        raise WeightsError(
            f"{folder.path} does not hold the model of its config:\n  " + "\n  ".join(faults)
        )
    told = (one if one.why else one._replace(why="not part of this model") for one in unused)
    return Audit(repeated, tuple(told))


def _missing(
    folder: HubFolder, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    missing = [name for name in shapes if name not in folder.tensors]
    if not missing:
        return []
    spare = [name for name in folder.tensors if name not in shapes]
    shown = []
    for name in missing:
        looked_for = spare if len(shown) < MAX_NAMED else ()
        near = difflib.get_close_matches(name, looked_for, n=1, cutoff=0.85)
        shown.append(f"{name}{f' (there is {near[0]})' if near else ''}")
    faults = [f"missing ({len(missing)}): {listed(shown)}"]
    if HEAD in missing and not cfg.tie_embeddings:
        faults.append(
            f"without {HEAD} only a model of tied embeddings has a head: if this is one, set "
            "tie_word_embeddings to true in its config.json"
        )
    extra = [n for n in missing if (_layer_of(n) or 0) >= cfg.num_layers]
    if extra:
        faults.append(
            f"{len(extra)} of them belong to multi-token prediction "
            f"(num_nextn_predict_layers={cfg.mtp_depth}): leave it out with mtp=drop"
        )
    return faults


def _wrong(
    folder: HubFolder, name: str, shape: tuple[int, ...], *, fp8_block: tuple[int, int] | None
) -> list[str]:
    """Return what is wrong with the shape or the format of one array."""
    stored = folder.tensors[name]
    if stored.shape != shape:
        turned = ", which is the transpose" if stored.shape == shape[::-1] else ""
        return [f"{name} has shape {list(stored.shape)}{turned}; the config asks for {list(shape)}"]
    if stored.dtype not in WEIGHTS:
        return [f"{name} has format {stored.dtype}; weights are one of {', '.join(WEIGHTS)}"]
    if stored.dtype not in FP8:
        return []
    if fp8_block is None:
        return [f"{name} has format {stored.dtype}, but config.json has no quantization_config "
                "that says which block a scale belongs to"]  # fmt: skip
    scale = folder.tensors.get(name + SCALE)
    if scale is None:
        return [f"{name} has format {stored.dtype}, but there is no {name}{SCALE}"]
    if len(shape) != 2:
        return [f"{name} has format {stored.dtype} and shape {list(shape)}: only matrices have"]
    if scale.shape != scale_shape(shape, fp8_block):
        return [
            f"{name}{SCALE} has shape {list(scale.shape)}; blocks of {list(fp8_block)} of "
            f"{list(shape)} need {list(scale_shape(shape, fp8_block))}"
        ]
    return []


def _is_fp8(folder: HubFolder, name: str) -> bool:
    return name in folder.tensors and folder.tensors[name].dtype in FP8


def _reason(name: str, cfg: ModelConfig, folder: HubFolder) -> str:
    """Return why an array may be left, empty when nobody knows."""
    for pattern, why in USELESS:
        if pattern.search(name):
            return why
    layer = _layer_of(name)
    if layer is None or layer < cfg.num_layers + cfg.mtp_depth:
        return ""
    # Without what joins it to the layers before, it is one more of those.
    if f"model.layers.{layer}.{JOIN}" in folder.tensors:
        return f"multi-token prediction beyond mtp_depth={cfg.mtp_depth}"
    return ""


def _layer_of(name: str) -> int | None:
    found = LAYER.match(name)
    return int(found["layer"]) if found else None
