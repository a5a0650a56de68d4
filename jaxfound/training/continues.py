"""Which keys of a run may change when it is resumed."""

from pathlib import Path
from typing import cast

from jaxfound.config.load import load
from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError

# Keys that decide which tokens a step sees or what the arrays are: a resumed run that changed
# one would repeat data, skip data, or load a different model.
FIXED_KEYS = (
    "seed", "model", "optimizer.name", "train.batch_size", "train.seq_len", "data.source",
    "data.tokenizer", "data.text_field", "data.on_bad_record", "data.eval_fraction",
    "data.packing", "data.order",
)  # fmt: skip


def check_continues(cfg: RunConfig, path: Path) -> None:
    """Refuse a config that the run's own earlier config, at `path`, cannot go on as.

    Raises:
        ConfigError: names each key that would change the data's order or the model.
    """
    if not path.exists():
        return
    before, now = load(path).model_dump(), cfg.model_dump()
    changed = [key for key in FIXED_KEYS if at(before, key) != at(now, key)]
    if changed:
        told = "; ".join(f"{k} was {at(before, k)!r}, is {at(now, k)!r}" for k in changed)
        raise ConfigError(
            f"{path.parent} was started with another config: {told}. A resumed run would repeat "
            "or skip data, or load another model. Give the new run its own name=…, or restore "
            "these keys"
        )


def at(tree: dict, dotted_key: str) -> object:
    """Return the value at a dotted key of nested dicts."""
    value: object = tree
    for part in dotted_key.split("."):
        value = cast(dict, value)[part]
    return value
