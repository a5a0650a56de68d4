"""Which multi-token prediction modules a server keeps: those that draft, one a token."""

from jaxfound.config.model import ModelConfig
from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.models.build import Arrays, Frame


def check_drafts(cfg: ServeConfig, model: ModelConfig) -> None:
    """Refuse more drafts than there are modules that make one.

    Raises:
        ConfigError: names both numbers.
    """
    if cfg.draft_tokens > model.mtp_depth:
        raise ConfigError(
            f"serve.draft_tokens={cfg.draft_tokens}, but this model has model.mtp_depth="
            f"{model.mtp_depth}: each multi-token prediction module drafts one token. "
            f"Use serve.draft_tokens={model.mtp_depth}"
        )


def with_modules(
    frame: Frame, arrays: Arrays, *, num: int, release: bool = False
) -> tuple[Frame, Arrays]:
    """Return a model that looks `num` tokens ahead at most: later modules are not read.

    Args:
        frame: the model.
        arrays: its weights.
        num: modules to keep.
        release: delete what is left out.
    """
    if frame.cfg.mtp_depth <= num:
        return frame, arrays
    kept = Arrays({}, {})
    for group, found in zip(kept, arrays, strict=True):
        for path, array in found.items():
            if not path.startswith("mtp.") or int(path.split(".")[1]) < num:
                group[path] = array
            elif release:
                array.delete()
    cfg = frame.cfg.model_copy(update={"mtp_depth": num})
    return Frame(cfg, execution=frame.execution), kept
