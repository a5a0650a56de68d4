"""What a step of decoding has to read from memory: no program is faster than that."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import jax

from jaxfound.config.model import ModelConfig
from jaxfound.models.build import Arrays

# Share of a device's peak bandwidth that reading gets. One H200 streamed 4.3 of its 4.8 TB/s.
STREAMED = 4.3 / 4.8
EXPERTS = "*.experts.*"
# Of these a step reads a row a token.
PICKED = ("embedding.table",)


def expected_share(num_tokens: int, *, num_choices: int, num_experts: int) -> float:
    """Return the share of experts that tokens touch if each chooses evenly: 1 - (1 - A/E)^M."""
    return 1.0 - (1.0 - num_choices / num_experts) ** num_tokens


def weight_bytes_read(cfg: ModelConfig, arrays: Arrays, *, num_tokens: int) -> int:
    """Return the bytes of weights that a step with so many tokens reads.

    Args:
        cfg: the model.
        arrays: as serving keeps them.
        num_tokens: M; of the experts those are read that they touch, chosen evenly.
    """
    share = 1.0
    if cfg.ffn == "moe":
        moe = cfg.moe
        share = expected_share(num_tokens, num_choices=moe.top_k, num_experts=moe.num_experts)
    total = 0.0
    for path, leaf in _leaves(arrays):
        if path in PICKED and not cfg.tie_embeddings:
            continue
        total += _bytes_of(leaf) * (share if fnmatchcase(path, EXPERTS) else 1.0)
    return math.ceil(total)


def _leaves(arrays: Arrays) -> Iterable[tuple[str, object]]:
    groups: tuple[Mapping[str, object], ...] = tuple(arrays)
    return ((path, leaf) for group in groups for path, leaf in group.items())


def _bytes_of(leaf: object) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(leaf))
