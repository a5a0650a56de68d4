"""A model's parameters as plain data: what plans and tools read instead of arrays."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Dims that count layers: of the main stack, which a pipeline cuts, and of the dense one before it.
LAYER_DIMS = ("layers", "leading_layers")
STACK_DIMS = (*LAYER_DIMS, "experts")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array.

    Attributes:
        path: dotted path in the model, e.g. `layers.mixer.kv_down.kernel`.
        shape: dimensions as stored, padding and stacked layers included.
        dtype: the name of the stored format.
        dims: the logical name of each dimension (docs/vocabulary.md); None is never split.
        kind: `param` is trained by the optimizer, `buffer` is not (the router's bias).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]
    kind: str = "param"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True when one layer's (one expert's) array has two dimensions or more."""
        return sum(d not in STACK_DIMS for d in self.dims) >= 2


@dataclass(frozen=True)
class ParamTable:
    """Every parameter of a model, in the order of the module tree."""

    specs: tuple[ParamSpec, ...]

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, path: str) -> ParamSpec:
        """Return the parameter at `path`; KeyError names the path."""
        for spec in self.specs:
            if spec.path == path:
                return spec
        raise KeyError(f"no parameter {path!r} in this table of {len(self.specs)}")

    @property
    def size(self) -> int:
        """Elements of all trained parameters."""
        return sum(s.size for s in self.specs if s.kind == "param")

    def where(self, paths: Iterable[str]) -> "ParamTable":
        """Return the table of the parameters whose path starts with one of `paths`."""
        prefixes = tuple(paths)
        return ParamTable(tuple(s for s in self.specs if s.path.startswith(prefixes)))
