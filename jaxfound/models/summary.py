"""What a model costs, exactly: parameters by part, FLOPs and cache bytes of a token."""

from typing import NamedTuple

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec
from jaxfound.models.build import describe
from jaxfound.models.cache import bytes_a_token
from jaxfound.parallelism.compute import active_elements, real_elements, score_channels


class Part(NamedTuple):
    """Parameters of one part of the model.

    Attributes:
        name: which part.
        total: parameters stored, vocabulary padding and router biases not counted.
        active: parameters that one token uses.
    """

    name: str
    total: int
    active: int


class Summary(NamedTuple):
    """What a model costs.

    Attributes:
        parts: parameters by part; multi-token prediction last, if there is any.
        padding: parameters that exist only to round the vocabulary up.
        buffers: elements that no optimizer touches.
        flops_causal: forward FLOPs of a token in a row of `seq_len`, half of the scores counted.
        flops_full: the same with all scores, the convention of most published MFU figures.
        cache_bytes: bfloat16 cache bytes of one token.
        seq_len: tokens of the row that the FLOPs are for.
    """

    parts: tuple[Part, ...]
    padding: int
    buffers: int
    flops_causal: int
    flops_full: int
    cache_bytes: int
    seq_len: int

    @property
    def total(self) -> int:
        """Parameters of the main model, multi-token prediction apart."""
        return sum(p.total for p in self.parts if p.name != MTP)

    @property
    def active(self) -> int:
        """Parameters of the main model that one token uses."""
        return sum(p.active for p in self.parts if p.name != MTP)

    @property
    def ahead(self) -> int:
        """Parameters of the multi-token-prediction modules, apart from the main model's."""
        return sum(p.total for p in self.parts if p.name == MTP)


MTP = "multi-token prediction"
# First match names the part of a path.
PARTS = (
    ("mtp.", MTP),
    ("embedding.", "embedding"),
    ("head.", "output head"),
    (".mixer.", "attention"),
    (".router.", "router"),
    (".experts.", "routed experts"),
    (".shared.", "shared experts"),
    (".ffn.", "dense feed-forward"),
    ("", "norms"),
)


def summarize(cfg: ModelConfig, *, seq_len: int) -> Summary:
    """Return what the model costs; nothing is allocated.

    A matmul of a [K N] matrix is 2·K·N FLOPs a token; training costs three forward passes.
    """
    table = describe(cfg)
    totals: dict[str, list[int]] = {name: [0, 0] for _, name in PARTS}
    for spec in table:
        if spec.kind == "param":
            counted = totals[part_of(spec.path)]
            counted[0] += real_elements(spec, cfg)
            counted[1] += active_elements(spec, cfg)
    parts = tuple(Part(name, t, a) for name, (t, a) in sorted(totals.items(), key=_last_mtp) if t)
    matmuls = 2 * sum(active_elements(s, cfg) for s in table if is_multiplied(s, cfg))
    scores = 2 * cfg.num_layers * cfg.num_heads * score_channels(cfg)
    return Summary(
        parts=parts,
        padding=table.size - sum(p.total for p in parts),
        buffers=sum(s.size for s in table if s.kind == "buffer"),
        flops_causal=matmuls + scores * (seq_len + 1) // 2,
        flops_full=matmuls + scores * seq_len,
        cache_bytes=bytes_a_token(cfg),
        seq_len=seq_len,
    )


def part_of(path: str) -> str:
    """Return the name of the part a parameter belongs to."""
    return next(name for fragment, name in PARTS if fragment in path)


def is_multiplied(spec: ParamSpec, cfg: ModelConfig) -> bool:
    """True for matrices of the main model's forward pass; a lookup multiplies nothing."""
    if spec.kind != "param" or not spec.is_matrix or part_of(spec.path) == MTP:
        return False
    return part_of(spec.path) != "embedding" or cfg.tie_embeddings


def _last_mtp(entry: tuple[str, list[int]]) -> bool:
    return entry[0] == MTP
