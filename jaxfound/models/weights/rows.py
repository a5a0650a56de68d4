"""The one table between our arrays and the published ones, read in both directions.

A row says how a published array is looked at so that it has our dims. That view is read when
weights come in and written when they go out, so that one is the inverse of the other.

Letters are those of docs/vocabulary.md; a word is one dim of the published array, and letters of a
word are dims of ours that it holds one after the other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import LAYER_DIMS, STACK_DIMS, ParamSpec, ParamTable


@dataclass(frozen=True)
class Row:
    """One kind of array.

    Attributes:
        ours: path after the stack's, e.g. `mixer.query.kernel`.
        hub: published name after the layer's.
        hub_dims: words of the published array's dims, e.g. `NH D`.
        our_dims: letters of our array's dims without layers and experts, e.g. `D N H`.
        before: key of model.mla: channels of another row of the table that come before ours, in
            the last letter of the first word.
        after: the same for channels that come after ours.
    """

    ours: str
    hub: str
    hub_dims: str
    our_dims: str
    before: str = ""
    after: str = ""

    @property
    def is_quantized(self) -> bool:
        """True for the matrices that an fp8 checkpoint stores in fp8: those of linear layers."""
        linear = self.hub.startswith(("self_attn.", "mlp.")) and self.hub != "mlp.gate.weight"
        return linear and " " in self.hub_dims


TOP = (
    Row("embedding.table", "model.embed_tokens.weight", "V D", "V D"),
    Row("final_norm.scale", "model.norm.weight", "D", "D"),
    Row("head.kernel", "lm_head.weight", "V D", "D V"),
)
LAYER = (
    Row("mixer_norm.scale", "input_layernorm.weight", "D", "D"),
    Row("ffn_norm.scale", "post_attention_layernorm.weight", "D", "D"),
    Row("mixer.out.kernel", "self_attn.o_proj.weight", "D NH", "N H D"),
    # Grouped-query attention.
    Row("mixer.query.kernel", "self_attn.q_proj.weight", "NH D", "D N H"),
    Row("mixer.key.kernel", "self_attn.k_proj.weight", "KH D", "D K H"),
    Row("mixer.value.kernel", "self_attn.v_proj.weight", "KH D", "D K H"),
    # Latent attention; Q is the query's rank. Two of ours share one array of theirs, twice.
    Row("mixer.query_down.kernel", "self_attn.q_a_proj.weight", "Q D", "D Q"),
    Row("mixer.query_norm.scale", "self_attn.q_a_layernorm.weight", "Q", "Q"),
    Row("mixer.query_up.kernel", "self_attn.q_b_proj.weight", "NH Q", "Q N H"),
    Row("mixer.latent_down.kernel", "self_attn.kv_a_proj_with_mqa.weight", "C D", "D C",
        after="qk_rope_head_dim"),
    Row("mixer.rope_key.kernel", "self_attn.kv_a_proj_with_mqa.weight", "R D", "D R",
        before="kv_lora_rank"),
    Row("mixer.latent_norm.scale", "self_attn.kv_a_layernorm.weight", "C", "C"),
    Row("mixer.key_up.kernel", "self_attn.kv_b_proj.weight", "NH C", "C N H",
        after="v_head_dim"),
    Row("mixer.value_up.kernel", "self_attn.kv_b_proj.weight", "NH C", "C N H",
        before="qk_nope_head_dim"),
    # Feed-forward: dense, or router, shared network and experts.
    Row("ffn.gate.kernel", "mlp.gate_proj.weight", "F D", "D F"),
    Row("ffn.up.kernel", "mlp.up_proj.weight", "F D", "D F"),
    Row("ffn.down.kernel", "mlp.down_proj.weight", "D F", "F D"),
    Row("ffn.router.kernel", "mlp.gate.weight", "E D", "D E"),
    Row("ffn.router.bias", "mlp.gate.e_score_correction_bias", "E", "E"),
    Row("ffn.shared.gate.kernel", "mlp.shared_experts.gate_proj.weight", "F D", "D F"),
    Row("ffn.shared.up.kernel", "mlp.shared_experts.up_proj.weight", "F D", "D F"),
    Row("ffn.shared.down.kernel", "mlp.shared_experts.down_proj.weight", "D F", "F D"),
    Row("ffn.experts.gate", "mlp.experts.{}.gate_proj.weight", "F D", "D F"),
    Row("ffn.experts.up", "mlp.experts.{}.up_proj.weight", "F D", "D F"),
    Row("ffn.experts.down", "mlp.experts.{}.down_proj.weight", "D F", "F D"),
)  # fmt: skip
# A query without a low rank is one matrix, under another name.
FULL_QUERY = Row("mixer.query_up.kernel", "self_attn.q_proj.weight", "NH D", "D N H")
MTP = (
    Row("embed_norm.scale", "enorm.weight", "D", "D"),
    Row("hidden_norm.scale", "hnorm.weight", "D", "D"),
    # J = 2 D: the embedding's channels, then the hidden state's.
    Row("join.kernel", "eh_proj.weight", "D J", "J D"),
    Row("final_norm.scale", "shared_head.norm.weight", "D", "D"),
)
# What a multi-token-prediction layer repeats of the main model; ours shares it.
MTP_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


class Entry(NamedTuple):
    """One published array, or the part of one, and where it is in ours.

    Attributes:
        path: our array.
        at: place in its leading layers and experts dims.
        hub: the published name.
        row: how it is looked at.
        sizes: real size of each letter of the row, vocabulary padding left out.
        before: channels of the published array before ours; see `Row`.
        after: channels after ours.
    """

    path: str
    at: tuple[int, ...]
    hub: str
    row: Row
    sizes: dict[str, int]
    before: int
    after: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole published array."""
        sizes = self._stored_sizes()
        return tuple(math.prod(sizes[c] for c in word) for word in self.row.hub_dims.split())

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return `tensor`, published and contiguous, as ours sees it; no element is copied."""
        sizes = self._stored_sizes()
        letters = self.row.hub_dims.replace(" ", "")
        split = tensor.reshape([sizes[c] for c in letters])
        cut = tuple(
            slice(self.before, self.before + self.sizes[c])
            if c == self._cut_letter
            else slice(None)
            for c in letters
        )
        return split[cut].transpose([letters.index(c) for c in self.row.our_dims.split()])

    def rows(self, wanted: tuple[slice, ...]) -> tuple["Entry", int, int, tuple[slice, ...]]:
        """Return what must be read for `wanted`, slices of our dims.

        Returns:
            an entry of the rows alone, their first and last, and `wanted` inside them.
        """
        first = self.row.hub_dims.split()[0]
        letter, place = first[0], self.row.our_dims.split().index(first[0])
        start, stop, _ = wanted[place].indices(self.sizes[letter])
        stop = max(start, stop)
        per_row = math.prod(self._stored_sizes()[c] for c in first[1:])
        skipped = self.before if letter == self._cut_letter else 0
        cut_ends = (0, 0) if letter == self._cut_letter else (self.before, self.after)
        part = self._replace(
            sizes={**self.sizes, letter: stop - start}, before=cut_ends[0], after=cut_ends[1]
        )
        inside = tuple(slice(None) if i == place else w for i, w in enumerate(wanted))
        return part, (skipped + start) * per_row, (skipped + stop) * per_row, inside

    @property
    def has_whole_rows(self) -> bool:
        """True when no other array of ours has a part of the same published rows."""
        return not self._cut_letter or self._cut_letter == self.row.hub_dims[0]

    def stretches(self, max_elements: int) -> Iterator[tuple[slice, ...]]:
        """Yield slices of our dims that together are all of it, by stretches of published rows.

        Args:
            max_elements: of the published rows of one stretch; one row may have more.
        """
        letter = self.row.hub_dims[0]
        size, dims = self.sizes[letter], self.row.our_dims.split()
        stored = self._stored_sizes()
        one = math.prod(self.shape) // stored[letter]
        step = max(max_elements // max(one, 1), 1)
        for start in range(0, size, step):
            yield tuple(
                slice(start, min(start + step, size)) if d == letter else slice(0, self.sizes[d])
                for d in dims
            )

    @property
    def _cut_letter(self) -> str:
        return self.row.hub_dims.split()[0][-1] if self.before or self.after else ""

    def _stored_sizes(self) -> dict[str, int]:
        """Return the size of each letter in the published array."""
        cut = self._cut_letter
        more = {cut: self.before + self.sizes[cut] + self.after} if cut else {}
        return {**self.sizes, **more}


def entries(cfg: ModelConfig, table: ParamTable) -> list[Entry]:
    """Return every published array that the model has, in the order of the published layers.

    Args:
        cfg: the model.
        table: its arrays, from `models.describe`.
    """
    found = [e for spec in table for e in _entries(spec, cfg)]
    return sorted(found, key=lambda e: _order(e.hub))


def copies(cfg: ModelConfig) -> dict[str, str]:
    """Return the published arrays that repeat another one, and which."""
    head = "model.embed_tokens.weight" if cfg.tie_embeddings else "lm_head.weight"
    return {
        f"model.layers.{cfg.num_layers + depth}.{name}": head
        if whole == "lm_head.weight"
        else whole
        for depth in range(cfg.mtp_depth)
        for name, whole in MTP_COPIES.items()
    }


def has_no_row(spec: ParamSpec, cfg: ModelConfig) -> bool:
    """True for our array that the architecture has not: the bias of a softmax router, all zeros."""
    return spec.path.endswith("ffn.router.bias") and cfg.moe.scoring == "softmax"


def _entries(spec: ParamSpec, cfg: ModelConfig) -> Iterator[Entry]:
    if has_no_row(spec, cfg):
        return
    prefix, first, row = _row_of(spec, cfg)
    stacks = tuple(n for n, d in zip(spec.shape, spec.dims, strict=True) if d in STACK_DIMS)
    sizes = dict(zip(row.our_dims.split(), spec.shape[len(stacks) :], strict=True))
    if "V" in sizes:
        sizes["V"] = cfg.vocab_size
    before, after = (getattr(cfg.mla, k) if k else 0 for k in (row.before, row.after))
    for index in np.ndindex(stacks):
        within = list(index)
        layer = first + (within.pop(0) if set(LAYER_DIMS) & set(spec.dims) else 0)
        name = f"{prefix.format(layer)}{row.hub.format(*within)}"
        yield Entry(spec.path, tuple(map(int, index)), name, row, sizes, before, after)


def _row_of(spec: ParamSpec, cfg: ModelConfig) -> tuple[str, int, Row]:
    """Return the published prefix, the number of the first layer, and the row of one array."""
    head, _, rest = spec.path.partition(".")
    if head == "mtp":
        depth, _, rest = rest.partition(".")
        rows = {row.ours: row for row in MTP} | {
            f"block.{row.ours}": row for row in layer_rows(cfg)
        }
        return "model.layers.{}.", cfg.num_layers + int(depth), rows[rest]
    if head in ("leading", "layers"):
        first = cfg.num_leading_layers if head == "layers" else 0
        return "model.layers.{}.", first, {row.ours: row for row in layer_rows(cfg)}[rest]
    return "", 0, {row.ours: row for row in TOP}[spec.path]


def layer_rows(cfg: ModelConfig) -> tuple[Row, ...]:
    """Return the rows of a layer of this model."""
    if cfg.mixer == "mla" and not cfg.mla.q_lora_rank:
        return (*LAYER, FULL_QUERY)
    return LAYER


def by_path(found: list[Entry]) -> Mapping[str, list[Entry]]:
    """Return the entries of each of our arrays."""
    grouped: dict[str, list[Entry]] = {}
    for entry in found:
        grouped.setdefault(entry.path, []).append(entry)
    return grouped


def _order(hub: str) -> tuple[int, int, int, str]:
    """Sort as published files do: embedding, layers, last norm, head; numbers as numbers."""
    numbers = [int(word) for word in hub.split(".") if word.isdecimal()]
    rank = 1 if numbers else {"model.embed_tokens.weight": 0, "model.norm.weight": 2}.get(hub, 3)
    layer, expert = (*numbers, -1, -1)[:2]
    return rank, layer, expert, hub
