"""Time attention: packed rows against unpacked ones, forward and with gradients."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels import hardware
from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench import measure, peers
from pallas_kernels.bench.measure import Check, NotCarriedError, Part, Work
from pallas_kernels.bench.timing import Candidate, compiled_candidate, untimed
from pallas_kernels.flash_attention import cudnn_call, op, reference
from pallas_kernels.flash_attention.cases import BENCH_SIZES, make_case
from pallas_kernels.flash_attention.cudnn_call import Scores
from pallas_kernels.flash_attention.runs import find_runs

# (B, T, N, K, H, V)
Sizes = tuple[int, int, int, int, int, int]
SIZES: tuple[Sizes, ...] = BENCH_SIZES
Phase = Literal["forward", "training"]
PHASES: tuple[Phase, ...] = ("forward", "training")

# A backward pass is five products where a forward pass is two; the same is taken for bytes.
TRAINING_FLOPS = 3.5
DOCUMENTS = 8
NUM_WALL_CALLS = 30
# Values of max_segments.
BOUNDS = (16, 64)


@dataclass(frozen=True)
class Problem:
    """Operands of one size, with the documents of each row and a gradient of the result."""

    sizes: Sizes
    q: Array
    k: Array
    v: Array
    grad: Array
    ids: Int[Array, "B T"]

    @property
    def scale(self) -> float:
        """H^-1/2."""
        return self.sizes[4] ** -0.5

    def flops(self, *, packed: bool) -> int:
        """Useful FLOPs of the causal forward pass, inside documents or over whole rows."""
        _, _, n, _, h, v = self.sizes
        rows = np.asarray(self.ids) if packed else np.ones(self.ids.shape, np.int32)
        counts = np.concatenate([np.unique(row[row > 0], return_counts=True)[1] for row in rows])
        return n * (h + v) * int((counts * (counts + 1)).sum())


def make_problem(sizes: Sizes) -> Problem:
    """Normal operands; each row is about eight documents of uneven length and no padding."""
    b, t, n, k, h, v = sizes
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((b, t, n, h), (b, t, k, h), (b, t, k, v), (b, t, n, v))
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    rng = np.random.default_rng(0)
    ids = np.empty((b, t), np.int32)
    for row in ids:
        cuts = np.unique(rng.integers(1, t, DOCUMENTS - 1))
        row[:] = 1 + np.searchsorted(cuts, np.arange(t), side="right")
    return Problem(sizes, *arrays, ids=jnp.asarray(ids))


def _in_phase(attend: Callable[..., Array], phase: Phase) -> Callable[..., Any]:
    """`attend(q, k, v, ids)` as it is, or with its gradients."""

    def training(q: Array, k: Array, v: Array, ids: Array, grad: Array) -> tuple[Array, ...]:
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, *vjp(grad)

    if phase == "training":
        return training
    return lambda q, k, v, ids, grad: attend(q, k, v, ids)


def _candidate(problem: Problem, name: str, run: Callable[..., Any]) -> Candidate:
    operands = (problem.q, problem.k, problem.v, problem.ids, problem.grad)
    return compiled_candidate(name, run, [operands])


def ours(
    problem: Problem,
    phase: Phase,
    *,
    name: str,
    backend: str,
    packed: bool,
    max_segments: int | None = None,
) -> Candidate:
    """The op on packed or unpacked rows."""

    def attend(q: Array, k: Array, v: Array, ids: Array) -> Array:
        return op.flash_attention(
            q,
            k,
            v,
            segment_ids=ids if packed else None,
            causal=True,
            scale=problem.scale,
            packed="runs",
            max_segments=max_segments,
            backend=backend,
        )

    return _candidate(problem, name, _in_phase(attend, phase))


def bare_call(problem: Problem, phase: Phase) -> Candidate:
    """cuDNN on runs that are found beforehand, without checks, choice of path or zeroed padding.

    What is between it and the op is the price of those. Values are widened beforehand too.
    """
    width = max(problem.sizes[4:])
    pad = [(0, 0)] * 3 + [(0, width - problem.sizes[5])]
    v, grad = jnp.pad(problem.v, pad), jnp.pad(problem.grad, pad)
    runs = find_runs(problem.ids, max_segments=16)

    def run(q: Array, k: Array, v: Array, grad: Array, runs: Any) -> Any:
        scores = Scores(runs, causal=True, scale=problem.scale)
        if phase == "forward":
            return cudnn_call.forward(q, k, v, scores=scores)
        saved = cudnn_call.forward_saving(q, k, v, scores=scores)
        return saved.out, cudnn_call.backward(q, k, v, saved=saved, grad=grad, scores=scores)

    operands = (problem.q, problem.k, v, grad, runs)
    return compiled_candidate("cudnn_bare", run, [operands])


def padded_values(problem: Problem, phase: Phase) -> Candidate:
    """cuDNN on unpacked rows with V widened to H, where it also takes V as it is.

    Raises:
        NotCarriedError: if V is H.
    """
    h, v_dim = problem.sizes[4:]
    if h == v_dim:
        raise NotCarriedError("V is H, nothing is widened")

    def attend(q: Array, k: Array, v: Array, ids: Array) -> Array:
        wide = jnp.pad(v, [(0, 0)] * 3 + [(0, h - v_dim)])
        return op.flash_attention(
            q, k, wide, segment_ids=None, causal=True, scale=problem.scale, backend="cudnn"
        )[..., :v_dim]

    return _candidate(problem, "cudnn_unpacked_widened", _in_phase(attend, phase))


def jax_cudnn(problem: Problem, phase: Phase) -> Candidate:
    """JAX's own cuDNN attention on unpacked causal rows.

    Raises:
        NotCarriedError: if V is not H, which its interface does not take.
    """
    if problem.sizes[4] != problem.sizes[5]:
        raise NotCarriedError("jax.nn.dot_product_attention wants V = H")

    def attend(q: Array, k: Array, v: Array, ids: Array) -> Array:
        return jax.nn.dot_product_attention(
            q, k, v, scale=problem.scale, is_causal=True, implementation="cudnn"
        )

    return _candidate(problem, "jax_cudnn_unpacked", _in_phase(attend, phase))


def torch_causal(problem: Problem, phase: Phase) -> Candidate:
    """Torch's scaled_dot_product_attention on unpacked causal rows, by its own choice of kernel.

    Raises:
        NotCarriedError: if torch is missing.
    """
    module = peers.torch()
    attend = module.nn.functional.scaled_dot_product_attention
    arrays = (problem.q, problem.k, problem.v, problem.grad)
    q, k, v, grad = (peers.to_torch(x).transpose(1, 2).detach() for x in arrays)
    training = phase == "training"
    if training:
        q, k, v = (x.requires_grad_() for x in (q, k, v))

    def start(index: int) -> Any:
        grouped = q.shape[1] != k.shape[1]
        out = attend(q, k, v, is_causal=True, scale=problem.scale, enable_gqa=grouped)
        return (out, *module.autograd.grad(out, (q, k, v), grad)) if training else out

    return peers.torch_candidate("torch_unpacked", start, (q, k, v, grad))


Build = Callable[[Problem, Phase], Candidate]
PACKED: dict[str, Build] = {
    **{
        f"cudnn_packed_{bound}": partial(
            ours, name=f"cudnn_packed_{bound}", backend="cudnn", packed=True, max_segments=bound
        )
        for bound in BOUNDS
    },
    "cudnn_bare": bare_call,
    "xla_packed": partial(ours, name="xla_packed", backend="xla", packed=True),
}
UNPACKED: dict[str, Build] = {
    "cudnn_unpacked": partial(ours, name="cudnn_unpacked", backend="cudnn", packed=False),
    "cudnn_unpacked_widened": padded_values,
    "jax_cudnn_unpacked": jax_cudnn,
    "torch_unpacked": torch_causal,
}


def _checker(problem: Problem, phase: Phase) -> Check:
    """Compare one row and one key head of the packed results with the reference."""
    group = problem.sizes[2] // problem.sizes[3]
    expected = np.asarray(
        untimed(
            lambda q, k, v, ids: reference.flash_attention(
                q, k, v, segment_ids=ids, causal=True, scale=problem.scale
            )
        )(problem.q[:1, :, :group], problem.k[:1, :, :1], problem.v[:1, :, :1], problem.ids[:1])
    )

    def check(name: str, result: Any) -> Difference | None:
        if name.split("/")[0] not in PACKED:
            return None
        out = result[0] if phase == "training" else result
        found = np.asarray(out[:1, :, :group, : problem.sizes[5]].astype(jnp.float32))
        return difference(found, expected)

    return check


def wall_us(candidate: Candidate) -> float:
    """Microseconds a call on the clock, many calls in a row: with what waits between kernels."""
    candidate.wait(candidate.start(0))
    start = time.perf_counter()
    result = None
    for index in range(NUM_WALL_CALLS):
        result = candidate.start(index)
    candidate.wait(result)
    return (time.perf_counter() - start) * 1e6 / NUM_WALL_CALLS


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters."""
    return dict(zip("BTNKHV", sizes, strict=True))


def operand_bytes(sizes: Sizes) -> int:
    """About what the operands take, and the widened copies of some candidates."""
    b, t, n, k, h, v = sizes
    return 6 * b * t * (n + k) * (h + v)


# Of the packed candidates those that a model reaches by the op's own choice.
OURS = f"cudnn_packed_{BOUNDS[0]}"
OWN = frozenset({*(f"cudnn_packed_{bound}" for bound in BOUNDS), "xla_packed"})


def problem(sizes: Sizes, phase: Phase) -> measure.Problem:
    """Every candidate in one phase; those on unpacked rows do more work for the same tokens."""
    operands = make_problem(sizes)
    b, t, n, k, h, v = sizes
    case = make_case(t, t, n, k, h, v, hardware=hardware.current(), batch=b)
    times = TRAINING_FLOPS if phase == "training" else 1.0
    parts: list[Part] = []
    for name, build in (PACKED | UNPACKED).items():
        flops = int(times * operands.flops(packed=name in PACKED))
        work = Work(flops, int(times * case.bytes_moved), "bfloat16")
        parts.append(
            Part(
                f"{name}/{phase}",
                work,
                partial(_renamed, build, operands, phase),
                against="" if name in OWN else f"{OURS}/{phase}",
                note="" if name in PACKED else "rows are not packed",
                after=lambda candidate: f"wall {wall_us(candidate):.1f} us",
            )
        )
    expect = partial(_checker, operands, phase)
    return measure.Problem("flash_attention", named(sizes), parts, expect)


def _renamed(build: Build, operands: Problem, phase: Phase) -> Candidate:
    candidate = build(operands, phase)
    return replace(candidate, name=f"{candidate.name}/{phase}")
