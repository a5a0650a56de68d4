"""How fast a step in fp8 could be: what does not change of a step in bfloat16, and kernels alone.

A layer in fp8 multiplies and rounds; the rest of its step is that of bfloat16. So a bound of its
time is the measured bfloat16 step without the products of its layers, and the kernels in their
place, each as it was timed alone, without rest between (`jaxfound bench kernels`). What rounds
and was not timed counts as its bytes at the speed of a copy: no kernel takes less.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxfound.config.layer_formats import ruled_operations
from jaxfound.config.run import RunConfig
from jaxfound.models import describe
from jaxfound.training.events import TrainingError

# Backends of the records.
PRODUCT, BOTH = "mosaic_gpu", "jax_triton_both_1x128"
SWIGLU, GRADIENTS = "jax_triton_swiglu_1x128", "jax_triton_swiglu_gradients_1x128"
SQUARES = "jax_triton_squares"
# What XLA moves of SwiGLU and its gradients in bfloat16, which kernels that round take over: three
# arrays as wide as the feed-forward, and five.
SWIGLU_BYTES = (3 + 5) * 2
# What a kernel that rounds reads and writes of an element, scales left out.
ROUNDED_BYTES = {BOTH: 2 + 2, SWIGLU: 2 * 2 + 2, GRADIENTS: 3 * 2 + 2 * 2, SQUARES: 4 + 2}
ADD = (
    "Add it: jaxfound bench kernels --op fp8_training --op fp8_wgrad --rest-ms 0 --settle-ms 300 "
    "--out FILE"
)


class Kernel(NamedTuple):
    """A kernel that was timed alone.

    Attributes:
        op: of `bench kernels`.
        backend: of its records.
        sizes: M, N and K of a product, rows and columns of what is rounded.
    """

    op: str
    backend: str
    sizes: tuple[int, ...]


class Bound(NamedTuple):
    """Seconds of a step that nothing in it could be shorter than, by where they are from.

    Attributes:
        rest: what does not change, of the step in bfloat16.
        products: of all layers in 8 bits.
        rounding: of their operands.
        by_bytes: backends of what rounds and was not timed, which counts as a copy.
    """

    rest: float
    products: float
    rounding: float
    by_bytes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.rest + self.products + self.rounding


def bound_of(cfg: RunConfig, base: Mapping[str, Any], kernels: Mapping[str, Any]) -> Bound:
    """Return the bound of a run whose layers are all in fp8.

    Args:
        cfg: the run: one device, one micro-batch, nothing computed again, grouped-query attention
            and dense feed-forwards.
        base: the row of the same run in bfloat16, with a breakdown.
        kernels: the record of `bench kernels --op fp8_training --op fp8_wgrad`, and `--op quantize`
            for the times of rounding.

    Raises:
        TrainingError: if the run is another, the row is of another, or a product was not timed.
    """
    _check(cfg, base)
    model, times, speed = cfg.model, times_of(kernels), copy_speed(kernels)
    products = Counter(products_of(cfg))
    missing = sorted(set(products) - set(times))
    if missing:
        named = ", ".join(f"{k.op} {'x'.join(map(str, k.sizes))} ({k.backend})" for k in missing)
        raise TrainingError(f"the kernels' record has no time for {named}. {ADD}")
    moved = SWIGLU_BYTES * cfg.train.batch_size * cfg.train.seq_len * model.ffn_dim
    rounding = [_rounding_s(kernel, times, speed) for kernel in roundings_of(cfg)]
    product_s = sum(times[kernel] * number for kernel, number in products.items())
    return Bound(
        rest=base["ours"]["step_s"]["median"]
        - layers_products_s(cfg, base)
        - moved * model.num_layers / speed,
        products=product_s * model.num_layers,
        rounding=sum(seconds for seconds, _ in rounding) * model.num_layers,
        by_bytes=tuple(sorted({name for _, name in rounding if name})),
    )


def _check(cfg: RunConfig, base: Mapping[str, Any]) -> None:
    formats = cfg.precision
    ruled = ruled_operations(describe(cfg.model))
    kept = [name for name in ruled if formats.format_of(name, None) != "fp8"]
    whole = cfg.model.mixer == "gqa" and cfg.model.ffn == "dense" and not kept
    plain = cfg.parallel.num_microbatches == 1 and cfg.parallel.remat == "none"
    if not whole or not plain:
        raise TrainingError(
            f"the bound is of grouped-query attention and dense feed-forwards whose operations are "
            f"all in fp8, in one micro-batch with parallel.remat=none; this is {cfg.model.mixer}, "
            f"{cfg.model.ffn}, {cfg.parallel.num_microbatches} micro-batches, "
            f"remat={cfg.parallel.remat}, not in fp8: {kept or 'nothing'}"
        )
    shapes = base["shapes"]
    asked = {
        "layers": cfg.model.num_layers,
        "embed_dim": cfg.model.embed_dim,
        "ffn_dim": cfg.model.ffn_dim,
        "batch_size": cfg.train.batch_size,
        "seq_len": cfg.train.seq_len,
    }
    other = {key: shapes[key] for key, value in asked.items() if shapes[key] != value}
    if other or shapes["rules"] or base["breakdown"] is None:
        raise TrainingError(
            f"the base row has {other or shapes['rules'] or 'no breakdown'}: it must be the same "
            "run in bfloat16, timed with --profiled"
        )


def products_of(cfg: RunConfig) -> Iterable[Kernel]:
    """Yield the products of a layer: forward, of inputs' gradients and of weights'.

    Matrices of one input have one sum for its gradient: query, key and value, and gate and up.
    """
    tokens = cfg.train.batch_size * cfg.train.seq_len
    for inputs, outputs in matrices(cfg):
        yield Kernel("fp8_training", PRODUCT, (tokens, outputs, inputs))
        yield Kernel("fp8_wgrad", PRODUCT, (inputs, outputs, tokens))
    width, hidden, (heads, keys) = cfg.model.embed_dim, cfg.model.ffn_dim, _widths(cfg)
    for inputs, outputs in (
        (width, heads + 2 * keys),
        (heads, width),
        (width, 2 * hidden),
        (hidden, width),
    ):
        yield Kernel("fp8_training", PRODUCT, (tokens, inputs, outputs))


def roundings_of(cfg: RunConfig) -> Iterable[Kernel]:
    """Yield what is rounded in a layer.

    Inputs of attention and of the feed-forward, attention's result and the gradients of all
    results, both ways; SwiGLU and its gradients as they are made; weights in squares.
    """
    model, tokens = cfg.model, cfg.train.batch_size * cfg.train.seq_len
    heads, keys = _widths(cfg)
    for width in (*[model.embed_dim] * 4, heads, heads, keys, keys):
        yield Kernel("quantize", BOTH, (tokens, width))
    yield Kernel("quantize", SWIGLU, (tokens, model.ffn_dim))
    yield Kernel("quantize", GRADIENTS, (tokens, model.ffn_dim))
    for sizes in matrices(cfg):
        yield Kernel("quantize", SQUARES, sizes)


def matrices(cfg: RunConfig) -> list[tuple[int, int]]:
    """Return inputs and outputs of a layer's matrices."""
    width, hidden = cfg.model.embed_dim, cfg.model.ffn_dim
    heads, keys = _widths(cfg)
    mixer = [(width, heads), (width, keys), (width, keys), (heads, width)]
    return [*mixer, (width, hidden), (width, hidden), (hidden, width)]


def _widths(cfg: RunConfig) -> tuple[int, int]:
    gqa = cfg.model.gqa
    return cfg.model.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim


def times_of(kernels: Mapping[str, Any]) -> dict[Kernel, float]:
    """Return the median seconds of every kernel in a record; the newest call's of those in two."""
    found: dict[Kernel, float] = {}
    for call in kernels["calls"]:
        for record in call["records"]:
            if record["rounds_us"]:
                sizes = tuple(record["sizes"].values())
                kernel = Kernel(record["op"], record["backend"], sizes)
                found[kernel] = statistics.median(record["rounds_us"]) / 1e6
    return found


def copy_speed(kernels: Mapping[str, Any]) -> float:
    """Return the bytes a second of a copy, of the newest call."""
    return kernels["calls"][-1]["ceilings"]["copy_bps"]


def layers_products_s(cfg: RunConfig, base: Mapping[str, Any]) -> float:
    """Return the seconds of the layers' products in the base: all of them, without the head's."""
    head = 2 * cfg.model.embed_dim * cfg.model.vocab_size
    share = 1 - head / base["flops"]["products"]
    return base["breakdown"]["kinds"]["products"] * share


def _rounding_s(
    kernel: Kernel, times: Mapping[Kernel, float], speed: float
) -> tuple[float, str | None]:
    """Seconds of what rounds; and its backend, where they are its bytes at the speed of a copy.

    Of squares any size serves: the one timed that is nearest, by elements.
    """
    elements = math.prod(kernel.sizes)
    if kernel in times:
        return times[kernel], None
    squares = [timed for timed in times if timed.backend == kernel.backend == SQUARES]
    if squares:
        nearest = min(squares, key=lambda timed: abs(math.prod(timed.sizes) - elements))
        return times[nearest] * elements / math.prod(nearest.sizes), None
    return ROUNDED_BYTES[kernel.backend] * elements / speed, kernel.backend


def share_of(bound: Bound, row: Mapping[str, Any]) -> float:
    """Return the bound over the step of a measured row: 1 where nothing is lost."""
    return bound.step_s / row["ours"]["step_s"]["median"]
