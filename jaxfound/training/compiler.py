"""Options of XLA that a step is compiled with: one table, each with its platform and its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxfound.models.execution import Execution

type Value = bool | int | str


@dataclass(frozen=True)
class Option:
    """An option of the compiler that a step needs.

    Attributes:
        name: as XLA spells it.
        value: what it is set to.
        platform: where it means something.
        applies: whether a model that is executed so needs it.
        reason: what happens without it.
    """

    name: str
    value: Value
    platform: str
    applies: Callable[[Execution], bool]
    reason: str


OPTIONS: tuple[Option, ...] = (
    Option(
        name="xla_cpu_enable_concurrency_optimized_scheduler",
        value=False,
        platform="cpu",
        applies=lambda execution: execution.pipelining is not None,
        reason=(
            "ranks of a pipeline take different branches, in which collectives that do not wait "
            "for each other may start in another order on each device: with experts and tensor "
            "split, jaxlib 0.11.2 then mixed up their messages, hung or broke the heap"
        ),
    ),
)


def compiler_options(execution: Execution, mesh: Mesh) -> dict[str, Value]:
    """Return the options for a program of a model on a mesh, ready for `jax.jit`."""
    platform = mesh.devices.flat[0].platform
    return {
        option.name: option.value
        for option in OPTIONS
        if option.platform == platform and option.applies(execution)
    }
