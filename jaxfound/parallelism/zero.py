"""What ZeRO does to a model's arrays where a dim does not divide: said before anything runs.

The rule itself is `ShardingRules.fsdp_dim`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxfound.config.parallel import ZeroStage
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.parallelism.axes import FSDP_DIMS, ShardingRules

# Arrays that fsdp cuts at each stage, and whether they may be cut along the stack of layers.
CUT: Mapping[ZeroStage, tuple[tuple[str, bool], ...]] = {
    0: (),
    1: (("moments", True),),
    2: (("gradients", True), ("moments", True)),
    3: (("parameters", False), ("gradients", True), ("moments", True)),
}
NUM_NAMED = 3


def notes(params: ParamTable, rules: ShardingRules) -> list[str]:
    """Return what a reader should know of this stage on this model, one sentence each.

    Nothing where every array is cut along the dim that asks for it.
    """
    stage, fsdp = rules.zero_stage, rules.degree("fsdp")
    if fsdp == 1:
        return _nothing_to_share(rules)
    asking = [s for s in params if s.kind == "param" and set(s.dims) & set(FSDP_DIMS)]
    said: dict[str, list[str]] = {}
    # Stages add gradients up whole, and hand on their parts when a step's are summed.
    staged = stage > 0 and rules.degree("pipeline") > 1
    for what, layers in CUT[1 if staged else stage]:
        chosen = [rules.fsdp_dim(s.dims, s.shape, layers=layers) for s in asking]
        for text in _departures(asking, chosen, rules):
            said.setdefault(text, []).append(what)
    return [f"{', '.join(whats)}: fsdp={fsdp} {text}" for text, whats in said.items()]


def whole_bytes(spec: ParamSpec, rules: ShardingRules) -> int:
    """Return the float32 bytes on one device of an array that fsdp leaves whole."""
    pieces = [rules.pieces(axes) for axes in rules.used_axes(spec.dims)]
    size = 4
    for length, cut in zip(spec.shape, pieces, strict=True):
        size *= length // cut
    return size


def _nothing_to_share(rules: ShardingRules) -> list[str]:
    data = rules.degree("data")
    # Stage 3 is the default and says nothing; 1 and 2 were asked for.
    if rules.zero_stage not in (1, 2) or data == 1:
        return []
    return [
        f"zero_stage={rules.zero_stage} cuts nothing: state is shared over fsdp, and "
        f"parallel.fsdp=1. parallel.fsdp={data} with parallel.data=1 shares it over the same "
        "devices"
    ]


def _departures(
    specs: Sequence[ParamSpec], chosen: Sequence[int | None], rules: ShardingRules
) -> list[str]:
    """Return a sentence on the arrays cut along another dim, and one on those left whole."""
    found = []
    pairs = list(zip(specs, chosen, strict=True))
    dims = Counter(str(s.dims[i]) for s, i in pairs if i is not None)
    others = {dim: n for dim, n in dims.items() if dim not in FSDP_DIMS}
    if others:
        told = ", ".join(f"{n} along {dim}" for dim, n in sorted(others.items()))
        found.append(f"divides neither embed nor latent of some and cuts {told}")
    whole = [s for s, i in pairs if i is None]
    if whole:
        total = sum(whole_bytes(s, rules) for s in whole)
        names = ", ".join(s.path for s in whole[:NUM_NAMED])
        rest = f" and {len(whole) - NUM_NAMED} more" if len(whole) > NUM_NAMED else ""
        ids, cut = any("vocab" in s.dims for s in whole), rules.pieces(("tensor", "fsdp"))
        way_out = f". With a model.vocab_multiple that {cut} divides, ids are cut" if ids else ""
        found.append(
            f"divides no dim of {len(whole)}, which stay whole on every device, {total:,} bytes "
            f"in float32: {names}{rest}{way_out}"
        )
    return found
