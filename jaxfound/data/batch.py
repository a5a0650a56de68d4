"""What flows from data to the model."""

from typing import Any, NamedTuple

# numpy's array on the host, JAX's on devices: this room knows no JAX, and both are used alike.
Array = Any


class Batch(NamedTuple):
    """Rows of tokens, [B T] each, on the host or on devices.

    Attributes:
        tokens: inputs, int32.
        targets: the token after each input, int32.
        positions: offset in the segment, int32; begins at 0 in every segment.
        segment_ids: 1, 2 … for the stretches of documents in a row, int32; 0 is padding. Tokens
            of different segments never see each other.
        loss_mask: which targets count, bool; never true in padding.
    """

    tokens: Array
    targets: Array
    positions: Array
    segment_ids: Array
    loss_mask: Array
