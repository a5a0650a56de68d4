"""Does this stack, JAX with its driver on this device, compute what our code relies on?

Each question has broken in some release of somebody's: a kernel that compiles and is wrong, a scan
whose gradient differs from the loop's, a scatter that loses rows on a mesh, a placement that is not
kept. It is the gate before the pin of a package moves.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.config.load import parse
from jaxfound.config.parallel import AXES
from jaxfound.resources.platform import driver_version
from jaxfound.resources.topology import Device
from jaxfound.training.trial import Trial
from jaxfound.training.verify import EXACT, Finding, relative_error, worst_of
from pallas_kernels.accuracy import TOLERANCES, TolerantOp, difference
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention import reference as attention_reference
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.fp8_matmul import reference as fp8_reference
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.quantize import quantize

FORMAT_VERSION = 1
# Models whose layers are scanned and unrolled: one of each mixer, with experts and without.
SCANNED = ("llama3-8b", "deepseek-v3")
# The sum over keys of bfloat16 weights: as for latent decode.
ATTENTION: tuple[TolerantOp, str] = ("mla_decode", "bfloat16")

type Check = Callable[[Sequence[Device]], Iterator[Finding]]


def verify_stack(devices: Sequence[Device] | None = None) -> Iterator[Finding]:
    """Yield what holds of this stack on these devices, all by default, when it is known."""
    devices = jax.devices() if devices is None else devices
    for check in CHECKS.values():
        yield from check(devices)


def kernels(devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield whether the kernel that is chosen here for each op agrees with its reference."""
    for name, (key, pair) in KERNELS.items():
        found, expected = pair()
        as64 = [np.asarray(x.astype(jnp.float32), np.float64) for x in (found, expected)]
        measured = difference(*as64)
        detail = f"worst row {measured.row:.1e}, allowed {TOLERANCES[key].row:.1e}"
        yield Finding(f"{name} agrees with its reference", measured.within(TOLERANCES[key]), detail)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Return bfloat16 numbers of a normal distribution, the same everywhere."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(numbers, jnp.bfloat16)


def _fp8_product() -> tuple[jax.Array, jax.Array]:
    a = quantize(normal(96, 384), format=ACTIVATION)
    b = quantize(normal(160, 384, seed=1), format=WEIGHT)
    return jax.jit(fp8_matmul)(a, b), fp8_reference.fp8_matmul(a, b, out_dtype=jnp.float32)


def _grouped_product() -> tuple[jax.Array, jax.Array]:
    x, w = normal(100, 128), normal(4, 128, 96, seed=1)
    sizes = jnp.asarray([30, 0, 50, 15], jnp.int32)
    found = jax.jit(lambda x, w: grouped_matmul(x, w, group_sizes=sizes, precision="bfloat16"))
    return found(x, w), grouped_reference.grouped_matmul(x, w, sizes)


def _latent_decode() -> tuple[jax.Array, jax.Array]:
    operands = {
        "q": normal(3, 1, 16, 576, scale=0.5),
        "cache": normal(8, 64, 576, seed=1, scale=0.1),
    }
    places = {
        "block_table": jnp.asarray([[5, 2, 0], [7, 0, 0], [1, 3, 6]], jnp.int32),
        "lengths": jnp.asarray([130, 64, 191], jnp.int32),
    }
    sizes = {"latent": 512, "sm_scale": 0.1352}
    found = jax.jit(lambda o: mla_decode(**o, **places, **sizes).out)(operands)
    wide = {name: x.astype(jnp.float32) for name, x in operands.items()}
    return found, decode_reference.mla_decode(**wide, **places, **sizes).out


def _attention() -> tuple[jax.Array, jax.Array]:
    q, k, v = normal(2, 128, 4, 64), normal(2, 128, 2, 64, seed=1), normal(2, 128, 2, 64, seed=2)
    ids = jnp.asarray(np.repeat([[1, 2], [1, 0]], [70, 58], axis=1), jnp.int32)
    options = {"segment_ids": ids, "causal": True, "scale": 0.125}
    found = jax.jit(lambda q, k, v: flash_attention(q, k, v, packed="runs", **options))(q, k, v)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    expected = attention_reference.flash_attention(*wide, **options)
    return found, expected


type Pair = Callable[[], tuple[jax.Array, jax.Array]]
KERNELS: Mapping[str, tuple[tuple[TolerantOp, str], Pair]] = {
    "fp8_matmul": (("fp8_matmul", "bfloat16"), _fp8_product),
    "grouped_matmul": (("grouped_bf16", "bfloat16"), _grouped_product),
    "mla_decode": (("mla_decode", "bfloat16"), _latent_decode),
    "flash_attention": (ATTENTION, _attention),
}


def scans(devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield whether the gradients of a scan over layers are those of unrolled layers."""
    for name in SCANNED:
        train = {"steps": 1, "batch_size": 4, "seq_len": 64}
        cfg = parse({"preset": name, "train": train})
        trial = Trial(cfg, dict.fromkeys(AXES, 1))
        scanned = trial.run({"layers_per_scan_step": 1}, devices).grads
        unrolled = trial.run({"layers_per_scan_step": "all"}, devices).grads
        errors = {path: relative_error(g, unrolled[path]) for path, g in scanned.items()}
        path, worst = worst_of(errors)
        question = f"gradients of a scan over layers are the loop's, {name} made small"
        yield Finding(question, worst <= EXACT.gradient, f"{path} {worst:.1e}")


def scatters(devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield whether rows added into an array that devices share all arrive, once."""
    mesh = Mesh(np.asarray(devices), ("x",))
    rows, width = 16 * len(devices), 8 * len(devices)
    rng = np.random.default_rng(0)
    places = rng.integers(0, rows // 2, rows)
    values = rng.integers(-8, 8, (rows, width)).astype(np.float32)
    expected = np.zeros((rows, width), np.float32)
    np.add.at(expected, places, values)

    @jax.jit
    def add(places: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.zeros((rows, width)).at[places].add(values)

    for spec in (PartitionSpec("x", None), PartitionSpec(None, "x")):
        there = jax.device_put(values, NamedSharding(mesh, spec))
        found = np.asarray(add(jnp.asarray(places), there))
        lost = int((found != expected).any(axis=1).sum())
        question = f"scatter-add of rows cut as {spec} over {len(devices)} devices"
        yield Finding(question, lost == 0, f"{lost} of {rows} rows differ")


def placements(devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield whether an array lies where a constraint says, and holds the same numbers."""
    mesh = Mesh(np.asarray(devices), ("x",))
    size = 8 * len(devices)
    x = np.arange(size * size, dtype=np.float32).reshape(size, size)
    for spec in (PartitionSpec("x", None), PartitionSpec(None, "x"), PartitionSpec()):
        wanted = NamedSharding(mesh, spec)
        moved = jax.jit(lambda x, w=wanted: jax.lax.with_sharding_constraint(x.T, w) * 2)
        found = moved(jax.device_put(x, NamedSharding(mesh, PartitionSpec("x", None))))
        there = found.sharding.is_equivalent_to(wanted, found.ndim)
        equal = bool(np.array_equal(np.asarray(found), x.T * 2))
        detail = f"{'there' if there else f'at {found.sharding}'}, {'equal' if equal else 'other'}"
        yield Finding(f"a constraint to {spec} is kept", there and equal, detail)


CHECKS: Mapping[str, Check] = {
    "kernels": kernels,
    "scans": scans,
    "scatters": scatters,
    "placements": placements,
}


def stack_name() -> str:
    """Return this stack's name: version of JAX, of the driver if there is one, kind of device."""
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    return "_".join(("jax-" + jax.__version__, driver_version() or "no-driver", kind))


def write_findings(findings: Sequence[Finding], directory: Path) -> Path:
    """Write one result file for this stack and return its path."""
    path = directory / f"{stack_name()}.json"
    record = {
        "format_version": FORMAT_VERSION,
        "stack": stack_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_devices": len(jax.devices()),
        "holds": all(finding.holds for finding in findings),
        "findings": [finding._asdict() for finding in findings],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return path
