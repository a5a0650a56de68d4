"""How the work is spread: mesh axes, micro-batches, scan and remat."""

from typing import Annotated, Literal

from pydantic import Field

from jaxfound.config.schema import Section, key

Positive = Annotated[int, Field(ge=1)]
AxisName = Literal["pipeline", "data", "fsdp", "expert", "context", "tensor"]
ZeroStage = Literal[0, 1, 2, 3]
Activations = Literal["replicated", "sequence"]
ScheduleName = Literal[
    "gpipe", "1f1b", "paired_1f1b", "interleaved", "zero_bubble", "dualpipe", "dualpipev"
]
AXES: tuple[AxisName, ...] = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


class ParallelConfig(Section):
    """Degrees of the six mesh axes, and how the layers are walked."""

    pipeline: int = key(1, "stages the layers are cut into", ge=1)
    data: Positive | Literal["auto"] = key(
        "auto", "replicas of the model; auto = every device the other axes leave"
    )
    fsdp: int = key(
        1, "devices that see different rows and share the state that zero_stage says", ge=1
    )
    expert: int = key(1, "devices that share the experts", ge=1)
    context: int = key(1, "devices that share one sequence", ge=1)
    tensor: int = key(1, "devices that share one matrix product", ge=1)
    tensor_span: Literal["host", "cluster"] = key(
        "host", "how far tensor may reach: inside one host, or anywhere at the network's speed"
    )
    activations: Activations = key(
        "replicated",
        "tokens between blocks on the devices of tensor: replicated = all of them on each, "
        "sequence = cut along the sequence",
    )
    zero_stage: ZeroStage = key(
        3,
        "state that is cut over fsdp: 0 none, 1 the optimizer's, 2 also summed gradients, "
        "3 also parameters",
    )
    num_microbatches: int = key(
        1, "pieces a global batch is cut into; gradients are summed over them", ge=1
    )
    schedule: ScheduleName = key("paired_1f1b", "order of the stages' forward and backward passes")
    chunks: int = key(2, "chunks of layers that each rank of the interleaved schedule holds", ge=1)
    layers_per_scan_step: Positive | Literal["all"] = key(
        1, "layers unrolled in one step of the scan over layers; all = no scan"
    )
    remat: Literal["none", "matmul_outputs", "full", "auto"] = key(
        "none",
        "what the backward pass recomputes: nothing, all but matmul outputs, everything; "
        "auto = the fastest of these that fits, by the plan",
    )
