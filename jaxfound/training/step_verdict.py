"""What takes a step's time and should not: each fault by its sign, with the way out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxfound.config.params import STACK_DIMS, ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.parallelism.memory import Slots
from jaxfound.parallelism.plan import POLICIES, ParallelPlan, make_plan
from jaxfound.training.product_formats import Products
from jaxfound.training.step_profile import Breakdown

Fault = Literal["slow input", "small micro-batch", "remat too strong", "float32 products"]
# Share of a step of the loop that the bare step does not need. With batches that are ready it is
# about 1 %; rounds on a shared host read up to 4 %.
OUTSIDE_LIMIT = 0.05
# Of that, so much the loop was waiting for its next batch: the rest has other reasons.
INPUT_SHARE = 0.5
# Share of the time in which a device computes that does not grow with tokens: adding up gradients,
# and the update. At 16 rows of 2,048 tokens a device the update of AdamW takes 2 % on an H200; a
# tenth is reached by micro-batches of about 1,000.
FIXED_LIMIT = 0.10
# The same share of what is computed again: by the plan of configs/dense-1.3b.yaml on an H200 it is
# 3 % with matmul_outputs and 20 % with full.
AGAIN_LIMIT = 0.08
# Share of the FLOPs that float32 may have. It runs at half the speed of bfloat16 or slower, so 2 %
# cost 2 % of a step or more: as much as a breakdown is exact to. A router's are below 0.5 %.
WIDE_LIMIT = 0.02
WAITING = ("collectives", "idle")


class Verdict(NamedTuple):
    """A fault that was found.

    Attributes:
        fault: which.
        seen: by what it shows, with its numbers.
        remedy: what to change.
    """

    fault: Fault
    seen: str
    remedy: str

    def text(self) -> str:
        """Return it as a line."""
        return f"{self.fault}: {self.seen}. {self.remedy}"


@dataclass(frozen=True)
class Facts:
    """What a step is judged by.

    Attributes:
        outside_share: of a step of the loop, what the bare step does not need; 0 without a loop.
        data_share: of a step of the loop, in which it waited for a batch.
        parts: seconds of a profiled step by part; empty without a profile.
        products: of the traced step, by format.
        matrices: paths of parameters by the shape in which one layer multiplies with them.
        compute: format of activations and products.
        tokens: of one device in a micro-batch.
        num_microbatches: of a step.
        fewer_microbatches: how many would fit by the plan; 0 = no fewer.
        remat: policy of recomputation.
        weaker_remat: a policy that computes less again and fits by the plan; empty = none does.
    """

    outside_share: float
    data_share: float
    parts: Mapping[str, float]
    products: tuple[Products, ...]
    matrices: Mapping[tuple[int, ...], tuple[str, ...]]
    compute: str
    tokens: int
    num_microbatches: int
    fewer_microbatches: int
    remat: str
    weaker_remat: str

    def share(self, *parts: str) -> float:
        """Return the share of some parts in the time that is computed; 0 without a profile."""
        total = sum(seconds for part, seconds in self.parts.items() if part not in WAITING)
        return sum(self.parts.get(part, 0.0) for part in parts) / total if total else 0.0


def slow_input(facts: Facts) -> Verdict | None:
    """Return the verdict where the device waits for batches."""
    outside = facts.outside_share
    if outside <= OUTSIDE_LIMIT or facts.data_share < INPUT_SHARE * outside:
        return None
    return Verdict(
        "slow input",
        f"{outside:.0%} of a step of the loop is not the step, and the loop waits for its next "
        f"batch for {facts.data_share:.0%}",
        "Raise data.num_prefetch, use data.loader=grain, or put data.prepared_dir on a faster disk",
    )


def small_microbatch(facts: Facts) -> Verdict | None:
    """Return the verdict where work that each micro-batch or step repeats outweighs its tokens."""
    fixed = facts.share("accumulation", "update")
    if fixed <= FIXED_LIMIT:
        return None
    seen = (
        f"{fixed:.0%} of what is computed is the same however few tokens there are (adding up "
        f"gradients {facts.share('accumulation'):.0%}, update {facts.share('update'):.0%}); a "
        f"micro-batch has {facts.tokens:,} tokens a device"
    )
    if facts.num_microbatches > 1 and facts.fewer_microbatches:
        remedy = f"By the plan parallel.num_microbatches={facts.fewer_microbatches} fits"
    elif facts.num_microbatches > 1:
        remedy = (
            "Fewer micro-batches do not fit by the plan: raise parallel.fsdp, or parallel.remat"
        )
    else:
        remedy = "Raise train.batch_size or train.seq_len"
    return Verdict("small micro-batch", seen, remedy)


def strong_remat(facts: Facts) -> Verdict | None:
    """Return the verdict where more is computed again than the memory asks for."""
    again = facts.share("recompute")
    if again <= AGAIN_LIMIT or not facts.weaker_remat:
        return None
    return Verdict(
        "remat too strong",
        f"{again:.0%} of what is computed was there before, and parallel.remat={facts.remat} did "
        "not keep it",
        f"By the plan parallel.remat={facts.weaker_remat} fits",
    )


def wide_products(facts: Facts) -> Verdict | None:
    """Return the verdict where products that should be narrow are in float32."""
    wide = [row for row in facts.products if row.format == "float32"]
    total = sum(row.flops for row in facts.products)
    share = sum(row.flops for row in wide) / total if total else 0.0
    if facts.compute == "float32" or share <= WIDE_LIMIT:
        return None
    left, right = wide[0].shapes
    paths = (*facts.matrices.get(right, ()), *facts.matrices.get(left, ()))
    matrix = f", the shape of {' and '.join(paths)}" if paths else ""
    return Verdict(
        "float32 products",
        f"{share:.1%} of the FLOPs of products have float32 operands while precision.compute="
        f"{facts.compute}; most are {list(left)} x {list(right)}{matrix}, at {wide[0].source}",
        "Look for a rule in precision.rules, or for a cast there",
    )


JUDGES: Mapping[Fault, Callable[[Facts], Verdict | None]] = {
    "slow input": slow_input,
    "small micro-batch": small_microbatch,
    "remat too strong": strong_remat,
    "float32 products": wide_products,
}


def verdicts(facts: Facts) -> tuple[Verdict, ...]:
    """Return the faults that show."""
    found = (judge(facts) for judge in JUDGES.values())
    return tuple(one for one in found if one is not None)


class Subject(NamedTuple):
    """A run as its plan was made: what others are tried with."""

    cfg: RunConfig
    plan: ParallelPlan
    params: ParamTable
    slots: Slots


def facts_of(
    subject: Subject,
    *,
    products: tuple[Products, ...],
    breakdown: Breakdown | None,
    outside_share: float = 0.0,
    data_share: float = 0.0,
) -> Facts:
    """Return what a run is judged by; what would fit is asked of plans."""
    cfg, plan = subject.cfg, subject.plan
    rows = cfg.train.batch_size // plan.num_microbatches // plan.batch_degree
    tokens = rows * cfg.train.seq_len // plan.degree("context")
    return Facts(
        outside_share=outside_share,
        data_share=data_share,
        parts={} if breakdown is None else {str(k): v for k, v in breakdown.parts.items()},
        products=products,
        matrices=matrices_of(subject.params),
        compute=cfg.precision.compute,
        tokens=tokens,
        num_microbatches=plan.num_microbatches,
        fewer_microbatches=fewer_that_fit(subject),
        remat=plan.remat,
        weaker_remat=weaker_that_fits(subject),
    )


def matrices_of(params: ParamTable) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the paths of matrices by their shape, dims that layers are stacked in left out."""
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for spec in params:
        if spec.is_matrix:
            dims = zip(spec.dims, spec.shape, strict=True)
            shape = tuple(size for dim, size in dims if dim not in STACK_DIMS)
            found[shape] = (*found.get(shape, ()), spec.path.removesuffix(".kernel"))
    return found


def fewer_that_fit(subject: Subject) -> int:
    """Return the fewest micro-batches with which the plan fits, below its own; 0 = none."""
    own = subject.plan.num_microbatches
    split = subject.plan.batch_degree
    for count in (n for n in range(1, own) if subject.cfg.train.batch_size % (n * split) == 0):
        if _fits(subject, num_microbatches=count):
            return count
    return 0


def weaker_that_fits(subject: Subject) -> str:
    """Return the policy that computes the least again of those that fit; empty = none is weaker."""
    own = POLICIES.index(subject.plan.remat)
    return next((name for name in POLICIES[:own] if _fits(subject, remat=name)), "")


def _fits(subject: Subject, **parallel: int | str) -> bool:
    changed = subject.cfg.parallel.model_copy(update=parallel)
    cfg = subject.cfg.model_copy(update={"parallel": changed})
    assert subject.plan.topology is not None
    plan = make_plan(
        cfg, subject.plan.topology, params=subject.params, optimizer_slots=subject.slots
    )
    return plan.ledger.fits is True
