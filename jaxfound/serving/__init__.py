"""Serving door: text from a run's weights, one prompt by itself or many requests together."""

from jaxfound.serving.completion import Completion
from jaxfound.serving.engine import Engine
from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.generate import Generator, load_generator
from jaxfound.serving.pump import Pump
from jaxfound.serving.request import Output, Request
from jaxfound.serving.sampling import Sampling

__all__ = [
    "Completion",
    "Engine",
    "Generator",
    "Output",
    "Pump",
    "Request",
    "RequestError",
    "Sampling",
    "UnavailableError",
    "load_generator",
]
