"""An ordinary Flax NNX + optax script: a small network learns a function of eight numbers."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxfound.parallelism.adopt import spread
from jaxfound.resources.checkpoint import CheckpointManager
from pallas_kernels.linear import linear

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])


def dense(x, w):
    return linear(x, w, precision="float32")


class Net(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (8, 256)))
        self.mid = nnx.Param(init(rngs.params(), (256, 256)))
        self.down = nnx.Param(init(rngs.params(), (256, 1)))

    def __call__(self, x):
        h = jnp.tanh(dense(x, self.up[...]))
        h = jnp.tanh(dense(h, self.mid[...]))
        return dense(h, self.down[...])


def batch_of(step):
    x = jax.random.normal(jax.random.key(step), (64, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


@jax.jit
def train_step(state, x, y):
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


net = Net(nnx.Rngs(0))
graph, state = nnx.split((net, nnx.Optimizer(net, optax.adamw(3e-3), wrt=nnx.Param)))
state, rows = spread(state, data=2, fsdp=4)
checkpoints = CheckpointManager(OUT / "checkpoints", mode="sync")
first, state, _ = checkpoints.restore_latest(like=state) or (0, state, {})
losses = {}
for step in range(first, STEPS):
    state, loss = train_step(state, *jax.device_put(batch_of(step), rows))
    losses[step] = float(loss)
    if step % 10 == 9:
        print(f"step {step + 1}: loss {losses[step]:.4f}")
        checkpoints.save(step + 1, state, {})
(OUT / "losses.json").write_text(json.dumps(losses))
