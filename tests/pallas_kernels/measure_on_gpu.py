"""Measure the kernels on this machine's card and leave JSON under a folder.

python -m tests.pallas_kernels.measure_on_gpu OUT tune fp8_matmul
python -m tests.pallas_kernels.measure_on_gpu OUT bench fp8_matmul [ROUNDS]
"""

import importlib
import json
import os
import sys
from pathlib import Path

import jax

from pallas_kernels import tuning
from pallas_kernels.bench.timing import ceilings, versions
from pallas_kernels.fp8_matmul.cases import BENCH_M, BENCH_NK, BENCH_ODD
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.mla_decode import cases as mla_cases
from pallas_kernels.tuning import Table

SIZES = {
    "fp8_matmul": [(m, n, k) for m in BENCH_M for n, k in BENCH_NK],
    "fp8_odd": [shape for pair in BENCH_ODD for shape in pair],
    "grouped_matmul": list(grouped_cases.BENCH_SHAPES),
    "mla_decode": list(mla_cases.BENCH_SHAPES),
}
MODULES = {
    "fp8_matmul": "fp8_matmul",
    "fp8_odd": "fp8_matmul",
    "grouped_matmul": "grouped_matmul",
    "mla_decode": "mla_decode",
}


def chosen(op):
    """All sizes, or those whose first one (M or B) is listed in the variable FIRST_SIZES."""
    listed = os.environ.get("FIRST_SIZES")
    wanted = {int(size) for size in listed.split(",")} if listed else None
    return [sizes for sizes in SIZES[op] if wanted is None or sizes[0] in wanted]


def say(record):
    sizes = " ".join(f"{k}={v}" for k, v in record.sizes.items())
    error = "" if record.total_error is None else f" err {record.total_error:.1e}"
    sys.stdout.write(
        f"{record.op} {sizes} {record.backend} {record.median_us:.2f} us {record.tflops:.0f} TF "
        f"{record.gbps:.0f} GB/s{error} {record.settings or ''} {record.note}\n"
    )
    sys.stdout.flush()


def tune(out, op):
    module = importlib.import_module(f"pallas_kernels.bench.{MODULES[op]}")
    device = jax.devices()[0].device_kind
    table = Table(device, (("jax", jax.__version__),), tuning.shipped(device).entries)
    records = []
    for sizes in chosen(op):
        for record, found in module.tune(sizes, table):
            records.append(record.as_json())
            say(record)
            last = found
        table = last
        tuning.publish(table, out / f"{device.lower().replace(' ', '_')}.json")
        (out / f"{op}-sweep.json").write_text(json.dumps(records, indent=1))


def bench(out, op, num_rounds):
    module = importlib.import_module(f"pallas_kernels.bench.{MODULES[op]}")
    found = {"versions": dict(versions()), "ceilings": dict(ceilings()), "records": []}
    sys.stdout.write(f"{found}\n")
    for sizes in chosen(op):
        for record in module.bench(sizes, ceilings=found["ceilings"], num_rounds=num_rounds):
            found["records"].append(record.as_json())
            say(record)
        (out / f"{op}-bench.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    folder, action, name, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    if action == "tune":
        tune(Path(folder), name)
    else:
        bench(Path(folder), name, int(rest[0]) if rest else 9)
