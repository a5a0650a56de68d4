"""Dense feed-forward: SwiGLU."""

import math

import jax
from flax import nnx

from jaxfound.config.model import ModelConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.linear import Linear, kernels_of_one_call
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
        kernels = kernels_of_one_call((self.gate, self.up, self.down), remat=self.remat)
        if kernels and self.is_one_call(math.prod(x.shape[:-1])):
            cast = Swiglu(*(kernel.kernel.astype(self.gate.dtype) for kernel in kernels))
            quantized = Swiglu(*(kernel.quantized for kernel in kernels))
            return swiglu_of_quantized(x, cast, quantized).astype(self.gate.dtype)
        hidden_BTF = nnx.silu(self.gate(x)) * self.up(x)
        hidden_BTF = self.rules.constrain(hidden_BTF, "batch", "seq", "ffn")
        return self.down(hidden_BTF)

    def is_one_call(self, num_tokens: int) -> bool:
        """Whether a kernel makes what lies between the three products of these tokens."""
        return is_local() and serves_swiglu(num_tokens, self.gate.out_sizes[0])
