"""A stop that is asked for politely: finish the step, save, leave."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """While entered, SIGINT and SIGTERM set `requested`; a second SIGINT is a KeyboardInterrupt.

    On exit the handlers from before are back. Python allows handlers in the main thread only, so
    elsewhere this does nothing. JAX's own handler for pre-emption, which `jax.distributed`
    installs, is replaced for as long as this is entered.
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._was_interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: tuple[int, int, int] | None = None

    @property
    def requested(self) -> bool:
        """True since the first signal."""
        return bool(self.signal_name)

    @property
    def signal_name(self) -> str:
        """The first signal, e.g. `SIGTERM`; empty before it.

        Other threads see it at once, even while the main one is in a call of C code, which our
        handler comes after: a compilation takes minutes.
        """
        if self._first is None and self._wakeup is not None:
            self._first = _first_of(self._wakeup[0])
        return self._first.name if self._first is not None else ""

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
            reads, writes = os.pipe()
            os.set_blocking(reads, False)
            os.set_blocking(writes, False)
            # Python's own C handler writes the signal's number there before anything else.
            before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
            self._wakeup = (reads, writes, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None is a handler that C code installed: Python cannot name it, so the default it is.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        if self._wakeup is not None:
            reads, writes, before = self._wakeup
            self._wakeup = None
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal. No logging: the signal may have come inside of the logging lock."""
        if number == signal.SIGINT and self._was_interrupted:
            raise KeyboardInterrupt
        self._was_interrupted |= number == signal.SIGINT
        self._first = self._first or signal.Signals(number)


def _first_of(reads: int) -> signal.Signals | None:
    """Return the first stop signal in a pipe of signal numbers, None without one."""
    try:
        numbers = os.read(reads, 4096)
    except BlockingIOError:
        return None
    return next((signal.Signals(n) for n in numbers if n in STOP_SIGNALS), None)
