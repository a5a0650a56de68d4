"""Flags of torch launchers on our command line: taken as what they are here, or refused by name."""

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


def native_args(args: Sequence[str]) -> list[str]:
    """Return the arguments of `train` with a launcher's flags in our words, each reported once.

    Raises:
        ConfigError: for a flag that says nothing here; names the way out.
    """
    from jaxfound.config.aliases import FLAGS
    from jaxfound.config.schema import ConfigError

    configs: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for arg in rest:
        dashed, equals, value = arg.partition("=")
        flag = FLAGS.get(dashed.removeprefix("--").replace("-", "_"))
        if flag is None or not dashed.startswith("--"):
            others.append(arg)
            continue
        if flag.train:
            raise ConfigError(f"{dashed}: {flag.train}")
        value = value if equals else next(rest, "")
        if not value or configs:
            raise ConfigError(
                f"{dashed} takes one file and is given once; it is {flag.native} here"
            )
        configs.append(value)
        native = f"{flag.native}={value}"
        log.warning("config.alias", extra={"word": dashed, "native": native, "at": "command line"})
    return [*configs, *others]
