"""Mixture of experts: route, compute each expert on its own tokens, mix."""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.config.parallel import AxisName
from jaxfound.config.precision import Format
from jaxfound.models.execution import Execution
from jaxfound.models.layers.expert_parallel import outputs_of_choices
from jaxfound.models.layers.expert_tiles import (
    ROUTING,
    Beside,
    Kernel,
    Kernels,
    Kernels8Bit,
    Product,
    outputs_of_8_bit,
)
from jaxfound.models.layers.linear import ChosenFormat, QuantizedBeside, weight_dtype
from jaxfound.models.layers.mlp import Mlp
from jaxfound.models.layers.parameter import weight
from jaxfound.models.layers.router import LoadStats, Router, load_stats
from jaxfound.parallelism.axes import STREAM_SEQ, free_axes, sum_over
from jaxfound.parallelism.stream import in_stream, is_cut, to_stream
from pallas_kernels.formats import WEIGHT, Quantized
from pallas_kernels.quantize import rounded as rounded_to_8_bit

# Axes that split tokens and not experts.
TOKEN_AXES: tuple[AxisName, ...] = ("data", "fsdp", "context")


class Held(NamedTuple):
    """A kernel as the devices are handed it.

    Attributes:
        copies: one for each device that uses it on tokens of its own [copies E ...]. They cost
            nothing, and each leaves with a gradient of its own for the partitioner to sum.
        spec: where they lie.
        fsdp_dim: the dim that fsdp cut and that a device gathers; None for none.
    """

    copies: Float[Array, "_ _ _ _"]
    spec: PartitionSpec
    fsdp_dim: int | None


class Experts(nnx.Module):
    """E SwiGLU networks side by side: gate, up [E D F] and down [E F D]."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        experts, embed = ("experts", cfg.moe.num_experts), ("embed", cfg.embed_dim)
        ffn = ("ffn", cfg.moe.expert_dim)
        self.gate = weight(rngs, (experts, embed, ffn), std=cfg.init_std)
        self.up = weight(rngs, (experts, embed, ffn), std=cfg.init_std)
        std = cfg.init_std / math.sqrt(2 * cfg.num_layers)
        self.down = weight(rngs, (experts, ffn, embed), std=std)
        self.execution = execution
        self.path = path
        # As of a linear operation.
        self.format: Format = execution.precision.format_of(path)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        experts: Int[Array, "B T A"],
        weights: Float[Array, "B T A"],
        *,
        decoding: bool = False,
    ) -> Float[Array, "B T D"]:
        """Return each token's weighted sum over its experts, where the residual stream lies."""
        kernels = tuple(kernel.get_value() for kernel in (self.gate, self.up, self.down))
        if isinstance(kernels[0], Quantized):
            # Serving keeps them so on one device only.
            return mix_experts(x, experts, weights, *kernels, product=self._product(self.format))
        mixed = partial(self._mixed, x, experts, weights, decoding=decoding)
        if isinstance(kernels[0], QuantizedBeside):
            beside = [each.quantized for each in kernels] if self.format == "fp8" else []
            return mixed([each.kernel for each in kernels], beside, format=self.format)
        if isinstance(kernels[0], ChosenFormat):
            plain = [each.kernel for each in kernels]
            ways = (partial(mixed, format=name) for name in ("fp8", self.format))
            return jax.lax.cond(kernels[0].fp8, *ways, plain)
        return mixed(kernels, format=self.format)

    def _mixed(
        self,
        x: Float[Array, "B T D"],
        experts: Int[Array, "B T A"],
        weights: Float[Array, "B T A"],
        kernels: Sequence[Float[Array, "_ _ _"]],
        quantized: Sequence[Quantized] = (),
        *,
        format: Format,
        decoding: bool,
    ) -> Float[Array, "B T D"]:
        """Return the mix of kernels in some format; `quantized` are theirs in squares, if any."""
        rules = self.execution.rules
        rows = rules.activation_spec(("batch", "seq", None))
        cut = is_cut(x, rules)
        wide, narrow = ("experts", "embed", "ffn"), ("experts", "ffn", "embed")
        dims = (wide, wide, narrow)
        held = [self._held(k, d, format=format) for k, d in zip(kernels, dims, strict=True)]
        # Of all their arrays: where there are copies in squares, nothing else cuts a kernel.
        experts_alone = rules.gathered_spec(("experts",))
        mix = rules.on_each_device(
            partial(
                partial_mix,
                fsdp_dims=tuple(h.fsdp_dim for h in held),
                cut=cut,
                product=self._product(format),
                decoding=decoding,
            ),
            takes=(rows, rows, rows, *(h.spec for h in held), *(experts_alone for _ in quantized)),
            gives=rules.activation_spec(("batch", STREAM_SEQ, None)) if cut else rows,
        )
        return mix(x, experts, weights, *(h.copies for h in held), *quantized)

    def _product(self, format: Format) -> Product:
        """Return the format of the operands of products; "fp8_weights" rounds weights alone."""
        return self.execution.precision.compute if format == "fp8_weights" else format

    def _held(self, kernel: Float[Array, "_ _ _"], dims: Sequence[str], *, format: Format) -> Held:
        """Return a kernel as it is stored, in the format in which it comes to its products."""
        run, mesh_sizes = self.execution, jax.sharding.get_abstract_mesh().shape
        free = free_axes()
        cutting = run.rules.param_axes(dims, kernel.shape)
        fsdp_dim = next((i for i, axes in enumerate(cutting) if "fsdp" in axes), None)
        copying = tuple(a for a in TOKEN_AXES if not any(a in axes for axes in cutting))
        num_copies = math.prod(mesh_sizes[axis] for axis in copying if axis in free)
        cast = kernel.astype(weight_dtype(format, run.dtype))
        if format == "fp8_weights":
            cast = rounded_to_8_bit(cast, format=WEIGHT)
        if fsdp_dim is None:
            # Whole already; the sum of its gradients is pinned to its place at once.
            cast = run.rules.gather(cast, *dims)
        return Held(
            copies=jnp.broadcast_to(cast[None], (num_copies, *cast.shape)),
            spec=PartitionSpec(copying, *run.rules.param_spec(dims, kernel.shape)),
            fsdp_dim=fsdp_dim,
        )


class MixtureOfExperts(nnx.Module):
    """Routed experts plus one shared network that sees every token (DeepSeek-V3, 2.1.2)."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        self.router = Router(cfg, rngs=rngs, execution=execution)
        self.experts = Experts(cfg, rngs=rngs, execution=execution, path=f"{path}.experts")
        hidden = cfg.moe.num_shared_experts * cfg.moe.expert_dim
        self.shared = (
            Mlp(cfg, hidden, rngs=rngs, execution=execution, path=f"{path}.shared")
            if hidden
            else None
        )
        self.cfg = cfg.moe
        self.rules = execution.rules

    def __call__(
        self, x: Float[Array, "B T D"], *, real: Bool[Array, "B T"], decoding: bool = False
    ) -> tuple[Float[Array, "B T D"], LoadStats]:
        """Return the mix, where the residual stream lies, and the load.

        Args:
            real: tokens that count in the load.
            decoding: whether reading the weights is what takes the time.
        """
        with jax.named_scope(ROUTING):
            routing = self.router(x)
        mixed = self.experts(x, routing.experts, routing.weights, decoding=decoding)
        if self.shared is not None:
            mixed = mixed + to_stream(self.shared(x), self.rules)
        return in_stream(mixed, self.rules), load_stats(routing, real=real, cfg=self.cfg)


def partial_mix(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    *held: jax.Array | Quantized,
    fsdp_dims: tuple[int | None, ...],
    cut: bool,
    product: Product,
    decoding: bool,
) -> Float[Array, "B _ D"]:
    """Return `mix_experts` of a device's tokens, its channels F summed with the other devices'.

    Args:
        held: copies of the three kernels, and these in squares, if there are such.
        cut: whether each device along tensor is left the sums of its part of the tokens alone.
    """
    copies, squares = held[: len(fsdp_dims)], held[len(fsdp_dims) :]
    kernels: list[Kernel] = [
        whole(cast("jax.Array", copy)[0], dim) for copy, dim in zip(copies, fsdp_dims, strict=True)
    ]
    if squares:
        pairs = zip(kernels, squares, strict=True)
        kernels = [Beside(*cast("tuple[jax.Array, Quantized]", pair)) for pair in pairs]
    mixed = mix_experts(x, experts, weights, *kernels, product=product, decoding=decoding)
    if cut:
        return jax.lax.psum_scatter(mixed, "tensor", scatter_dimension=1, tiled=True)
    return sum_over(mixed, "tensor")


def whole(kernel: Float[Array, "_ _ _"], fsdp_dim: int | None) -> Float[Array, "_ _ _"]:
    """Return a kernel whole over fsdp inside `on_each_device`; its gradient goes back in shards.

    Left to the partitioner, the gradients of data and of fsdp would be summed in one all_reduce and
    cut afterwards; this way fsdp has its reduce_scatter, and data sums shards.
    """
    if fsdp_dim is None or jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) == 1:
        return kernel
    return jax.lax.all_gather(kernel, "fsdp", axis=fsdp_dim, tiled=True)


def mix_experts(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    gate: Kernel,
    up: Kernel,
    down: Kernel,
    *,
    product: Product | None = None,
    decoding: bool = False,
) -> Float[Array, "B T D"]:
    """Compute every expert on the tokens that chose it; no token is dropped.

    Inside `on_each_device` the kernels are those of this device's experts, and `experts` counts
    those of all devices along the `expert` axis. Products are in the format of `x` by default.
    """
    tokens, chosen = x.reshape(-1, x.shape[2]), experts.reshape(-1, experts.shape[2])
    kernels = gate, up, down
    if isinstance(gate, Quantized):
        in_fp8 = product == "fp8"
        outputs = outputs_of_8_bit(tokens, chosen, cast("Kernels8Bit", kernels), in_fp8=in_fp8)
    else:
        formats = {"product": product, "decoding": decoding}
        outputs = outputs_of_choices(tokens, chosen, cast("Kernels", kernels), **formats)
    return combine(outputs, weights.reshape(chosen.shape), chosen).reshape(x.shape)


@jax.named_scope(ROUTING)
def combine(
    outputs: Float[Array, "M A D"], weights: Float[Array, "M A"], experts: Int[Array, "M A"]
) -> Float[Array, "M D"]:
    """Return each token's outputs, weighted and summed in their own order and in float32.

    Equal outputs give equal bits in every program: each product is rounded before it is added.
    """
    # Never set, which no compiler knows: numbers of experts are not negative.
    never = jnp.minimum(experts, 0)[:, :, None]
    products = rounded(outputs.astype(jnp.float32) * weights[:, :, None], never)
    mixed = reduce(jnp.add, jnp.unstack(products, axis=1))
    return mixed.astype(outputs.dtype)


@jax.custom_vjp
def rounded(products: Float[Array, "M A D"], never: Int[Array, "M A 1"]) -> Float[Array, "M A D"]:
    """Return float32 products that are what they are before anything is added to them.

    Compilers contract a product and a sum into one operation with one rounding, in some programs
    and not in others. Bits that only the data could flip keep them from it and cost no memory.
    """
    bits = jax.lax.bitcast_convert_type(products, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ never, jnp.float32)


rounded.defvjp(lambda products, never: (rounded(products, never), None), lambda _, g: (g, None))
