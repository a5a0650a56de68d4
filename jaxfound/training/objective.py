"""What training minimises: next-token loss, further tokens, balance; each weighed by tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.models.block import BlockInput
from jaxfound.models.decoder import Decoder
from jaxfound.models.layers.dropout import Noise, folded
from jaxfound.models.layers.router import LoadStats
from jaxfound.models.mtp import Ahead, look_ahead
from jaxfound.parallelism.context import arranged, context_degree
from jaxfound.training.batches import arranged_for_context
from jaxfound.training.loss import cross_entropy

# Path of the main stack's routers' biases.
MAIN_ROUTERS = "layers.ffn.router.bias"


class TokenCounts(NamedTuple):
    """Tokens of the whole batch that each term is divided by, at least 1.

    Attributes:
        targets: next-token targets that count.
        ahead: targets that count at each further depth [depths].
        real: tokens that are not padding.
    """

    targets: Float[Array, ""]
    ahead: Float[Array, " depths"]
    real: Float[Array, ""]


class Terms(NamedTuple):
    """Sums of one micro-batch, ready to be added to those of the others.

    Attributes:
        nats: next-token loss, summed over counted targets.
        log_z_squared: for the z-loss.
        ahead_nats: loss of each further depth, summed [depths].
        balance: balance loss of all layers, times tokens.
        expert_counts: tokens each expert got, by the dotted path of its router's bias.
    """

    nats: Float[Array, ""]
    log_z_squared: Float[Array, ""]
    ahead_nats: Float[Array, " depths"]
    balance: Float[Array, ""]
    expert_counts: dict[str, Int[Array, "..."]]


def token_counts(batch: Batch, *, num_depths: int) -> TokenCounts:
    """Return the divisors of a whole batch; every micro-batch uses the same ones."""

    def total(counted: jax.Array) -> jax.Array:
        return jnp.maximum(counted.sum().astype(jnp.float32), 1.0)

    ahead = [total(ahead_of(batch, depth).counted) for depth in range(1, num_depths + 1)]
    return TokenCounts(
        targets=total(batch.loss_mask),
        ahead=jnp.stack(ahead) if ahead else jnp.zeros((0,)),
        real=total(batch.segment_ids > 0),
    )


def ahead_of(batch: Batch, depth: int) -> Ahead:
    """Return what the module of this depth reads and predicts."""
    return look_ahead(batch.targets, batch.loss_mask, batch.segment_ids, depth=depth)


class Piece(NamedTuple):
    """A micro-batch as the model reads it: arranged, if rows are cut over the context axis.

    Attributes:
        batch: its rows.
        places: place of each token in its row, where rows are arranged [T].
        aheads: what each module of multi-token prediction reads and predicts.
        noise: what dropout draws its masks from; None where nothing is dropped.
    """

    batch: Batch
    places: Int[Array, " T"] | None
    aheads: list[Ahead]
    noise: Noise | None = None


def noise_of(rng: UInt32[Array, "2"], step: Int[Array, ""], batch: Batch) -> Noise:
    """Return what dropout draws the masks of a step's whole batch from."""
    return Noise(folded(rng, step), jnp.arange(batch.tokens.shape[0]))


def piece_of(batch: Batch, *, num_depths: int, noise: Noise | None = None) -> Piece:
    """Return a micro-batch as the model reads it.

    What the modules of multi-token prediction read is found in order, before rows are arranged.
    """
    in_order = [ahead_of(batch, depth) for depth in range(1, num_depths + 1)]
    aheads = jax.tree.map(lambda x: arranged(x, context_degree()), in_order)
    return Piece(*arranged_for_context(batch), aheads, noise)


def row_of(model: Decoder, piece: Piece) -> BlockInput:
    """Return what the layers share of a micro-batch's rows."""
    batch, noise = piece.batch, piece.noise
    return model.row(
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        places=piece.places,
        noise=None if noise is None else noise._replace(places=piece.places),
    )


def terms_of(model: Decoder, batch: Batch, *, cfg: RunConfig, noise: Noise | None = None) -> Terms:
    """Return the loss sums of one micro-batch.

    Args:
        noise: what dropout draws the masks of its rows from; None drops nothing.
    """
    piece = piece_of(batch, num_depths=len(model.mtp), noise=noise)
    hidden = model.hidden(piece.batch.tokens, row_of(model, piece))
    loads = {} if hidden.load is None else {MAIN_ROUTERS: hidden.load}
    return end_terms(model, hidden.final, piece, loads=loads, cfg=cfg)


def end_terms(
    model: Decoder,
    final: Float[Array, "B T D"],
    piece: Piece,
    *,
    loads: Mapping[str, LoadStats],
    cfg: RunConfig,
) -> Terms:
    """Return the loss sums of normalised states, those of further tokens among them.

    Args:
        loads: of the main stack's experts, by the path of their routers' bias.
    """
    chunk, batch, row = cfg.train.loss_chunk, piece.batch, row_of(model, piece)
    matrix = model.head.matrix(model.embedding)
    sums = cross_entropy(
        final,
        matrix,
        targets=batch.targets,
        counted=batch.loss_mask,
        head=model.head,
        chunk=chunk,
    )
    loads = dict(loads)
    state, ahead_nats = final, []
    for i, (module, ahead) in enumerate(zip(model.mtp, piece.aheads, strict=True)):
        number = model.cfg.num_layers + 1 + i
        state, load = module(state, model.embedding(ahead.tokens), row.of_layer(number))
        if load is not None:
            loads[f"mtp.{i}.block.ffn.router.bias"] = load
        further = cross_entropy(
            state,
            matrix,
            targets=ahead.targets,
            counted=ahead.counted,
            head=model.head,
            chunk=chunk,
        )
        ahead_nats.append(further.nats)
    return Terms(
        nats=sums.nats,
        log_z_squared=sums.log_z_squared,
        ahead_nats=jnp.stack(ahead_nats) if ahead_nats else jnp.zeros((0,)),
        balance=sum((s.balance_loss.sum() for s in loads.values()), jnp.zeros(())),
        expert_counts={path: s.expert_counts for path, s in loads.items()},
    )


def objective_of(terms: Terms, counts: TokenCounts, *, cfg: RunConfig) -> Float[Array, ""]:
    """Return what is minimised: L = nats + z + λ/D · Σ_d ahead_d + balance, each a token mean.

    Source: DeepSeek-V3, equations 17 and 25 (λ is train.mtp_loss_weight).
    """
    total = terms.nats / counts.targets + terms.balance / counts.real
    total = total + cfg.train.z_loss_weight * terms.log_z_squared / counts.targets
    depths = max(terms.ahead_nats.shape[0], 1)
    return total + cfg.train.mtp_loss_weight / depths * (terms.ahead_nats / counts.ahead).sum()


def load_imbalance(counts: Mapping[str, jax.Array]) -> jax.Array:
    """Return the busiest expert's load over the mean load, the worst of all layers; 1 is even."""
    worst = [
        (c.max(axis=-1) / jnp.maximum(c.astype(jnp.float32).mean(axis=-1), 1.0)).max()
        for c in counts.values()
    ]
    return jnp.stack(worst).max() if worst else jnp.ones(())
