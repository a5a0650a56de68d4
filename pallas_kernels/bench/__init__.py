"""Time the kernels, their peers and the machine's ceilings in one process; yields records."""

from pallas_kernels.bench.timing import Candidate, Record, interleaved, paired_ratio

__all__ = ["Candidate", "Record", "interleaved", "paired_ratio"]
