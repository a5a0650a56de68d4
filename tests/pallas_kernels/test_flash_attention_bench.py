"""The bench of attention yields a record for each candidate and says why one is missing."""

import json

from pallas_kernels import hardware, mosaic
from pallas_kernels.bench import flash_attention as bench
from tests.pallas_kernels.attention_cases import stand_in_for_cudnn

CEILINGS = {"bfloat16_flops": 5e14, "copy_bps": 4e12}


def test_every_candidate_gets_a_record_or_a_reason(monkeypatch):
    # A CPU has no kernels to time.
    monkeypatch.setattr(mosaic, "kernel_seconds", lambda run: 1e-3)
    monkeypatch.setattr(bench, "NUM_WALL_CALLS", 1)
    # JAX's own interface asks this machine for a cuDNN.
    monkeypatch.delitem(bench.UNPACKED, "jax_cudnn_unpacked")
    for bound in bench.BOUNDS[1:]:
        monkeypatch.delitem(bench.PACKED, f"cudnn_packed_{bound}")
    stand_in_for_cudnn(monkeypatch)
    with hardware.target("NVIDIA H200"):
        found = bench.bench(
            (1, 40, 2, 1, 24, 16), ceilings=CEILINGS, num_rounds=1, phases=("forward",)
        )
        records = {record.backend: record for record in found}
    assert set(records) == {f"{name}/forward" for name in bench.PACKED | bench.UNPACKED}
    for name, record in records.items():
        json.dumps(record.as_json())
        if record.note.startswith("not carried"):
            assert name == "torch_unpacked/forward"
            continue
        assert record.flops > 0
        assert record.floor_us > 0
        packed = name.split("/")[0] in bench.PACKED
        assert (record.total_error is not None) == packed
        assert not packed or record.total_error < 1e-5


def test_work_is_counted_inside_documents():
    problem = bench.make_problem((1, 32, 1, 1, 8, 8))
    sizes = [int((problem.ids == n).sum()) for n in range(1, int(problem.ids.max()) + 1)]
    assert problem.flops(packed=True) == 16 * sum(n * (n + 1) for n in sizes)
    assert problem.flops(packed=False) == 16 * 32 * 33
