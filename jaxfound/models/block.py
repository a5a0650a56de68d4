"""One decoder layer: mixer and feed-forward, each behind its norm and beside the residual."""

from typing import Literal, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.cache import LayerCache
from jaxfound.models.execution import Execution
from jaxfound.models.layers.attention import CachedView, GroupedQueryAttention, View
from jaxfound.models.layers.dropout import Noise, Place, drop
from jaxfound.models.layers.mla import LatentAttention
from jaxfound.models.layers.mlp import Mlp
from jaxfound.models.layers.moe import MixtureOfExperts
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.router import LoadStats
from jaxfound.models.pages import PagedView, Pages
from jaxfound.parallelism.stream import from_stream, to_stream

MIXERS = {"gqa": GroupedQueryAttention, "mla": LatentAttention}


class BlockInput(NamedTuple):
    """What every layer of a row shares.

    Attributes:
        view: what each token may see.
        real: False for padding [B T].
        noise: what dropout draws its masks from; None where nothing is dropped.
    """

    view: View | CachedView | PagedView
    real: Bool[Array, "B T"]
    noise: Noise | None = None

    def of_layer(self, number: int | Int[Array, ""]) -> "BlockInput":
        """Return the same for one layer: 0 is before the first, then those of the model in order.

        The modules that look ahead come after the main stack.
        """
        return self if self.noise is None else self._replace(noise=self.noise.of_layer(number))


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(
        self,
        cfg: ModelConfig,
        ffn: Literal["dense", "moe"],
        *,
        rngs: nnx.Rngs,
        execution: Execution,
        path: str,
    ) -> None:
        self.mixer_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        self.mixer = MIXERS[cfg.mixer](cfg, rngs=rngs, execution=execution, path=f"{path}.mixer")
        self.ffn_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        if ffn == "moe":
            self.ffn = MixtureOfExperts(cfg, rngs=rngs, execution=execution, path=f"{path}.ffn")
        else:
            self.ffn = Mlp(cfg, cfg.ffn_dim, rngs=rngs, execution=execution, path=f"{path}.ffn")
        self.rules = execution.rules
        self.dropout = cfg.dropout

    def __call__(
        self, x: Float[Array, "B T D"], row: BlockInput
    ) -> tuple[Float[Array, "B T D"], LoadStats | None]:
        """Return the layer's output and, with experts, their load.

        Args:
            row: as `BlockInput.of_layer` gives it for this layer.
        """
        mixed = self.mixer(from_stream(self.mixer_norm(x), self.rules), row.view)
        return self._feed_forward(x + self._drop(to_stream(mixed, self.rules), row, "mixer"), row)

    def extend(
        self, x: Float[Array, "B T D"], cache: LayerCache, row: BlockInput
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Return the layer's output for T new tokens and the cache that holds them."""
        mixed, cache = self.mixer.extend(self.mixer_norm(x), cache, row.view)
        return self._feed_forward(x + to_stream(mixed, self.rules), row)[0], cache

    def extend_pages(
        self, x: Float[Array, "B T D"], pages: Pages, row: BlockInput
    ) -> tuple[Float[Array, "B T D"], Pages]:
        """Return the layer's output for T new tokens of each row and the pages that hold them."""
        mixed, pages = self.mixer.extend_pages(self.mixer_norm(x), pages, row.view)
        return self._feed_forward(x + to_stream(mixed, self.rules), row)[0], pages

    def _feed_forward(
        self, x: Float[Array, "B T D"], row: BlockInput
    ) -> tuple[Float[Array, "B T D"], LoadStats | None]:
        normed = from_stream(self.ffn_norm(x), self.rules)
        if isinstance(self.ffn, MixtureOfExperts):
            decoding = decodes(row.view)
            mixed, stats = self.ffn(normed, real=row.real, decoding=decoding)
            return x + self._drop(mixed, row, "ffn"), stats
        mixed = to_stream(self.ffn(normed), self.rules)
        return x + self._drop(mixed, row, "ffn"), None

    def _drop(self, x: Float[Array, "B T D"], row: BlockInput, place: Place) -> jax.Array:
        return drop(x, row.noise, place=place, rate=self.dropout, rules=self.rules)


def decodes(view: View | CachedView | PagedView) -> bool:
    """Return whether a step has so few tokens that reading the weights is what takes the time."""
    if isinstance(view, PagedView):
        return view.decoding
    return isinstance(view, CachedView) and view.positions.shape[1] == 1


def layers_apart(blocks: Block) -> list[Block] | None:
    """Return the layers of blocks whose arrays are tuples of layers' arrays; None of a stack."""
    graph, state = nnx.split(blocks)
    flat = [(path, v, v.get_value()) for path, v in nnx.to_flat_state(state)]
    if not isinstance(flat[0][2], tuple):
        return None

    def one(number: int) -> Block:
        layer = [(path, v.replace(value[number])) for path, v, value in flat]
        return nnx.merge(graph, nnx.from_flat_state(layer))

    return [one(number) for number in range(len(flat[0][2]))]
