"""jaxfound: the compute foundation for large models in JAX.

The names of a notebook: `load` a YAML, `make_plan` for a topology, `build` the model, `train`,
open a `generator`, or an `Engine` for many prompts at once. Each is imported when it is first
used, so that `import jaxfound` starts no backend and costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxfound.config import ModelConfig, RunConfig
    from jaxfound.face import build, generator, load, make_plan, train
    from jaxfound.models import describe
    from jaxfound.resources.topology import Topology
    from jaxfound.serving import Engine

# Name: the module that it comes from.
_HOMES = {
    "Engine": "jaxfound.serving",
    "ModelConfig": "jaxfound.config",
    "RunConfig": "jaxfound.config",
    "Topology": "jaxfound.resources.topology",
    "build": "jaxfound.face",
    "describe": "jaxfound.models",
    "generator": "jaxfound.face",
    "load": "jaxfound.config",
    "make_plan": "jaxfound.face",
    "train": "jaxfound.face",
}

__all__ = [
    "Engine",
    "ModelConfig",
    "RunConfig",
    "Topology",
    "build",
    "describe",
    "generator",
    "load",
    "make_plan",
    "train",
]


def __getattr__(name: str) -> object:
    """Import the name's home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"jaxfound has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
