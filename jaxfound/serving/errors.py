"""What a caller of the engine is told when a request is not taken."""


class RequestError(ValueError):
    """A request that this engine can never serve: names the field, its value and the limit."""


class UnavailableError(RuntimeError):
    """A request that is refused now and may be asked again: full, draining, or dead."""
