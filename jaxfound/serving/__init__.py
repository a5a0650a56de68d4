"""Serving door: text from a run's weights, by prefill and cached decoding."""

from jaxfound.serving.generate import Generator, load_generator
from jaxfound.serving.sampler import Sampling

__all__ = ["Generator", "Sampling", "load_generator"]
