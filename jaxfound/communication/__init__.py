"""Communication layer: the collectives of a program, what they cost and whether they are there."""

from jaxfound.communication.hlo import Collective, axes_crossed, collectives

__all__ = ["Collective", "axes_crossed", "collectives"]
