"""The update rule and the learning rate of a step."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from jaxfound.config.params import ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.config.train import OptimizerConfig
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules
from jaxfound.parallelism.memory import Slots
from jaxfound.training.muon import muon

type Schedule = Callable[[jax.Array], jax.Array]


def make_optimizer(
    cfg: OptimizerConfig, table: ParamTable, *, rules: ShardingRules = TABLE_RULES
) -> optax.GradientTransformation:
    """Return the update rule of `cfg.name` with decoupled decay, without its learning rate.

    The step multiplies by the rate of `TrainState.step`: a schedule that counted its own calls
    would drift from the step after a skipped update or a resume.

    Args:
        cfg: the rule's name and numbers.
        table: the model's parameters.
        rules: where moments lie on a mesh, for a rule that moves them while it works.
    """
    return optax.chain(
        RULES[cfg.name](cfg, table, rules),
        optax.add_decayed_weights(cfg.weight_decay, mask=decayed(table)),
    )


def adam(cfg: OptimizerConfig) -> optax.GradientTransformation:
    """Return Adam; with the decay above it is AdamW (Loshchilov & Hutter, 2019)."""
    return optax.scale_by_adam(b1=cfg.beta1, b2=cfg.beta2, eps=cfg.eps)


type Rule = Callable[[OptimizerConfig, ParamTable, ShardingRules], optax.GradientTransformation]
RULES: Mapping[str, Rule] = {
    "adamw": lambda cfg, table, rules: adam(cfg),
    "muon": lambda cfg, table, rules: muon(cfg, table, others=adam(cfg), rules=rules),
}


def optimizer_slots(cfg: OptimizerConfig, table: ParamTable) -> Slots:
    """Return what the update rule keeps, asked of the rule itself; nothing is allocated."""
    params = {
        spec.path: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for spec in table
        if spec.kind == "param"
    }
    state = jax.eval_shape(make_optimizer(cfg, table).init, params)
    by_path: dict[str, int] = {}
    counter_bytes = 0
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = getattr(keys[-1], "key", None)
        if path in params:
            by_path[path] = by_path.get(path, 0) + 1
        else:
            counter_bytes += leaf.size * leaf.dtype.itemsize
    return Slots(by_path, counter_bytes)


def decayed(table: ParamTable) -> dict[str, bool]:
    """Return which parameters decay: matrices, embedding and head included; never a norm.

    Decided by logical dims, because a stack of norm scales [layers, D] looks like a matrix.
    """
    return {spec.path: spec.is_matrix for spec in table if spec.kind == "param"}


def make_schedule(cfg: RunConfig) -> Schedule:
    """Return the learning rate as a function of the optimizer steps already done.

    Step n (counted from 0) of the warm-up trains at peak · (n + 1) / warmup_steps, so no step is
    spent at zero; the last step of the run comes within one step of the final rate.
    """
    opt, steps = cfg.optimizer, cfg.train.steps
    peak, floor, warm = opt.learning_rate, opt.learning_rate * opt.final_lr_ratio, opt.warmup_steps

    def rate(step: jax.Array) -> jax.Array:
        n = step.astype(jnp.float32)
        rising = peak * (n + 1) / max(warm, 1)
        return jnp.where(n < warm, rising, SHAPES[opt.schedule](n))

    def cosine(n: jax.Array) -> jax.Array:
        share = jnp.clip((n - warm) / max(steps - warm, 1), 0.0, 1.0)
        return floor + (peak - floor) * 0.5 * (1 + jnp.cos(jnp.pi * share))

    def stable_then_linear(n: jax.Array) -> jax.Array:
        share = jnp.clip((n - (steps - opt.decay_steps)) / max(opt.decay_steps, 1), 0.0, 1.0)
        return peak + (floor - peak) * share

    SHAPES: dict[str, Schedule] = {
        "cosine": cosine,
        "wsd": stable_then_linear,
        "constant": lambda n: jnp.full_like(n, peak),
    }
    return rate
