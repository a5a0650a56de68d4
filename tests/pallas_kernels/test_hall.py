"""Hardware rows, formats and the registry: plain data and decisions, without any kernel."""

import logging
import subprocess
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hardware, registry
from pallas_kernels.formats import ACTIVATION, WEIGHT, Format, FormatError, check_quantized
from pallas_kernels.hardware import HARDWARE, Hardware
from pallas_kernels.quantize import quantize
from pallas_kernels.registry import Backend, KernelError, KernelOp, explain


@pytest.mark.parametrize("kind", HARDWARE)
def test_every_row_names_itself_and_multiplies_float32(kind):
    row = hardware.find(kind)
    assert row.kind == kind
    assert row.supports("float32")
    assert row.memory_bps > 0
    assert row.alignment["float32"]
    assert kind == "cpu" or set(row.peak_flops) & {"bfloat16", "float8"} <= set(row.alignment)


def test_an_unknown_device_supports_nothing_and_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="pallas_kernels.hardware"):
        rows = [hardware.find("Sohu 3000") for _ in range(2)]
    assert rows[0] is rows[1]
    assert not rows[0].supports("float32")
    assert [r.message for r in caplog.records] == ["hardware.unknown"]


def test_reading_the_table_starts_no_backend():
    code = (
        "from pallas_kernels import hardware, linear, registry\n"
        "hardware.find('h200'); registry.explain('fp8_matmul', 13, 13, 13, device='NVIDIA H200')\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_target_is_seen_while_tracing_and_retraces():
    seen = []

    @jax.jit
    def f(x):
        seen.append(hardware.current().kind)
        return x

    with hardware.target("NVIDIA H200"):
        f(1.0)
    f(1.0)
    assert seen == ["NVIDIA H200", "cpu"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"block": (1, 64)}, "block"),
        ({"block": (1, 128), "element": "e3m4"}, "e3m4"),
        ({"block": (1, 128), "scale": "e8m0"}, "e8m0"),
    ],
)
def test_a_format_that_does_not_exist_is_refused_with_its_name(bad, words):
    with pytest.raises((FormatError, TypeError), match=words):
        Format(**bad)


@pytest.mark.parametrize("shape", [(3, 130), (2, 200, 256), (0, 5)])
def test_a_quantized_array_is_a_pytree_that_keeps_its_format(shape):
    q = quantize(jnp.ones(shape), format=WEIGHT)
    again = jax.tree.map(lambda leaf: leaf, q)
    assert len(jax.tree.leaves(q)) == 2
    assert (again.shape, again.format) == (shape, WEIGHT)
    check_quantized("again", again)
    assert all(size % 128 == 0 for size in q.values.shape[-2:])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".values", ".scales"]


def test_a_quantized_array_whose_parts_disagree_is_refused():
    q = quantize(jnp.ones((4, 256)), format=ACTIVATION)
    with pytest.raises(FormatError, match="scales"):
        check_quantized("q", replace(q, scales=q.scales[:, :1]))
    with pytest.raises(FormatError, match="float8"):
        check_quantized("q", replace(q, values=q.values.astype(jnp.bfloat16)))


def test_the_transpose_swaps_values_scales_and_format():
    x = jax.random.normal(jax.random.key(0), (5, 200))
    q = quantize(x, format=ACTIVATION)
    assert q.mT.format.block == (128, 1)
    assert jnp.array_equal(q.mT.dequantize(), q.dequantize().T)


@dataclass(frozen=True)
class SizeCase:
    k: int
    hardware: Hardware
    padded_flop_ratio: float = 1.0


def picky(case):
    return f"K={case.k} is not a multiple of 16" if case.k % 16 else None


TOY = KernelOp(
    name="toy",
    reference=max,
    backends=(
        Backend(name="fast", refuses=picky, run=max),
        Backend(name="xla", refuses=lambda case: None, run=min),
    ),
    make_case=lambda k, *, hardware: SizeCase(k=k, hardware=hardware),
)


def test_an_implicit_choice_falls_through_and_logs_the_reason_once(caplog):
    case = SizeCase(k=13, hardware=hardware.CPU)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.registry"):
        chosen = [TOY.choose(case).name for _ in range(3)]
    assert chosen == ["xla"] * 3
    assert [r.reason for r in caplog.records] == ["K=13 is not a multiple of 16"]


def test_an_explicit_choice_raises_the_reason():
    with pytest.raises(KernelError, match="K=13 is not a multiple of 16"):
        TOY.choose(SizeCase(k=13, hardware=hardware.CPU), backend="fast")
    with pytest.raises(KernelError, match="no backend 'slow'"):
        TOY.choose(SizeCase(k=16, hardware=hardware.CPU), backend="slow")


def test_explain_lists_every_backend_and_chooses_one():
    rows = explain(TOY, 13, device="NVIDIA H200")
    assert [(r.backend, r.chosen) for r in rows] == [("fast", False), ("xla", True)]
    assert rows[0].reason == "K=13 is not a multiple of 16"
    assert [r.chosen for r in explain(TOY, 16, device="NVIDIA H200")] == [True, False]


SIZES = {
    "quantize": (13, 200),
    "fp8_matmul": (13, 16, 200),
    "grouped_matmul": (13, 16, 200, 4),
    "mla_decode": (2, 16, 200, 4),
    "flash_attention": (16, 16, 4, 2, 64, 64),
    "widened_matmul": (2, 16, 200, 130),
}


@pytest.mark.parametrize("name", registry.OPS)
@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200", "TPU v5p", "an unheard-of device"])
def test_every_op_has_a_backend_that_serves_every_device(name, device):
    op = registry.find_op(name)
    rows = explain(name, *SIZES[name], device=device)
    assert sum(row.chosen for row in rows) == 1
    assert op.backends[-1].name == "xla"


class EntryPoint:
    def __init__(self, name, loads_to):
        self.name, self.loads_to = name, loads_to

    def load(self):
        return self.loads_to


def test_a_backend_of_another_package_comes_first(monkeypatch):
    theirs = Backend(name="npu", refuses=lambda case: None, run=max)
    entries = [EntryPoint("toy.npu", theirs), EntryPoint("other", theirs)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry.outside_backends.cache_clear()
    assert TOY.choose(SizeCase(k=13, hardware=hardware.CPU)).name == "npu"
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("toy", max)])
    registry.outside_backends.cache_clear()
    with pytest.raises(KernelError, match="must be a"):
        TOY.choose(SizeCase(k=13, hardware=hardware.CPU))
    registry.outside_backends.cache_clear()
