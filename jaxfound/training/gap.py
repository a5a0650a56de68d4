"""How far one number format is from another: sums over tokens, intervals, the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float

from jaxfound.config.precision import PrecisionConfig
from jaxfound.data.text_rows import TextRows

# Margins below which flips are counted, nats: a tie but for rounding, a near tie, a close call.
MARGINS = (0.01, 0.1, 0.5)
RESAMPLES = 2000
# With fewer documents than this, pieces are drawn: a bootstrap of few units is far too narrow.
MIN_DOCUMENTS = 20

Unit = Literal["documents", "pieces"]
Verdict = Literal["passed", "worse", "not shown"]


class Moves(NamedTuple):
    """How model b differs from model a at each token [B T].

    Attributes:
        agrees: the first choices are the same.
        kl: KL(b || a), nats.
        margin: of a's first choice before its second, nats.
    """

    agrees: Bool[Array, "B T"]
    kl: Float[Array, "B T"]
    margin: Float[Array, "B T"]


class PerToken(NamedTuple):
    """Numbers of each token: -log p(target) of one or two models, and how the second moved."""

    nats: tuple[Float[Array, "B T"], ...]
    moves: Moves | None


@dataclass
class Tally:
    """Sums over all tokens, float64.

    Attributes:
        nats: of each model and piece, [models P].
        kl: sum of KL(b || a).
        max_kl: its largest value.
        flip_margins: margin in a of every flip, an array a batch.
    """

    nats: np.ndarray
    kl: float = 0.0
    max_kl: float = 0.0
    flip_margins: list[np.ndarray] = field(default_factory=list)

    def add(self, found: PerToken, piece: np.ndarray) -> None:
        """Add a batch whose slots belong to these pieces [B T], -1 being no token."""
        real = piece >= 0
        for total, nats in zip(self.nats, found.nats, strict=True):
            np.add.at(total, piece[real], np.asarray(nats)[real])
        if found.moves is None:
            return
        agrees, kl, margin = (np.asarray(values)[real] for values in found.moves)
        self.kl += float(kl.sum(dtype=np.float64))
        # numpy's maximum keeps NaN, which Python's would drop.
        self.max_kl = float(np.maximum(self.max_kl, kl.max(initial=0.0)))
        self.flip_margins.append(margin[~agrees])


@dataclass(frozen=True)
class Score:
    """The loss of one precision.

    Attributes:
        precision: its name, as `name_of` writes it.
        loss: nats a token.
        perplexity: e^loss.
        bits_per_byte: bits of the whole text over the UTF-8 bytes that are predicted.
    """

    precision: str
    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Flips:
    """Flips at which a's first choice was less than `below` nats before its second."""

    below: float
    count: int


@dataclass(frozen=True)
class Gap:
    """How far b is from a on the same tokens, teacher forced.

    Attributes:
        loss_increase: loss of b less that of a, nats a token.
        low: lower end of its 95 % interval; -inf if there is one unit alone.
        high: upper end.
        unit: what the bootstrap draws.
        num_units: how many of them there are.
        agreement: share of tokens at which both have the same first choice.
        mean_kl: mean of KL(b || a), nats a token.
        max_kl: its largest value.
        num_flips: tokens at which the first choices differ.
        max_flip_margin: largest margin in a at a flip, nats; 0 without flips.
        flips_by_margin: how many were undecided in a, by bound.
    """

    loss_increase: float
    low: float
    high: float
    unit: Unit
    num_units: int
    agreement: float
    mean_kl: float
    max_kl: float
    num_flips: int
    max_flip_margin: float
    flips_by_margin: tuple[Flips, ...]

    def verdict(self, max_drop: float) -> Verdict:
        """Return whether b is at most `max_drop` nats a token worse than a.

        It passed if the upper end of the interval is within the bound, so that neither little
        text nor much noise lets damage through. It is worse if the lower end is beyond. If the
        bound lies between them, or b's loss is no number, the text does not show it.
        """
        if self.high <= max_drop:
            return "passed"
        return "worse" if self.low > max_drop else "not shown"


@dataclass(frozen=True)
class Comparison:
    """What a text says about one precision, or about two of them.

    Attributes:
        step: training steps that the weights have seen.
        seq_len: most tokens of a piece that are predicted.
        num_tokens: tokens that were predicted.
        num_documents: documents that hold them.
        num_pieces: what these were cut into.
        num_bytes: UTF-8 bytes of the text that was predicted.
        device: kind of device, which decides how a format is computed.
        a: the first precision.
        b: the second, or None.
        gap: from a to b, or None.
    """

    step: int
    seq_len: int
    num_tokens: int
    num_documents: int
    num_pieces: int
    num_bytes: int
    device: str
    a: Score
    b: Score | None
    gap: Gap | None


def summary(
    tally: Tally, rows: TextRows, formats: Sequence[PrecisionConfig], *, step: int, device: str
) -> Comparison:
    """Return what the sums of one or two formats say."""
    scores = [
        score_of(each, float(nats.sum()), rows)
        for each, nats in zip(formats, tally.nats, strict=True)
    ]
    return Comparison(
        step=step,
        seq_len=rows.seq_len,
        num_tokens=rows.num_tokens,
        num_documents=len(np.unique(rows.documents)),
        num_pieces=len(rows.lengths),
        num_bytes=rows.num_bytes,
        device=device,
        a=scores[0],
        b=scores[1] if len(scores) == 2 else None,
        gap=gap_of(tally, rows) if len(scores) == 2 else None,
    )


def score_of(precision: PrecisionConfig, nats: float, rows: TextRows) -> Score:
    """Return the loss that `nats` over all tokens are; a perplexity beyond float64 is infinite."""
    loss = nats / rows.num_tokens
    too_large = loss > math.log(np.finfo(np.float64).max)
    return Score(
        precision=name_of(precision),
        loss=loss,
        perplexity=math.inf if too_large else math.exp(loss),
        bits_per_byte=nats / math.log(2) / rows.num_bytes if rows.num_bytes else math.inf,
    )


@dataclass(frozen=True)
class Rise:
    """By how much a loss is higher on the same tokens.

    Attributes:
        loss_increase: nats a token.
        low: lower end of its 95 % interval; -inf if there is one unit alone.
        high: upper end.
        unit: what the bootstrap draws.
        num_units: how many of them there are.
    """

    loss_increase: float
    low: float
    high: float
    unit: Unit
    num_units: int


def rise_of(extra: np.ndarray, rows: TextRows) -> Rise:
    """Return the rise of a loss, nats a token, and its 95 % interval.

    Args:
        extra: by how much each piece costs more, nats [P].
        rows: the text.
    """
    _, document_P = np.unique(rows.documents, return_inverse=True)
    by_document = int(document_P.max()) + 1 >= MIN_DOCUMENTS
    unit_P = document_P if by_document else np.arange(len(extra))
    counts_U = np.bincount(unit_P, weights=rows.lengths.astype(np.float64))
    low, high = bootstrap(np.bincount(unit_P, weights=extra), counts_U)
    mean, unit = float(extra.sum()) / rows.num_tokens, "documents" if by_document else "pieces"
    return Rise(mean, low, high, unit, len(counts_U))


def gap_of(tally: Tally, rows: TextRows) -> Gap:
    """Return how far the second model is from the first."""
    rise = rise_of(tally.nats[1] - tally.nats[0], rows)
    margins = np.concatenate(tally.flip_margins)
    return Gap(
        **asdict(rise),
        agreement=1 - len(margins) / rows.num_tokens,
        mean_kl=tally.kl / rows.num_tokens,
        max_kl=tally.max_kl,
        num_flips=len(margins),
        max_flip_margin=float(margins.max(initial=0.0)),
        flips_by_margin=tuple(Flips(m, int((margins < m).sum())) for m in MARGINS),
    )


def bootstrap(extra: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval of sum(extra) / sum(counts).

    Args:
        extra: what b loses more than a in each unit, nats [U]: both losses of a unit are drawn
            together.
        counts: tokens of each unit, [U].

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3.
    """
    num = len(extra)
    if not np.isfinite(extra).all():
        return math.nan, math.nan
    if num < 2:
        return -math.inf, math.inf
    rng = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(0, num, num)
        means[i] = extra[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def name_of(precision: PrecisionConfig) -> str:
    """Return a precision as the command line takes it, e.g. `bfloat16,layers.ffn.*=fp8`."""
    rules = [f"{rule.pattern}={rule.format}" for rule in precision.rules]
    return ",".join([precision.compute, *rules])
