"""Dense feed-forward: SwiGLU."""

import math

import jax
from flax import nnx

from jaxfound.config.model import ModelConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.linear import Linear, QuantizedBeside
from pallas_kernels.linear import Swiglu, swiglu_of_quantized
from pallas_kernels.quantize import serves_swiglu
from pallas_kernels.sharded import is_local


class Mlp(nnx.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, 2020)."""

    def __init__(
        self,
        cfg: ModelConfig,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        execution: Execution,
        path: str,
    ) -> None:
        wide, narrow = (("ffn", hidden),), (("embed", cfg.embed_dim),)

        def make(name: str, inputs: tuple, outputs: tuple, std: float) -> Linear:
            return Linear(
                inputs, outputs, rngs=rngs, execution=execution, path=f"{path}.{name}", std=std
            )

        self.gate = make("gate", narrow, wide, cfg.init_std)
        self.up = make("up", narrow, wide, cfg.init_std)
        self.down = make("down", wide, narrow, cfg.init_std / math.sqrt(2 * cfg.num_layers))
        self.rules = execution.rules
        self.remat = execution.remat

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the feed-forward of x [B T D]."""
        kernels = Swiglu(*(each.kernel.get_value() for each in (self.gate, self.up, self.down)))
        if self.is_one_call(kernels, num_tokens=math.prod(x.shape[:-1])):
            cast = Swiglu(*(kernel.kernel.astype(self.gate.dtype) for kernel in kernels))
            quantized = Swiglu(*(kernel.quantized for kernel in kernels))
            return swiglu_of_quantized(x, cast, quantized).astype(self.gate.dtype)
        hidden_BTF = nnx.silu(self.gate(x)) * self.up(x)
        hidden_BTF = self.rules.constrain(hidden_BTF, "batch", "seq", "ffn")
        return self.down(hidden_BTF)

    def is_one_call(self, kernels: Swiglu, *, num_tokens: int) -> bool:
        """Whether all three products are in 8 bits and a kernel makes what lies between them.

        Where something is computed again, each product is to be one that a policy can name.
        """
        layers = (self.gate, self.up, self.down)
        return (
            all(layer.format == "fp8" for layer in layers)
            and all(isinstance(kernel, QuantizedBeside) for kernel in kernels)
            and self.remat == "none"
            and is_local()
            and serves_swiglu(num_tokens, self.gate.out_sizes[0])
        )
