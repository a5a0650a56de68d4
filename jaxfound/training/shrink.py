"""A run made small: the same structure and the same divisibility, sizes that compile in seconds."""

import math
from collections.abc import Mapping, Sequence

from jaxfound.config.model import MlaConfig, ModelConfig, MoeConfig
from jaxfound.config.parallel import AXES, AxisName, ParallelConfig
from jaxfound.config.run import RunConfig
from jaxfound.parallelism.axes import BATCH_AXES
from jaxfound.parallelism.context import CHUNKS_EACH
from jaxfound.parallelism.legal import choose_zero_stage
from jaxfound.parallelism.pipeline.builders import SCHEDULES

# Layers that are left of each homogeneous stack: two, so that the scan over them is a scan.
STACK_LAYERS = 2
# Pieces of the global batch that are left, in a pipeline for each rank: more of them are the same
# loop again.
MICROBATCHES = 2
# Rows of a micro-batch on one device.
DEVICE_ROWS = 1
VOCAB_SIZE = 61

type Degrees = Mapping[AxisName, int]


def smaller(size: int, least: int, *, degrees: Sequence[int], step: int = 1) -> int:
    """Return the smallest number from `least` on that each degree divides where it divides `size`.

    A dim that does not divide in the user's model does not divide in the small one either, so
    that it is cut along another dim, or left whole, in both.

    Args:
        step: what separates the numbers that are tried.
    """
    wanted = [size % d == 0 for d in degrees]
    found = (n for n in range(least, size, step) if [n % d == 0 for d in degrees] == wanted)
    return next(found, size)


def shrunk(cfg: RunConfig, degrees: Degrees) -> RunConfig:
    """Return `cfg` with small sizes, in float32, on a mesh of these degrees.

    Mixer, feed-forward, router, scaling of positions, prediction depth, tied embeddings, ZeRO
    stage, remat, scan and update rule stay; widths, layers, experts, rows and words get few.
    """
    stages = num_stages(cfg.parallel, degrees["pipeline"])
    model = shrunk_model(cfg.model, degrees, num_stages=stages)
    pieces = min(cfg.parallel.num_microbatches, MICROBATCHES * degrees["pipeline"])
    rows = DEVICE_ROWS * pieces * math.prod(degrees[axis] for axis in BATCH_AXES)
    step, (zero, _) = cfg.parallel.layers_per_scan_step, choose_zero_stage(cfg.parallel, degrees)
    values = cfg.model_dump()
    values["model"] = model.model_dump()
    values["precision"] = {"compute": "float32", "rules": ()}
    values["parallel"] |= {
        **degrees,
        "num_microbatches": pieces,
        "zero_stage": zero,
        "layers_per_scan_step": step if step == "all" else min(step, model.num_layers),
    }
    values["train"] |= {
        "steps": 1,
        "batch_size": rows,
        "seq_len": model.max_positions,
        "loss_chunk": min(cfg.train.loss_chunk, model.max_positions // 2),
        "init_from": "",
    }
    values["optimizer"] |= {"warmup_steps": 0, "decay_steps": 0}
    return RunConfig.model_validate(values, strict=False)


def as_it_is(cfg: RunConfig, degrees: Degrees) -> RunConfig:
    """Return `cfg` on a mesh of these degrees, with its own sizes and formats."""
    zero, _ = choose_zero_stage(cfg.parallel, degrees)
    values = cfg.model_dump()
    values["parallel"] |= {**degrees, "zero_stage": zero}
    values["train"] |= {"init_from": ""}
    return RunConfig.model_validate(values, strict=False)


def num_stages(parallel: ParallelConfig, num_ranks: int) -> int:
    """Return the stages that the layers are cut into on so many ranks."""
    if num_ranks == 1:
        return 1
    return SCHEDULES[parallel.schedule].num_stages(num_ranks, parallel.chunks)


def stack_layers(num_layers: int, num_stages: int) -> int:
    """Return how many layers of the main stack are left: two a stage, the last one a layer short.

    The last stage is short where one of the model's is, and a model with fewer layers than stages
    keeps them.
    """
    if num_layers < num_stages:
        return num_layers
    return STACK_LAYERS * num_stages - (num_layers % num_stages > 0)


def shrunk_model(model: ModelConfig, degrees: Degrees, *, num_stages: int = 1) -> ModelConfig:
    """Return the model with small sizes that divide where the model's do."""
    cuts = [degrees["tensor"], degrees["fsdp"], degrees["tensor"] * degrees["fsdp"]]
    num_leading = min(model.num_leading_layers, 1)
    main_layers = stack_layers(model.num_layers - model.num_leading_layers, num_stages)
    num_layers = num_leading + main_layers
    length = smaller(4096, 16, degrees=[CHUNKS_EACH * degrees["context"]])
    heads, kv_heads = shrunk_heads(model, degrees["tensor"])
    changes: dict[str, object] = {
        "vocab_size": min(model.vocab_size, VOCAB_SIZE),
        "vocab_multiple": smaller(model.padded_vocab_size, VOCAB_SIZE, degrees=cuts),
        "embed_dim": smaller(model.embed_dim, 32, degrees=cuts),
        "num_layers": num_layers,
        "num_dense_layers": num_leading if model.ffn == "moe" else 0,
        "num_heads": heads,
        "ffn_dim": smaller(model.ffn_dim, 48, degrees=cuts),
        "mtp_depth": min(model.mtp_depth, 1),
        "max_positions": length,
    }
    rope = model.rope
    if rope.scaling != "none":
        changes["rope"] = rope.model_copy(update={"original_max_positions": length // 2})
    if model.mixer == "mla":
        changes["mla"] = shrunk_latent(model.mla, cuts)
    else:
        width = smaller(model.gqa.head_dim, 8, degrees=cuts, step=2)
        changes["gqa"] = model.gqa.model_copy(update={"num_kv_heads": kv_heads, "head_dim": width})
    if model.ffn == "moe":
        changes["moe"] = shrunk_experts(model.moe, degrees, cuts)
    values = model.model_copy(update=changes).model_dump()
    return ModelConfig.model_validate(values)


def shrunk_heads(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Return few query and key heads; both divide over `tensor` where the model's do."""
    if model.mixer == "mla":
        return smaller(model.num_heads, 2, degrees=[tensor]), 1
    kv_heads = smaller(model.gqa.num_kv_heads, 1, degrees=[tensor])
    group = model.num_heads // model.gqa.num_kv_heads
    divides = model.num_heads % tensor == 0
    groups = range(min(group, 2), group + 1)
    return kv_heads * next(g for g in groups if (kv_heads * g % tensor == 0) == divides), kv_heads


def shrunk_latent(mla: MlaConfig, cuts: Sequence[int]) -> MlaConfig:
    """Return small ranks and heads, all of different sizes."""
    rank = smaller(mla.q_lora_rank, 24, degrees=cuts) if mla.q_lora_rank else 0
    # Keys without position are a dim of their own, and with the rotated ones another.
    nope = smaller(mla.qk_nope_head_dim, 8, degrees=cuts)
    whole = smaller(mla.qk_head_dim, nope + 4, degrees=cuts, step=2)
    return mla.model_copy(
        update={
            "q_lora_rank": rank,
            "kv_lora_rank": smaller(mla.kv_lora_rank, 16, degrees=cuts),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": whole - nope,
            "v_head_dim": smaller(mla.v_head_dim, 14, degrees=cuts),
        }
    )


def shrunk_experts(moe: MoeConfig, degrees: Degrees, cuts: Sequence[int]) -> MoeConfig:
    """Return few experts in as many groups, a token using at most two of them."""
    top_k = min(moe.top_k, 2)
    # Each kept group has an expert for every choice, and two for its score.
    least = moe.num_groups * max(2, -(-top_k // moe.top_groups))
    fitting = (
        n
        for n in range(least, moe.num_experts + 1, moe.num_groups)
        if (n % degrees["expert"] == 0) == (moe.num_experts % degrees["expert"] == 0)
    )
    return moe.model_copy(
        update={
            "num_experts": next(fitting, moe.num_experts),
            "top_k": top_k,
            "expert_dim": smaller(moe.expert_dim, 16, degrees=cuts),
            "num_shared_experts": min(moe.num_shared_experts, 1),
        }
    )


def small_degrees(degrees: Degrees, *, most: int) -> dict[AxisName, int]:
    """Return the degrees, each cut to its smallest prime factor if there are too many devices.

    Args:
        most: devices that there may be.
    """
    if math.prod(degrees.values()) <= most:
        return {axis: degrees[axis] for axis in AXES}
    return {axis: smallest_factor(degrees[axis]) for axis in AXES}


def smallest_factor(n: int) -> int:
    """Return the smallest prime factor of n, 1 for 1."""
    return next((d for d in range(2, n + 1) if n % d == 0), 1)
