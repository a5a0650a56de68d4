"""Which layers each chunk of a pipeline holds, and the order in which they are stored."""

from dataclasses import dataclass

import numpy as np

from jaxfound.parallelism.pipeline.schedule import Schedule

# What a place of a chunk holds when its stage has fewer layers than the largest.
NO_LAYER = -1


@dataclass(frozen=True)
class StageLayers:
    """The layers of each chunk, every chunk with as many places as the largest stage has layers.

    A stack of layers is stored chunk by chunk, rank by rank: places first to last. Cut evenly over
    the `pipeline` axis, each device then holds the places of its own chunks.

    Attributes:
        num_ranks: devices along the axis.
        num_chunks: chunks of each.
        places: the layer at each stored place, or `NO_LAYER`; of two copies both are here.
    """

    num_ranks: int
    num_chunks: int
    places: tuple[int, ...]

    @property
    def layers_a_chunk(self) -> int:
        """Places of a chunk."""
        return len(self.places) // (self.num_ranks * self.num_chunks)

    @property
    def num_masked(self) -> int:
        """Places that hold no layer: they are computed and their result is not used."""
        return sum(layer == NO_LAYER for layer in self.places)

    @property
    def is_natural(self) -> bool:
        """Whether the layers are stored once each and in order."""
        return self.places == tuple(range(len(self.places)))

    def table(self) -> np.ndarray:
        """Return the layer of each place, int32 [ranks chunks places]."""
        shape = (self.num_ranks, self.num_chunks, self.layers_a_chunk)
        return np.asarray(self.places, np.int32).reshape(shape)

    def place_of_layer(self) -> np.ndarray:
        """Return the first place that holds each layer, int32 [layers]."""
        table = np.asarray(self.places)
        return np.asarray(
            [np.flatnonzero(table == layer)[0] for layer in range(table.max() + 1)], np.int32
        )


def stage_layers(num_layers: int, schedule: Schedule) -> StageLayers:
    """Return the layers of each chunk: stages of equal size, the last ones short.

    Args:
        num_layers: layers of the stack that is cut; fewer than stages leave stages without any.
        schedule: where each stage lives.
    """
    most = -(-num_layers // schedule.num_stages)
    fewer = schedule.num_stages * most - num_layers
    sizes = [most - (stage >= schedule.num_stages - fewer) for stage in range(schedule.num_stages)]
    heads = np.cumsum([0, *sizes])
    places: list[int] = []
    for rank in range(schedule.num_ranks):
        for stage in schedule.stages_of(rank):
            held = list(range(heads[stage], heads[stage] + sizes[stage]))
            places += held + [NO_LAYER] * (most - len(held))
    return StageLayers(schedule.num_ranks, schedule.num_chunks, tuple(places))
