"""Flags of torch launchers on our command line: taken as what they are here, or refused by name."""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxfound.config.aliases import Flag

log = logging.getLogger(__name__)


def native_args(args: Sequence[str]) -> list[str]:
    """Return the arguments of `train` with a launcher's flags in our words, each reported once.

    Raises:
        ConfigError: for a flag that says nothing here; names the way out.
    """
    from jaxfound.config.schema import ConfigError

    configs: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for arg in rest:
        dashed, equals, value = arg.partition("=")
        flag = flag_of(dashed)
        if flag is None:
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
        report(dashed, f"{flag.native}={value}")
    return [*configs, *others]


def native_launch_args(args: Sequence[str]) -> list[str]:
    """Return the arguments of `launch` with a launcher's flags in our words, each reported once.

    What follows the first word without dashes is that command's, and `native_args` has it.

    Raises:
        ConfigError: for a number of hosts that is a range, or an address without its port.
    """
    from jaxfound.config.schema import ConfigError

    own = split_at_command(args)
    found: list[str] = []
    address: dict[str, str] = {}
    rest = iter(args[:own])
    for arg in rest:
        dashed, equals, value = arg.partition("=")
        flag = flag_of(dashed)
        if flag is None or not flag.train:
            found.append(arg)
            continue
        value = value if equals else next(rest, "")
        if ":" in value and flag.native == "--nnodes":
            raise ConfigError(
                f"{dashed} {value}: the number of hosts of a job does not change while it runs. "
                "Give one number; a job that is started again may have another"
            )
        if dashed.startswith("--master"):
            address[dashed.removeprefix("--").replace("-", "_")] = value
        elif flag.native:
            found += _told(dashed, (flag.native, "gpus" if value in ("gpu", "auto") else value))
        else:
            report(dashed, "nothing takes it")
    if address:
        if set(address) != {"master_addr", "master_port"}:
            raise ConfigError("--master_addr and --master_port belong together, or --coordinator")
        pair = ("--coordinator", f"{address['master_addr']}:{address['master_port']}")
        found += _told("--master_addr", pair)
    command = list(args[own:])
    begin = command.index("train") + 1 if "train" in command[:2] else len(command)
    return [*found, *command[:begin], *native_args(command[begin:])]


def split_at_command(args: Sequence[str]) -> int:
    """Return where the options of `launch` end: at `--`, or at a word that is no option's value."""
    words: Iterator[tuple[int, str]] = iter(enumerate(args))
    for at, arg in words:
        if arg == "--" or not arg.startswith("-"):
            return at
        if "=" not in arg and arg != "--help":
            next(words, None)
    return len(args)


def flag_of(dashed: str) -> "Flag | None":
    """Return what a launcher's flag is here, however it is spelt; None for any other word."""
    from jaxfound.config.aliases import FLAGS

    known = FLAGS.get(dashed.removeprefix("--").replace("-", "_"))
    return known if dashed.startswith("--") else None


def report(word: str, native: str) -> None:
    """Say once what a launcher's word is here."""
    log.warning("config.alias", extra={"word": word, "native": native, "at": "command line"})


def _told(word: str, pair: tuple[str, str]) -> tuple[str, str]:
    """Return a flag and its value, reported where the word is not ours already."""
    if word != pair[0]:
        report(word, "=".join(pair))
    return pair
