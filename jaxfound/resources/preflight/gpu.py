"""The health of this host's GPUs, as NVIDIA's management library (NVML) tells it."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jaxfound.resources.preflight.check import Check, Verdict, check, passed

# Bits of nvmlClocksEventReasons (nvml.h) that slow a card down for its own protection.
SLOWED = {0x8: "hardware slowdown", 0x40: "hardware thermal", 0x80: "power brake"}
MAX_CELSIUS = 85
NVLINK_MAX = 18


class Gpu(NamedTuple):
    """One card; None where it does not tell.

    Attributes:
        name: the maker's name with its number.
        ecc_errors: memory errors since the start that could not be corrected.
        rows_pending: whether a reset is waited for to take bad rows of memory out.
        rows_failed: whether taking out a row has failed.
        slowed: reasons for which it runs slower than it could, as bits.
        celsius: temperature.
        persistent: whether the driver stays loaded while nobody uses the card.
        foreign: processes on it that are not this one.
        links_down: NVLinks that are there but not up.
        links_up: NVLinks that are up.
    """

    name: str
    ecc_errors: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    slowed: int | None = None
    celsius: int | None = None
    persistent: bool | None = None
    foreign: tuple[int, ...] | None = None
    links_down: int | None = None
    links_up: int | None = None


def read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the cards of this host, and why none could be read; one of the two is empty."""
    try:
        nvml: Any = import_module("pynvml")
    except ModuleNotFoundError:
        return (), "the package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        return tuple(_read(nvml, number) for number in range(count)), ""
    except nvml.NVMLError as error:
        return (), str(error)


def _read(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(question: str, *arguments: object) -> Any:
        # An older library lacks a question; an older card, the answer.
        function: Callable[..., Any] | None = getattr(nvml, question, None)
        try:
            return None if function is None else function(handle, *arguments)
        except nvml.NVMLError:
            return None

    name = ask("nvmlDeviceGetName")
    rows = ask("nvmlDeviceGetRemappedRows")
    mode = ask("nvmlDeviceGetPersistenceMode")
    users = ask("nvmlDeviceGetComputeRunningProcesses")
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(NVLINK_MAX)]
    slowed = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if slowed is None:
        slowed = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Gpu(
        name=f"gpu {number} ({name.decode() if isinstance(name, bytes) else name})",
        ecc_errors=ask(
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        slowed=slowed,
        celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        persistent=None if mode is None else bool(mode),
        foreign=None if users is None else tuple(u.pid for u in users if u.pid != os.getpid()),
        links_down=None if set(links) == {None} else links.count(0),
        links_up=None if set(links) == {None} else links.count(1),
    )


def check_gpu(gpu: Gpu) -> tuple[Check, ...]:
    """Name what is wrong with a card; one verdict when nothing is. What it does not tell is left.

    Links count only on a card that has one up: where none is, nothing is plugged in.
    """
    slowed = [word for bit, word in SLOWED.items() if (gpu.slowed or 0) & bit]
    hot = gpu.celsius is not None and gpu.celsius > MAX_CELSIUS
    cut = bool(gpu.links_up and gpu.links_down)
    rows: tuple[tuple[str, object, object, Verdict, str, str], ...] = (
        ("memory errors", gpu.ecc_errors, gpu.ecc_errors, "fail", "0 uncorrected", RESET),
        ("memory rows", gpu.rows_pending, "wait for a reset", "fail", "none pending", RESET),
        ("memory rows", gpu.rows_failed, "not remapped", "fail", "no failure", REPLACE),
        ("clocks", slowed, ", ".join(slowed), "fail", "slowed down by nothing", COOL),
        ("temperature", hot, f"{gpu.celsius} C", "warn", f"at most {MAX_CELSIUS} C", COOL),
        ("persistence", gpu.persistent is False, "off", "warn", "on", "nvidia-smi -pm 1"),
        ("other processes", gpu.foreign, gpu.foreign, "warn", "none", FOREIGN),
        ("nvlink", cut, f"{gpu.links_down} links down", "fail", "all up", LINK),
    )
    found = tuple(
        check(f"{gpu.name}: {what}", verdict, str(value), threshold=rule, remedy=remedy)
        for what, wrong, value, verdict, rule, remedy in rows
        if wrong
    )
    told = f"{gpu.ecc_errors} memory errors, {gpu.celsius} C, {gpu.links_up} links up"
    return found or (check(gpu.name, "ok", told.replace("None", "?"), remedy=""),)


def driver_build() -> str:
    """Return the version of NVIDIA's loaded kernel module; empty without one."""
    try:
        return Path("/sys/module/nvidia/version").read_text("utf-8").strip()
    except OSError:
        return ""


def module_kernels(version: str) -> tuple[str, ...]:
    """Return the kernel releases for which NVIDIA's module of any version is built here."""
    found = Path("/lib/modules").glob("*/**/nvidia.ko*") if version else ()
    return tuple(sorted({path.parts[3] for path in found}))


def check_driver(*, library: str, module: str, kernel: str, built_for: tuple[str, ...]) -> Check:
    """Say whether library, kernel module and kernel of NVIDIA's driver belong together.

    Args:
        library: version that NVML tells; empty without it.
        module: version of the loaded kernel module; empty without it.
        kernel: release of the running kernel.
        built_for: releases whose modules are on this disk; empty where that cannot be seen, as in
            a container.
    """
    name = "driver"
    if not library and not module:
        return check(name, "ok", "none", remedy="")
    told = f"library {library or 'absent'}, module {module or 'not loaded'}, kernel {kernel}"
    rule = "one version, built for the running kernel"
    if library and module and library != module:
        remedy = "the driver was replaced under a loaded module: reboot, or reload it"
        return check(name, "fail", told, threshold=rule, remedy=remedy)
    if not library:
        remedy = "start the container with the driver's libraries (--gpus all, --nv)"
        return check(name, "fail", told, threshold=rule, remedy=remedy)
    lost = bool(built_for) and kernel not in built_for
    remedy = f"built for {', '.join(built_for)}: rebuild it (dkms autoinstall) before a reboot"
    return check(name, passed(not lost, "warn"), told, threshold=rule, remedy=remedy)


RESET = "drain the host and reset the card (nvidia-smi -r); replace it if they come back"
REPLACE = "have the card replaced"
COOL = "look at fans, inlet temperature and power supplies (nvidia-smi -q -d PERFORMANCE)"
FOREIGN = "end what else runs there, or ask for the host alone"
LINK = "nvidia-smi nvlink -s; restart the fabric manager, reseat or replace the card"
