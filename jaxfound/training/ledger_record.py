"""The memory ledger beside XLA: layouts, what a compiler makes of each, and by how much it is off.

A layout is compiled for devices that are not there; of a record that was written before, the
compiler's bytes are read again and only the plan is made anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

from jaxfound.config.load import parse
from jaxfound.config.run import RunConfig
from jaxfound.models import describe
from jaxfound.parallelism import ParallelPlan, make_plan
from jaxfound.resources.topology import Topology
from jaxfound.training.aot import compile_step, target_of
from jaxfound.training.events import TrainingError
from jaxfound.training.optimizer import optimizer_slots

FORMAT_VERSION = 1
# By how much the ledger may be off where a device holds a gibibyte or more, as a share of XLA's.
LIMIT = 0.15
LEAST_BYTES = 2**30


class Case(NamedTuple):
    """A layout.

    Attributes:
        preset: the model.
        topology: what it is for.
        keys: differences from the preset, `key=value` with spaces between.
    """

    preset: str
    topology: str
    keys: str


# Llama's shape with 1.3 B parameters, and 8 layers of Llama-3-8B's in 16 micro-batches.
DENSE = (
    "model.embed_dim=2048 model.num_layers=24 model.num_heads=16 model.gqa.num_kv_heads=16 "
    "model.ffn_dim=5632 model.vocab_size=32000 train.seq_len=4096"
)
# configs/dense-1.3b.yaml and configs/dense-2.7b.yaml.
WHOLE = (
    "model.vocab_size=50304 model.tie_embeddings=true model.rope.theta=10000.0 train.loss_chunk=0 "
    "train.documents=joined parallel.layers_per_scan_step=all"
)
PEER_13 = (
    f"{WHOLE} model.embed_dim=2048 model.num_layers=24 model.num_heads=16 "
    "model.gqa.num_kv_heads=16 model.ffn_dim=5632 train.seq_len=2048 train.batch_size=16"
)
PEER_27 = (
    f"{WHOLE} model.embed_dim=2560 model.num_layers=32 model.num_heads=20 "
    "model.gqa.num_kv_heads=20 model.ffn_dim=6912 train.seq_len=4096 train.batch_size=4"
)
# configs/dense-100m.yaml: hardly any logits, so that it peaks in a layer, and documents apart.
PEAK_IN_A_LAYER = (
    "model.vocab_size=384 model.embed_dim=1024 model.num_layers=8 model.num_heads=8 "
    "model.gqa.num_kv_heads=8 model.rope.theta=10000.0 model.ffn_dim=2816 "
    "model.tie_embeddings=true train.batch_size=32 train.seq_len=2048 train.loss_chunk=0 "
    "parallel.layers_per_scan_step=all"
)
IN_FP8 = 'precision.rules=[{"pattern":"layers.*","format":"fp8"}]'
# configs/moe-2.8b.yaml.
LITE_5 = (
    "model.num_layers=5 train.seq_len=4096 train.batch_size=4 train.documents=joined "
    "train.loss_chunk=0 parallel.layers_per_scan_step=all"
)
STAGES = (
    "model.num_layers=8 model.vocab_size=4096 train.seq_len=4096 train.batch_size=16 "
    "parallel.num_microbatches=16 parallel.remat=full parallel.pipeline=2"
)
LITE = "train.seq_len=4096 train.batch_size=4608 parallel.num_microbatches=576 parallel.remat=full"
CASES: Mapping[str, Case] = {
    "dense, remat none": Case(
        "llama3-8b", "1:h200", f"{DENSE} train.batch_size=8 parallel.remat=none"
    ),
    "dense, remat matmul_outputs": Case(
        "llama3-8b",
        "1:h200",
        f"{DENSE} train.batch_size=8 parallel.num_microbatches=2 parallel.remat=matmul_outputs",
    ),
    "1.3 B, whole logits": Case("llama3-8b", "1:h200", PEER_13),
    "2.7 B, whole logits": Case("llama3-8b", "1:h200", PEER_27),
    "2.7 B, in fp8": Case("llama3-8b", "1:h200", f"{PEER_27} {IN_FP8}"),
    "2.7 B, in fp8, two micro-batches": Case(
        "llama3-8b", "1:h200", f"{PEER_27} {IN_FP8} parallel.num_microbatches=2"
    ),
    "0.1 B, documents apart": Case("llama3-8b", "1:h200", PEAK_IN_A_LAYER),
    "5 layers of deepseek-v2-lite": Case("deepseek-v2-lite", "1:h200", LITE_5),
    "5 layers of deepseek-v2-lite, in fp8": Case(
        "deepseek-v2-lite", "1:h200", f"{LITE_5} {IN_FP8}"
    ),
    **{
        f"dense, fsdp 8, ZeRO {stage}": Case(
            "llama3-8b",
            "8:h200",
            f"{DENSE} train.batch_size=64 parallel.num_microbatches=4 parallel.remat=full "
            f"parallel.fsdp=8 parallel.zero_stage={stage}",
        )
        for stage in (0, 1, 2)
    },
    "llama3-8b, fsdp 8": Case(
        "llama3-8b",
        "8:h200",
        "train.seq_len=8192 train.batch_size=512 parallel.num_microbatches=64 parallel.remat=full "
        "parallel.fsdp=8",
    ),
    "llama3-8b, tensor 8": Case(
        "llama3-8b",
        "8:h200",
        "train.seq_len=8192 train.batch_size=8 parallel.num_microbatches=4 parallel.remat=full "
        "parallel.tensor=8",
    ),
    "llama3-8b, fsdp 4, context 2": Case(
        "llama3-8b",
        "8:h200",
        "train.seq_len=8192 train.batch_size=16 parallel.num_microbatches=4 parallel.remat=full "
        "parallel.fsdp=4 parallel.context=2",
    ),
    "deepseek-v2-lite, fsdp 8": Case("deepseek-v2-lite", "8:h200", f"{LITE} parallel.fsdp=8"),
    "deepseek-v2-lite, expert 8": Case("deepseek-v2-lite", "8:h200", f"{LITE} parallel.expert=8"),
    "50b, data 3, fsdp 4, tensor 2": Case(
        "50b",
        "3x8:h200:ib400",
        "train.seq_len=4096 train.batch_size=48 parallel.num_microbatches=4 parallel.remat=full "
        "parallel.data=3 parallel.fsdp=4 parallel.tensor=2",
    ),
    "50b, data 2, fsdp 64, tensor 4": Case(
        "50b",
        "64x8:h200:ib400",
        "train.seq_len=8192 train.batch_size=512 parallel.num_microbatches=4 parallel.remat=full "
        "parallel.data=2 parallel.fsdp=64 parallel.tensor=4",
    ),
    "50b, paired_1f1b 4, fsdp 3, tensor 2": Case(
        "50b",
        "3x8:h200:ib400",
        "train.seq_len=4096 train.batch_size=48 parallel.num_microbatches=8 parallel.remat=full "
        "parallel.pipeline=4 parallel.fsdp=3 parallel.zero_stage=2 parallel.tensor=2",
    ),
    **{
        f"8 layers, {schedule} 2": Case(
            "llama3-8b", "2:h200", f"{STAGES} parallel.schedule={schedule}"
        )
        for schedule in ("paired_1f1b", "gpipe", "interleaved", "zero_bubble", "dualpipe")
    },
    "deepseek-v3, dualpipev 16, expert 64": Case(
        "deepseek-v3",
        "256x8:h800:ib400",
        "train.seq_len=4096 train.batch_size=15360 parallel.num_microbatches=120 "
        "parallel.remat=full parallel.pipeline=16 parallel.schedule=dualpipev parallel.expert=64 "
        "parallel.fsdp=2 parallel.zero_stage=1",
    ),
}


class Compiled(NamedTuple):
    """A compiler's bytes of one device.

    Attributes:
        arguments: state and batch.
        total: what the step needs to run, cuDNN's workspace apart.
    """

    arguments: int
    total: int


@dataclass(frozen=True)
class LedgerRow:
    """The ledger of a layout beside the compiler's bytes of one device.

    Attributes:
        name: of the case.
        case: the layout.
        compiled: by the compiler.
        planned: the ledger's total, without margin and workspace.
        workspace: what cuDNN adds on the devices, by the ledger.
        arguments: parameters, optimizer and inputs by the ledger.
        ledger: by kind.
    """

    name: str
    case: Case
    compiled: Compiled
    planned: int
    workspace: int
    arguments: int
    ledger: Mapping[str, int]

    @property
    def error(self) -> float:
        """By how much the ledger is off, as a share of the compiler's bytes."""
        return self.planned / self.compiled.total - 1

    @property
    def is_right(self) -> bool:
        """Whether arguments are exact and the total is as near as it has to be."""
        near = abs(self.error) <= LIMIT or self.compiled.total < LEAST_BYTES
        return near and self.arguments == self.compiled.arguments


def run_of(case: Case) -> RunConfig:
    """Return the config of a case."""
    values = {"preset": case.preset, "train": {"steps": 1}}
    return parse(values, case.keys.split())


def plan_of(case: Case) -> ParallelPlan:
    """Return the plan of a case; nothing is compiled.

    Raises:
        PlanError: if the layout is not legal.
    """
    cfg = run_of(case)
    table = describe(cfg.model)
    slots = optimizer_slots(cfg.optimizer, table)
    return make_plan(cfg, Topology.parse(case.topology), params=table, optimizer_slots=slots)


def rows_of(
    names: Sequence[str], *, recorded: Mapping[str, Compiled] | None = None
) -> Iterator[LedgerRow]:
    """Yield the row of each case when it is known.

    Args:
        names: keys of `CASES`.
        recorded: the compiler's bytes by name, where they are not to be asked for again.

    Raises:
        TrainingError: if there is no case of a name, or no compiler for its devices.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise TrainingError(f"no case is called {unknown[0]!r}; use some of {'; '.join(CASES)}")
    for name in names:
        case = CASES[name]
        plan = plan_of(case)
        compiled = recorded[name] if recorded is not None else compiled_bytes(case, plan)
        yield row_of(name, case, plan=plan, compiled=compiled)


def compiled_bytes(case: Case, plan: ParallelPlan) -> Compiled:
    """Return what the compiler for a case's devices makes of it.

    Raises:
        TrainingError: if that compiler is not installed: another's bytes say nothing here.
    """
    target = target_of(Topology.parse(case.topology))
    if target.stand_in:
        raise TrainingError(f"there is nothing to compare with: {target.stand_in}")
    memory = compile_step(run_of(case), plan, target=target).memory
    return Compiled(memory.arguments, memory.total)


def row_of(name: str, case: Case, *, plan: ParallelPlan, compiled: Compiled) -> LedgerRow:
    """Return the row of a plan and the compiler's bytes."""
    ledger = plan.ledger
    return LedgerRow(
        name=name,
        case=case,
        compiled=compiled,
        planned=ledger.total_bytes - ledger.of("margin") - ledger.of("workspace"),
        workspace=ledger.of("workspace"),
        arguments=ledger.argument_bytes,
        ledger={entry.kind: entry.num_bytes for entry in ledger.entries},
    )


def as_record(rows: Sequence[LedgerRow], **made: str) -> dict[str, Any]:
    """Return rows as plain data for JSON, with what the caller knows of how they were made."""
    return {
        "format_version": FORMAT_VERSION,
        **made,
        "limit": LIMIT,
        "rows": [
            {
                **asdict(row),
                "case": row.case._asdict(),
                "compiled": row.compiled._asdict(),
                "error": row.error,
            }
            for row in rows
        ],
    }


def compiled_in(record: Mapping[str, object]) -> dict[str, Compiled]:
    """Return the compiler's bytes of a record by name."""
    rows = cast(Sequence[Mapping[str, object]], record["rows"])
    return {str(row["name"]): Compiled(**cast(Mapping[str, int], row["compiled"])) for row in rows}
