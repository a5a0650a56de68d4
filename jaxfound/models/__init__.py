"""Model layer: one decoder from a ModelConfig, described, built sharded, run and cached."""

from jaxfound.models.build import abstract, build, describe
from jaxfound.models.cache import Cache, empty_cache
from jaxfound.models.decoder import Decoder
from jaxfound.models.execution import Execution, execution_of

__all__ = [
    "Cache",
    "Decoder",
    "Execution",
    "abstract",
    "build",
    "describe",
    "empty_cache",
    "execution_of",
]
