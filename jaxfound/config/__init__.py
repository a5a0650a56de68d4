"""Plain data on the ground floor: what a run is asked to be, read from YAML and checked."""

from jaxfound.config.describe import Row, rows
from jaxfound.config.load import Loaded, load, parse, save, to_yaml, trace
from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.presets import PRESETS
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError

__all__ = [
    "PRESETS",
    "ConfigError",
    "Loaded",
    "ModelConfig",
    "ParamSpec",
    "ParamTable",
    "Row",
    "RunConfig",
    "load",
    "parse",
    "rows",
    "save",
    "to_yaml",
    "trace",
]
