"""Published weights in and out: Hugging Face folders of Llama and DeepSeek-V2/V3.

`hub = open_hub(folder)` checks a folder, `load_weights(hub)` reads it into arrays of `hub.model`,
`export_hub` writes them back under the published names; `reformat_hub` goes from one published
folder to another.
"""

from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.export import export_hub
from jaxfound.models.weights.load import Hub, load_weights, open_hub
from jaxfound.models.weights.origin import Origin, origin_of
from jaxfound.models.weights.reformat import reformat_hub

__all__ = [
    "Hub",
    "Origin",
    "WeightsError",
    "export_hub",
    "load_weights",
    "open_hub",
    "origin_of",
    "reformat_hub",
]
