"""The bench of attention yields a record for each candidate and says why one is missing."""

import json

from pallas_kernels import hardware
from pallas_kernels.bench import flash_attention as bench
from pallas_kernels.bench import timing
from pallas_kernels.bench.measure import Options, Plan, measure
from tests.pallas_kernels.attention_cases import stand_in_for_cudnn

CEILINGS = {"bfloat16_flops": 5e14, "copy_bps": 4e12}
OPTIONS = Options(num_rounds=1, rest_s=0.0, num_threads=1)


def test_every_candidate_gets_a_record_or_a_reason(monkeypatch):
    # A CPU has no kernels to time.
    monkeypatch.setattr(timing, "_round_us", lambda candidate, num_calls, num_before: 1e3)
    monkeypatch.setattr(bench, "NUM_WALL_CALLS", 1)
    # JAX's own interface asks this machine for a cuDNN.
    monkeypatch.delitem(bench.UNPACKED, "jax_cudnn_unpacked")
    for bound in bench.BOUNDS[1:]:
        monkeypatch.delitem(bench.PACKED, f"cudnn_packed_{bound}")
    stand_in_for_cudnn(monkeypatch)
    sizes = (1, 40, 2, 1, 24, 16)
    with hardware.target("NVIDIA H200"):
        plan = Plan("flash_attention", {}, 0, lambda: bench.problem(sizes, "forward"))
        (finished,) = measure([plan], ceilings=CEILINGS, options=OPTIONS)
    records = {record.backend: record for record in finished.records}
    assert set(records) == {f"{name}/forward" for name in bench.PACKED | bench.UNPACKED}
    for name, record in records.items():
        json.dumps(record.as_json())
        assert record.against in ("", "cudnn_packed_16/forward")
        if record.note.startswith("not carried"):
            assert name == "torch_unpacked/forward"
            continue
        assert record.rounds_us, record.note
        assert record.flops > 0
        assert record.floor_us > 0
        assert record.memory_bytes > 0
        assert "wall" in record.note
        packed = name.split("/")[0] in bench.PACKED
        assert (record.total_error is not None) == packed
        assert not packed or record.total_error < 1e-5


def test_work_is_counted_inside_documents():
    problem = bench.make_problem((1, 32, 1, 1, 8, 8))
    sizes = [int((problem.ids == n).sum()) for n in range(1, int(problem.ids.max()) + 1)]
    assert problem.flops(packed=True) == 16 * sum(n * (n + 1) for n in sizes)
    assert problem.flops(packed=False) == 16 * 32 * 33
