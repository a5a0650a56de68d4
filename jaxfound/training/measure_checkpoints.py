"""What checkpoints cost a step, beside plain Orbax and beside no checkpoints at all."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxfound.resources.checkpoint import CheckpointManager, Tiers, steps, uploader
from jaxfound.resources.checkpoint.leaves import LeafPath
from jaxfound.resources.checkpoint.tiers import LocalTier
from jaxfound.training.checkpoint_record import (
    OURS,
    PLAIN,
    UNCOMPRESSED,
    SaverTimes,
    Saves,
    Shape,
    Steps,
    StepTimes,
)

NUM_LEAVES, LEAF_COLUMNS = 32, 1024
# Of the matrices whose products a step is made of, by platform: some milliseconds each.
PRODUCT_SIZES: Mapping[str, int] = {"cpu": 512}
GPU_PRODUCT_SIZE = 8192
# What is measured where nothing else is asked for, by platform: the state that is saved, the state
# that steps train, and the least that a step takes.
SAVED_BYTES, GPU_SAVED_BYTES = {"cpu": 2**24}, 2**33
TRAINED_BYTES, GPU_TRAINED_BYTES = {"cpu": 2**24}, 2**32
STEP_S, GPU_STEP_S = {"cpu": 0.05}, 0.1
# Steps whose median is taken for a step alone.
NUM_ALONE = 7
# A state that fills nothing, for what a first save does once.
SMALL = Shape(NUM_LEAVES, (1, LEAF_COLUMNS))
# The step of a block, from 0, that the first save is taken before.
FIRST_SAVE = 1
# A direct save every `every` steps makes 20 units of a mean step 41.
STRETCH = 41 / 20 - 1
UPLOAD_LIMIT_S = 600

type State = dict[str, jax.Array]
# Saves a state as a step of a number, and returns how to wait until that is on disk.
type Saver = Callable[[int, State], Callable[[], None]]


@dataclass
class Trainer:
    """A state that every step consumes and makes anew, and products that take time.

    Attributes:
        state: what is saved.
        factor: the matrix of the products.
        num_products: in a step.
    """

    state: State
    factor: jax.Array
    num_products: int = 0

    @classmethod
    def of(cls, shape: Shape) -> "Trainer":
        """Return a trainer with a state of `shape` on the first device."""
        make = jax.jit(partial(jax.random.normal, shape=shape.leaf))
        keys = jax.random.split(jax.random.key(0), shape.num_leaves + 1)
        state = {f"leaf_{number:02}": make(key) for number, key in enumerate(keys[1:])}
        platform = jax.default_backend()
        size = PRODUCT_SIZES.get(platform, GPU_PRODUCT_SIZE)
        dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
        factor = jax.random.normal(keys[0], (size, size), dtype) / size**0.5
        return cls(jax.block_until_ready(state), factor)

    def step(self) -> float:
        """Take a step and return its seconds."""
        began_s = time.perf_counter()
        made = _step(self.state, self.factor, num_products=self.num_products)
        self.state = jax.block_until_ready(made)
        return time.perf_counter() - began_s

    def step_alone_s(self) -> float:
        """Return the median seconds of a few steps, after one that may compile."""
        self.step()
        return statistics.median(self.step() for _ in range(NUM_ALONE))

    def fill(self, step_s: float | int) -> float:
        """Choose as many products that a step takes at least `step_s`; return what it takes."""
        few, many = 2, 10
        self.num_products = few
        few_s = self.step_alone_s()
        self.num_products = many
        product_s = max((self.step_alone_s() - few_s) / (many - few), 1e-6)
        self.num_products = few
        took_s = few_s
        while took_s < step_s:
            self.num_products += max(1, int((step_s - took_s) / product_s))
            took_s = self.step_alone_s()
        return took_s


@partial(jax.jit, static_argnames="num_products", donate_argnums=0)
def _step(state: State, factor: jax.Array, *, num_products: int) -> State:
    multiply = lambda _, x: jnp.tanh(x @ factor)
    product = jax.lax.fori_loop(0, num_products, multiply, factor)
    change = 1e-3 * jnp.mean(product, dtype=jnp.float32)
    return {name: 0.999 * leaf + change for name, leaf in state.items()}


def shape_of(num_bytes: int) -> Shape:
    """Return the shape of a state of about so many bytes."""
    return Shape(NUM_LEAVES, (max(1, num_bytes // (4 * NUM_LEAVES * LEAF_COLUMNS)), LEAF_COLUMNS))


def measure_saves(folder: Path, *, num_bytes: int, rounds: int) -> Saves:
    """Time saves of a state that changes between them, ours and plain ones in turns.

    Args:
        folder: on the disk that is written to; what is written is deleted again.
        num_bytes: of the state, about; 0 = by platform.
        rounds: saves of each.
    """
    platform = jax.default_backend()
    shape = shape_of(num_bytes or SAVED_BYTES.get(platform, GPU_SAVED_BYTES))
    with savers_in(folder / "small", warm=None) as savers:
        small = Trainer.of(SMALL)
        for saver in savers.values():
            timed_save(saver, small, step=1, step_s=small.step_alone_s())
    trainer = Trainer.of(shape)
    step_s = trainer.step_alone_s()
    times: dict[str, list[Times]] = {}
    with savers_in(folder / "saves", warm=trainer.state) as savers:
        for number in range(rounds):
            for name, saver in savers.items():
                # The state of every save is another: a copy of the last one is of no use.
                trainer.step()
                took = timed_save(saver, trainer, step=number + 1, step_s=step_s)
                times.setdefault(name, []).append(took)
    columns = {name: SaverTimes(*zip(*found, strict=True)) for name, found in times.items()}
    return Saves(shape, step_s, columns)


class Times(NamedTuple):
    """Seconds of one save; see EXPLAINED."""

    call_s: float
    blocked_s: float
    total_s: float


def timed_save(saver: Saver, trainer: Trainer, *, step: int, step_s: float) -> Times:
    """Save, take the next step, and wait until the save is on disk."""
    began_s = time.perf_counter()
    wait = saver(step, trainer.state)
    call_s = time.perf_counter() - began_s
    trainer.step()
    blocked_s = time.perf_counter() - began_s - step_s
    wait()
    return Times(call_s, blocked_s, time.perf_counter() - began_s)


@contextmanager
def savers_in(folder: Path, *, warm: State | None) -> Iterator[Mapping[str, Saver]]:
    """Give the savers by name; each keeps its newest save."""
    # Orbax sets up the root logger on import.
    from jaxfound.resources.checkpoint.storage import OrbaxStorage, save_by_defaults

    def ours(step: int, state: State) -> Callable[[], None]:
        manager.save(step, state, {})
        return manager.wait

    def plain(step: int, state: State) -> Callable[[], None]:
        steps.discard(folder / PLAIN)
        save_by_defaults(folder / PLAIN, state)
        return _nothing

    def uncompressed(step: int, state: State) -> Callable[[], None]:
        steps.discard(folder / UNCOMPRESSED)
        OrbaxStorage().write(folder / UNCOMPRESSED, _paths(state))
        return _nothing

    with CheckpointManager(folder / OURS, keep=1) as manager:
        if warm is not None:
            manager.warm(warm)
        yield {OURS: ours, PLAIN: plain, UNCOMPRESSED: uncompressed}


def measure_steps(
    folder: Path, *, num_bytes: int, step_s: float | int, num_steps: int, every: int, rounds: int
) -> Steps:
    """Time steps without saves, with tiers of which the shared one is slow, and with direct saves.

    Args:
        folder: on the disk that is written to; what is written is deleted again.
        num_bytes: of the state, about; 0 = by platform.
        step_s: the least that a step takes; 0 = by platform.
        num_steps: of each kind in a round.
        every: steps from one save to the next.
        rounds: of steps without saves and with tiers.
    """
    platform = jax.default_backend()
    shape = shape_of(num_bytes or TRAINED_BYTES.get(platform, GPU_TRAINED_BYTES))
    trainer = Trainer.of(shape)
    filled_s = trainer.fill(step_s or STEP_S.get(platform, GPU_STEP_S))
    rate_bps = shape.num_bytes / (STRETCH * every * filled_s)
    with Beside.open(folder / "tiers", rate_bps=rate_bps, state=trainer.state) as tiers:
        take: dict[str, Callable[[], StepTimes]] = {
            "none": lambda: StepTimes.of(take_steps(trainer, num_steps)),
            "tiers": lambda: tiers.steps(trainer, num_steps, every=every),
        }
        found: dict[str, list[StepTimes]] = {kind: [] for kind in take}
        for kind in turns(list(take), rounds=rounds):
            found[kind].append(take[kind]())
        uploading, skipped = tiers.uploading(), tiers.skipped
    direct = direct_steps(folder / "direct", trainer, every=every, rate_bps=rate_bps)
    return Steps(
        state=shape,
        steps=num_steps,
        every=every,
        rate_bps=rate_bps,
        none=tuple(found["none"]),
        tiers=tuple(found["tiers"]),
        direct=direct,
        uploading=uploading,
        skipped=skipped,
    )


def turns(kinds: Sequence[str], *, rounds: int) -> list[str]:
    """Return the kinds of all rounds, the order turned each time: a machine's drift hits all."""
    return [
        kind for number in range(rounds) for kind in (kinds if number % 2 == 0 else kinds[::-1])
    ]


def take_steps(
    trainer: Trainer, num_steps: int, *, every: int = 0, save: Callable[[State], None] | None = None
) -> list[float]:
    """Take steps, with a save before some of them, and return the seconds of each."""
    seconds: list[float] = []
    for number in range(num_steps):
        began_s = time.perf_counter()
        if save is not None and number % every == FIRST_SAVE % every:
            save(trainer.state)
        trainer.step()
        seconds.append(time.perf_counter() - began_s)
    return seconds


@dataclass
class Beside:
    """Saves to a local tier, whose uploader brings them to a slow shared one.

    Attributes:
        manager: takes the saves.
        local: the local tier.
        spans: when steps were taken, by the clock of the uploader's record.
        saved: saves so far.
        skipped: saves that were not taken.
    """

    manager: CheckpointManager
    local: LocalTier
    spans: list[tuple[float, float]]
    saved: int = 0
    skipped: int = 0

    @classmethod
    @contextmanager
    def open(cls, folder: Path, *, rate_bps: float, state: State) -> Iterator["Beside"]:
        """Give the tiers in `folder`, their host memory warmed for `state`."""
        disk, shared = folder / "disk", folder / "run" / "checkpoints"
        tiers = Tiers(local=disk, upload_mbps=rate_bps / 1e6)
        with CheckpointManager(shared, keep=1, tiers=tiers) as manager:
            manager.warm(state)
            beside = cls(manager, LocalTier.open(disk, shared=shared), [])
            # The first save of all is another: no copy on the device has shown that it fits.
            beside.save(state)
            beside.settle()
            yield beside

    def save(self, state: State) -> None:
        """Save `state` as the next step."""
        self.saved += 1
        self.skipped += self.manager.save(self.saved, state, {}) == "skipped"

    def steps(self, trainer: Trainer, num_steps: int, *, every: int) -> StepTimes:
        """Take steps, a save every `every` of them, and let uploads come to their end after."""
        began_s = time.time()
        seconds = take_steps(trainer, num_steps, every=every, save=self.save)
        self.spans.append((began_s, time.time()))
        self.settle()
        return StepTimes.of(seconds)

    def settle(self) -> None:
        """Wait until what was saved has come to the shared tier."""
        self.manager.wait()
        self.manager.finish_uploads(limit_s=UPLOAD_LIMIT_S)

    def uploading(self) -> float:
        """Return the share of the time of steps in which files were being uploaded."""
        records, _ = uploader.read_records(self.local.root)
        parts = [
            (cast(float, r["time"]) - cast(float, r["total_s"]), cast(float, r["time"]))
            for r in records
            if r["kind"] == "part"
        ]
        shared_s = sum(
            max(0.0, min(a_end, b_end) - max(a, b)) for a, a_end in parts for b, b_end in self.spans
        )
        return shared_s / sum(end - begin for begin, end in self.spans)


def direct_steps(folder: Path, trainer: Trainer, *, every: int, rate_bps: float) -> StepTimes:
    """Return what `every` steps take of which one waits for a save into a slow shared tier."""
    storage = SlowStorage(rate_bps)
    with ExitStack() as opened:
        manager = opened.enter_context(CheckpointManager(folder, mode="sync", storage=storage))
        manager.warm(trainer.state)
        save = lambda state: cast(None, manager.save(1, state, {}))
        return StepTimes.of(take_steps(trainer, every, every=every, save=save))


class SlowStorage:
    """Orbax on a disk that takes so many bytes a second."""

    def __init__(self, rate_bps: float) -> None:
        # Orbax sets up the root logger on import.
        from jaxfound.resources.checkpoint.storage import OrbaxStorage

        self._fast, self._rate_bps = OrbaxStorage(), rate_bps

    def write(self, directory: Path, arrays: Mapping[LeafPath, jax.Array]) -> None:
        """Write `arrays` and return when that many bytes have taken their time."""
        began_s = time.perf_counter()
        self._fast.write(directory, arrays)
        due_s = sum(array.nbytes for array in arrays.values()) / self._rate_bps
        time.sleep(max(0.0, due_s - (time.perf_counter() - began_s)))

    def read(
        self, directory: Path, like: Mapping[LeafPath, jax.ShapeDtypeStruct]
    ) -> dict[LeafPath, jax.Array]:
        """Return the arrays that `like` names."""
        return self._fast.read(directory, like)


def _paths(state: State) -> dict[LeafPath, jax.Array]:
    return {(name,): leaf for name, leaf in state.items()}


def _nothing() -> None:
    """A save that returned is on disk."""
