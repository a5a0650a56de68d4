"""Batches made ahead of the step that needs them, by a thread of our own or by grain."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal

from jaxfound.data.batch import Batch
from jaxfound.data.errors import DataError

Engine = Literal["numpy", "grain"]
Make = Callable[[int], Batch]

# Making a batch is a gather from memory-mapped files: more threads wait on the same memory.
GRAIN_THREADS = 2
# Grain wants a length; no run comes near this many steps.
ENDLESS = 1 << 62


class BatchStream(ABC, Iterator[Batch]):
    """An endless iterator of batches that must be closed: use it in a `with` statement."""

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next step's batch; raise what went wrong while it was made."""

    @abstractmethod
    def close(self) -> None:
        """Stop and wait for the threads; closing twice is fine, and afterwards it is exhausted."""

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ThreadStream(BatchStream):
    """Batches of steps `start`, `start + 1` …, `num_prefetch` of them made ahead by one thread."""

    def __init__(self, make: Make, *, start: int, num_prefetch: int) -> None:
        self._make = make
        self._next_step = start
        self._num_prefetch = num_prefetch
        self._pending: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(1, "jaxfound-data") if num_prefetch else None
        self._closed = False

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._pool is None:
            self._next_step += 1
            return self._make(self._next_step - 1)
        # One more than is kept ahead: the one that is about to be handed out.
        while len(self._pending) <= self._num_prefetch:
            self._pending.append(self._pool.submit(self._make, self._next_step))
            self._next_step += 1
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop and wait for the thread; afterwards the stream is exhausted."""
        self._closed = True
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class GrainStream(BatchStream):
    """The same batches, made by grain's worker threads.

    Raises:
        DataError: if grain is not installed.
    """

    def __init__(self, make: Make, *, start: int, num_prefetch: int) -> None:
        try:
            import grain
        except ImportError as err:
            raise DataError(
                "data.loader=grain needs the `grain` package: pip install 'jaxfound[data]', or use "
                "data.loader=numpy, which gives the same batches"
            ) from err
        steps = grain.MapDataset.source(_Steps(make, start))
        # A thread without a place in the buffer would have nothing to do.
        threads = min(GRAIN_THREADS, num_prefetch)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=num_prefetch)
        self._batches = iter(steps.to_iter_dataset(options))
        self._closed = False

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        """Stop grain's threads; afterwards the stream is exhausted."""
        if not self._closed:
            self._closed = True
            self._batches.close()


class _Steps:
    """Steps as the random-access sequence that grain reads."""

    def __init__(self, make: Make, start: int) -> None:
        self._make, self._start = make, start

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        return self._make(self._start + int(index))


ENGINES: dict[Engine, Callable[..., BatchStream]] = {
    "numpy": ThreadStream,
    "grain": GrainStream,
}
