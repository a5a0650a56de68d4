"""What a published folder will hold: every array by name, its format, and the config."""

from typing import Literal

import numpy as np

from jaxfound.config.model import ModelConfig
from jaxfound.models.weights.config_in import FORMATS
from jaxfound.models.weights.config_out import write_config
from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import Json
from jaxfound.models.weights.fp8 import SCALE, scale_shape
from jaxfound.models.weights.layout import DTYPES, FP8
from jaxfound.models.weights.origin import Origin
from jaxfound.models.weights.rows import Entry, copies
from jaxfound.models.weights.writer import Planned

BLOCK = (128, 128)
# Small enough to matter nothing, and rounding it moves tokens to other experts.
ROUTER_BIAS = "e_score_correction_bias"
ExportFormat = Literal["stored", "float32", "bfloat16", "float16", "fp8"]


def rounded(rows: np.ndarray, dtype: str, *, name: str) -> np.ndarray:
    """Return rows of an array in another format.

    Raises:
        WeightsError: if a finite number is too large for it; names the array.
    """
    with np.errstate(over="ignore"):
        found = rows.astype(DTYPES[dtype])
    if found.dtype == rows.dtype or not np.isinf(found).any():
        return found
    lost = np.isinf(found) & np.isfinite(rows)
    if lost.any():
        largest = float(np.abs(rows[lost].astype(np.float32)).max())
        raise WeightsError(
            f"{name}: {int(lost.sum())} of its elements are too large for {dtype}, up to "
            f"{largest:g}: they would become infinite. Write bfloat16 or float32"
        )
    return found


class Outgoing:
    """Which arrays a published folder of a model holds, in which format.

    Args:
        model: the model.
        wanted: its published arrays; those that repeat another are added.
        dtype: as in `export_hub`.
        origin: what is known of the folder that the weights came from.

    Attributes:
        arrays: in the order of the files.
        formats: by name.
        copies: names of the arrays that repeat one, by its name.
        block: rows and columns that share an fp8 scale.
        has_fp8: True when there is an array in fp8.
    """

    def __init__(
        self, model: ModelConfig, wanted: list[Entry], *, dtype: ExportFormat, origin: Origin
    ) -> None:
        self.origin = origin
        self.copies: dict[str, list[str]] = {}
        for name, of in copies(model).items():
            self.copies.setdefault(of, []).append(name)
        config = origin.config.get("quantization_config")
        block = config.get("weight_block_size") if isinstance(config, dict) else None
        self.block: tuple[int, int] = tuple(block) if isinstance(block, list) else BLOCK
        self._model, self._dtype = model, dtype
        self.arrays: list[Planned] = []
        for entry in {e.hub: e for e in wanted}.values():
            self._add(entry)
        self.formats = {p.name: p.dtype for p in self.arrays}
        self.has_fp8 = any(p.dtype in FP8 for p in self.arrays)

    def config(self) -> Json:
        """Return the config.json that says so.

        Raises:
            WeightsError: if no published class computes this model.
        """
        return write_config(
            self._model,
            dtype=self.torch_dtype,
            fp8_block=self.block if self.has_fp8 else None,
            kept=self.origin.config,
        )

    @property
    def torch_dtype(self) -> str:
        """The format that config.json names: that of most elements, bfloat16 beside fp8."""
        if self.has_fp8:
            return "bfloat16"
        sizes: dict[str, int] = {}
        for planned in self.arrays:
            sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.num_bytes
        most = max(sizes, key=lambda name: sizes[name])
        return next((torch for torch, name in FORMATS.items() if name == most), "float32")

    def _add(self, entry: Entry) -> None:
        dtype = self._format(entry)
        self.arrays.append(Planned(entry.hub, dtype, entry.shape))
        if dtype in FP8:
            shape = scale_shape(entry.shape, self.block)
            self.arrays.append(Planned(entry.hub + SCALE, "F32", shape))
        # Beside the array that they repeat: in its format, and only where the model has them.
        self.arrays += [Planned(n, dtype, entry.shape) for n in self.copies.get(entry.hub, ())]

    def _format(self, entry: Entry) -> str:
        if self._dtype == "stored":
            return self.origin.formats.get(entry.hub, "F32")
        if entry.hub.endswith(ROUTER_BIAS):
            return "F32"
        if self._dtype == "fp8":
            return "F8_E4M3" if entry.row.is_quantized else "BF16"
        return FORMATS[self._dtype]
