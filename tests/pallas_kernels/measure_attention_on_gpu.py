"""Measure attention on this machine's card and leave JSON under a folder.

python -m tests.pallas_kernels.measure_attention_on_gpu OUT [ROUNDS [INDEX OF SIZES ...]]
"""

import json
import sys
from pathlib import Path

from pallas_kernels.bench import flash_attention
from pallas_kernels.bench.timing import ceilings, versions
from pallas_kernels.flash_attention.cases import BENCH_SIZES


def say(record):
    sizes = " ".join(f"{k}={v}" for k, v in record.sizes.items())
    error = "" if record.total_error is None else f" err {record.total_error:.1e}"
    sys.stdout.write(
        f"{sizes} {record.backend} {record.median_us:.1f} us (spread {record.spread:.0%}) "
        f"{record.tflops:.0f} TF{error} {record.note}\n"
    )
    sys.stdout.flush()


def measure(out, num_rounds, picked):
    found = {"versions": dict(versions()), "ceilings": dict(ceilings()), "records": []}
    sys.stdout.write(f"{found}\n")
    for sizes in picked:
        for record in flash_attention.bench(
            sizes, ceilings=found["ceilings"], num_rounds=num_rounds
        ):
            found["records"].append(record.as_json())
            say(record)
        name = "-".join(["flash_attention", *map(str, (BENCH_SIZES.index(s) for s in picked))])
        (out / f"{name}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    folder, rounds, *indices = [*sys.argv[1:], "9"] if len(sys.argv) == 2 else sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    measure(Path(folder), int(rounds), [BENCH_SIZES[int(i)] for i in indices] or BENCH_SIZES)
