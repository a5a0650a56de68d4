"""The same model in Hugging Face transformers, to time against: bfloat16, sdpa, its own cache.

Run as a process of its own, since PyTorch and JAX would each take most of a GPU's memory:
`python -m jaxfound.serving.transformers_peer` reads a `PeerLoad` as JSON and writes a `PeerTimes`.
Weights and cache are noise, as ours are. It decodes eagerly, greedily, one token of each row a
step, and takes no more of a step than that: no text, no stop, no scheduling.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class PeerLoad:
    """What decodes.

    Attributes:
        config: the model's config.json.
        rows: that decode.
        context: tokens of each row in the last step.
        steps: timed in a round.
        warm: steps before them.
        rounds: each from the same context on.
        device: of torch.
    """

    config: Mapping[str, Any]
    rows: int
    context: int
    steps: int
    warm: int
    rounds: int
    device: str = "cuda"


@dataclass(frozen=True)
class PeerTimes:
    """What was measured.

    Attributes:
        versions: of torch and transformers.
        model: the class that computed.
        parameters: of the model.
        cache_bytes: of its cache in the last step.
        rounds: seconds of every step.
        peak_bytes: most memory that its allocator held; None on a CPU.
    """

    versions: dict[str, str]
    model: str
    parameters: int
    cache_bytes: int
    rounds: tuple[tuple[float, ...], ...]
    peak_bytes: int | None


def measure(load: PeerLoad) -> PeerTimes:
    """Build the model, fill its cache, and time steps."""
    torch, transformers = import_module("torch"), import_module("transformers")
    given = dict(load.config)
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(0)
    with torch.device(load.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval()
    rounds, cache_bytes = [], 0
    with torch.inference_mode():
        for _ in range(load.rounds):
            cache = filled(torch, transformers, config, load)
            rounds.append(times(torch, model, cache, load))
            cache_bytes = sum(
                part.numel() * part.element_size()
                for layer in cache.layers
                for part in (layer.keys, layer.values)
            )
            del cache
    on_gpu = load.device == "cuda"
    return PeerTimes(
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        model=type(model).__name__,
        parameters=sum(weight.numel() for weight in model.parameters()),
        cache_bytes=cache_bytes,
        rounds=tuple(rounds),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def filled(torch: Any, transformers: Any, config: Any, load: PeerLoad) -> Any:
    """Return a cache of noise, as long as the rows are before the first step."""
    cache, length = transformers.DynamicCache(), load.context - load.steps - load.warm
    for number in range(config.num_hidden_layers):
        keys, values = (
            torch.randn((load.rows, heads, length, dim), dtype=torch.bfloat16, device=load.device)
            for heads, dim in cached_dims(config)
        )
        cache.update(keys, values, number)
    return cache


def cached_dims(config: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the heads and channels of the two parts that a layer caches a token.

    Of multi-head latent attention that is the latent and the rotated key, each as one head.
    """
    latent = getattr(config, "kv_lora_rank", None)
    if latent:
        return (1, latent), (1, config.qk_rope_head_dim)
    heads = config.num_key_value_heads
    return (heads, config.head_dim), (heads, config.head_dim)


def times(torch: Any, model: Any, cache: Any, load: PeerLoad) -> tuple[float, ...]:
    """Return the seconds of the timed steps."""
    wait = torch.cuda.synchronize if load.device == "cuda" else (lambda: None)
    tokens = torch.zeros((load.rows, 1), dtype=torch.long, device=load.device)
    found = []
    for _ in range(load.warm + load.steps):
        began_s = time.perf_counter()
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
        wait()
        found.append(time.perf_counter() - began_s)
    return tuple(found[load.warm :])


def main() -> None:
    """Read the load from standard input, time it, write the times to standard output."""
    found = measure(PeerLoad(**json.load(sys.stdin)))
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
