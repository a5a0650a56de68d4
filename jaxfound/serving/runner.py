"""The device's side of serving: weights, pages and rows, and the programs that work on them.

`dispatch` hands a step to the device and returns at once; the token that a row draws stays on the
device and feeds the row's next step, so that the host may be a step behind. Programs run in the
order of dispatch, each with the pages that the one before left: they are written in place.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxfound.config.model import ModelConfig
from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.pages import Pages, page_shapes
from jaxfound.models.served import serving_arrays
from jaxfound.parallelism.axes import BATCH_AXES
from jaxfound.serving.compiled import DRAWS, Place, Program, Programs, compile_programs, remembers
from jaxfound.serving.drafts import check_drafts, with_modules
from jaxfound.serving.pending import Part, Pending
from jaxfound.serving.pool_size import check_room, choose_num_pages
from jaxfound.serving.program_sizes import ProgramSizes, program_sizes
from jaxfound.serving.programs import DRAW_COLUMNS, HELD, NONE, PLAN_COLUMNS, ModelPrograms, Rows
from jaxfound.serving.request import ScheduledBatch, ScheduledRow
from jaxfound.serving.sampler import Draws, Level, history_of, level_of, row_of
from pallas_kernels import hardware
from pallas_kernels.mla_decode import fp8_cache

log = logging.getLogger(__name__)

# Pages that are filled with the same noise: more than a cache of the device holds.
NOISE_PAGES = 4096


class Runner:
    """A model on its devices, ready for steps of at most the sizes of its ServeConfig.

    Args:
        frame: the model without arrays.
        arrays: its weights, as training stores them.
        cfg: sizes; every program is compiled for them here.
        num_ids: ids of the tokenizer; rows of the vocabulary beyond them are never drawn.
        mesh: from `build_mesh`, with the rules of the frame; None for the weights' one device.
        release: delete each of `arrays` as soon as it has been read.

    Raises:
        ConfigError: if the model or the device cannot be served with these sizes.
    """

    def __init__(
        self,
        frame: Frame,
        arrays: Arrays,
        cfg: ServeConfig,
        *,
        num_ids: int,
        mesh: Mesh | None = None,
        release: bool = False,
    ) -> None:
        check_drafts(cfg, frame.cfg)
        frame, arrays = with_modules(frame, arrays, num=cfg.draft_tokens, release=release)
        self.cfg = cfg
        self.max_length = longest_row(cfg, max_positions=frame.cfg.max_positions)
        device = next(iter(jax.tree.leaves(arrays)[0].devices()))
        self._place = Place(frame.execution.rules, mesh, device)
        self._arrays = serving_arrays(frame, arrays, mesh=mesh, release=release)
        self.num_pages, pages = pool_of(frame, cfg, self._place, max_length=self.max_length)
        self._model = ModelPrograms(
            frame=frame,
            page_size=cfg.page_size,
            num_pages=self.num_pages,
            max_rows=cfg.max_rows,
            num_ids=num_ids,
            num_drafts=cfg.draft_tokens,
        )
        parts = 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
        self._sizes = program_sizes(
            cfg, max_length=self.max_length, parts=parts, one_width=not reads_tables(frame.cfg)
        )
        self._programs = compile_programs(
            self._model, self._arrays, pages=pages, sizes=self._sizes, place=self._place
        )
        self._pages: Pages
        self._rows: Rows
        self.reset()
        check_room(temp_bytes=self._programs.temp_bytes, memory=device.memory_stats())
        log.info(
            "serve.compiled",
            extra={"programs": self._programs.num_programs, "pages": self.num_pages},
        )

    @property
    def programs(self) -> Programs:
        """What was compiled; only to be looked at."""
        return self._programs

    @property
    def sizes(self) -> ProgramSizes:
        """Of the programs."""
        return self._sizes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of arrays on the first device; steps that have been read leave it as it was."""
        stats = self._place.device.memory_stats()
        if stats is not None and "bytes_in_use" in stats:
            return stats["bytes_in_use"]
        return sum(
            shard.data.nbytes
            for array in jax.live_arrays()
            for shard in array.addressable_shards
            if shard.device == self._place.device
        )

    def reset(self) -> None:
        """Forget all rows and pages, so that steps can run again after one that failed.

        Raises:
            RuntimeError: the device does not work any more.
        """
        # Not both at once: there is room for one pool.
        for array in jax.tree.leaves((getattr(self, "_pages", None), getattr(self, "_rows", None))):
            if not array.is_deleted():
                array.delete()
        self._pages, self._rows = self._programs.empty()
        jax.block_until_ready(self._pages)

    @property
    def arrays(self) -> Arrays:
        """The weights as they are kept; only to be looked at."""
        return self._arrays

    def fill_pages(self, key: jax.Array) -> None:
        """Write noise to every page, as if rows of other requests had been there.

        For measurements: a cache of zeros takes less power to read.
        """
        fill = jax.jit(noisy_pages, donate_argnums=0, out_shardings=self._place.pages(self._pages))
        self._pages = fill(self._pages, key)

    def dispatch(self, batch: ScheduledBatch) -> Pending:
        """Begin a step; does not wait for the device.

        Raises:
            RuntimeError: the device failed, now or in an earlier step.
            ValueError: if more was scheduled than the ServeConfig allows.
        """
        for row in chain(batch.prefill, batch.decode):
            if row.fresh:
                self._admit(row)
        parts = [self._prefill(numbers, batch) for numbers in self._together(batch.prefill)]
        if batch.decode:
            parts.append(self._decode(batch.decode, first=len(batch.prefill)))
        for part in parts:
            part.send()
        return Pending(parts, len(batch.prefill) + len(batch.decode))

    def _admit(self, row: ScheduledRow) -> None:
        """Remember how the row's request draws, and with penalties the tokens it has had."""
        request, at = row.sequence.request, np.int32(row.row)
        sampling = self._programs.admit(self._rows.sampling, at, row_of(request.sampling))
        self._rows = self._rows._replace(sampling=sampling)
        if request.sampling.penalises:
            drawn = row.sequence.tokens[len(request.prompt) :]
            vocab = self._model.frame.cfg.padded_vocab_size
            one = history_of(request.prompt, drawn, vocab_size=vocab)
            history = self._programs.admit_history(self._rows.history, at, one)
            self._rows = self._rows._replace(history=history)

    def _together(self, rows: Sequence[ScheduledRow]) -> Iterable[list[int]]:
        """Yield the numbers of rows whose chunks one program takes: those of about one length."""
        by_chunk: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_chunk.setdefault(self._sizes.chunk_for(row.count), []).append(number)
        for chunk, numbers in by_chunk.items():
            most = 1 if chunk == self._sizes.chunks[-1] else self._sizes.prefill_rows[-1]
            yield from (numbers[i : i + most] for i in range(0, len(numbers), most))

    def _prefill(self, numbers: list[int], batch: ScheduledBatch) -> Part:
        rows = tuple(batch.prefill[number] for number in numbers)
        chunk = self._sizes.chunk_for(max(row.count for row in rows))
        alone = chunk == self._sizes.chunks[-1]
        fitting = self._sizes.prefill_rows[:1] if alone else self._sizes.prefill_rows
        size = next(n for n in fitting if n >= len(rows))
        plan = self._plan(rows, size=size, width=self._sizes.max_pages)
        tokens = np.zeros((size, chunk), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : row.count] = row.tokens
        program = self._programs.prefill[size, chunk]
        left, self._pages = program(self._arrays, self._pages, plan, tokens)
        scored = None
        if any(row.sequence.request.prompt_logprobs for row in rows):
            nexts = nexts_of(rows, shape=(size, chunk))
            scored = self._programs.score[size, chunk](self._arrays, left.final, nexts)
        drawn = self._draw(left.logits, rows)
        if self.cfg.draft_tokens:
            program = self._programs.draft_prefilled[size, chunk]
            self._draft(program, left.final, followers_of(rows, shape=(size, chunk)), plan)
        return Part(rows, tuple(numbers), drawn, scored, chunk)

    def _decode(self, rows: tuple[ScheduledRow, ...], *, first: int) -> Part:
        size = self._sizes.rows_for(len(rows))
        width = self._sizes.width_for(max(len(row.pages) for row in rows))
        plan = self._plan(rows, size=size, width=width)
        program, there = self._programs.decode[size, width], self._rows
        left, self._pages = program(self._arrays, self._pages, there.last, there.drafts, plan)
        drawn = self._draw(left.logits, rows)
        if drawn is not None and self.cfg.draft_tokens:
            program = self._programs.draft_decoded[size, width]
            self._draft(program, left.final, drawn.tokens, plan)
        return Part(rows, tuple(range(first, first + len(rows))), drawn)

    def _plan(self, rows: Sequence[ScheduledRow], *, size: int, width: int) -> np.ndarray:
        plan = np.zeros((size, len(PLAN_COLUMNS) + width), np.int32)
        plan[len(rows) :, 0] = self.cfg.max_rows
        for i, row in enumerate(rows):
            plan[i, : len(PLAN_COLUMNS)] = row.row, row.start, row.count
            plan[i, len(PLAN_COLUMNS) :][: len(row.pages)] = row.pages
        return plan

    def _draw(self, logits: jax.Array, scheduled: Sequence[ScheduledRow]) -> Draws | None:
        """Draw from logits whose first rows are these."""
        drawing = [row for row in scheduled if row.draws]
        if not drawing:
            return None
        plan = np.full((len(logits), len(DRAW_COLUMNS)), (self.cfg.max_rows, 0, 0), np.int32)
        for i, row in enumerate(scheduled):
            # Of a chunk the last token's logits are there, of a row that decodes each one's.
            most, end = (1, row.count) if row.tokens else (row.count, 1)
            index = row.start + end - len(row.sequence.request.prompt)
            plan[i] = row.row, max(index, 0), most if row.draws else 0
        (size, places, _), (level, num_top) = logits.shape, drawing_level(drawing)
        program, rows = self._programs.draw[size, places, level, num_top], self._rows
        kept = (rows.last, rows.history if remembers(level) else None)
        drawn, (last, history) = program(kept, logits, rows.sampling, rows.drafts, plan)
        self._rows = rows._replace(last=last, history=rows.history if history is None else history)
        return drawn

    def _draft(
        self, program: Program, final: jax.Array, nexts: jax.Array | np.ndarray, plan: np.ndarray
    ) -> None:
        """Guess what follows the tokens that rows drew last, and cache what the guesses need."""
        kept, last = (self._pages, self._rows.drafts), self._rows.last
        self._pages, drafts = program(self._arrays, kept, last, final, nexts, plan)
        self._rows = self._rows._replace(drafts=drafts)


def longest_row(cfg: ServeConfig, *, max_positions: int) -> int:
    """Return the most tokens of a row.

    Raises:
        ConfigError: if it is more than the model has positions for.
    """
    if cfg.max_length > max_positions:
        raise ConfigError(
            f"serve.max_length={cfg.max_length} is more than model.max_positions={max_positions}: "
            f"the model knows no later place. Use at most {max_positions}, or 0 for just that"
        )
    return cfg.max_length or max_positions


def pool_of(frame: Frame, cfg: ServeConfig, place: Place, *, max_length: int) -> tuple[int, Pages]:
    """Return the pages of a layer and the shapes of the pool, with the weights there already."""

    def shapes(num_pages: int) -> Pages:
        return page_shapes(
            frame.cfg,
            num_pages=num_pages,
            num_layers=frame.cfg.num_layers + cfg.draft_tokens,
            page_size=cfg.page_size,
            dtype=jnp.dtype(frame.execution.dtype),
            cache_format=cfg.cache_format,
        )

    one = shapes(1)
    held = [s.shard_shape(a.shape) for s, a in zip(place.pages(one), one, strict=True)]
    on_a_device = sum(
        int(np.prod(shape)) * a.dtype.itemsize for shape, a in zip(held, one, strict=True)
    )
    num_pages = choose_num_pages(
        cfg,
        page_bytes=on_a_device,
        max_length=max_length,
        memory=place.device.memory_stats(),
    )
    return num_pages, shapes(num_pages)


def reads_tables(cfg: ModelConfig) -> bool:
    """Return whether decoding reads all that a block table has room for, and not what rows hold.

    So does the reference of `mla_decode`, where there is no kernel.
    """
    return cfg.mixer == "mla" and hardware.current().platform != "cuda"


def drawing_level(rows: Iterable[ScheduledRow]) -> tuple[Level, int]:
    """Return the level that draws for all of these rows, and the likely tokens it reports."""
    requests = [row.sequence.request for row in rows]
    if any(request.logprobs for request in requests):
        return DRAWS[-1]
    return level_of(request.sampling for request in requests), 0


def nexts_of(rows: Sequence[ScheduledRow], *, shape: tuple[int, int]) -> np.ndarray:
    """Return the token of the prompt that follows each one of the rows' chunks; 0 behind it."""
    nexts = np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        following = row.sequence.request.prompt[row.start + 1 : row.start + row.count + 1]
        nexts[i, : len(following)] = following
    return nexts


def followers_of(rows: Sequence[ScheduledRow], *, shape: tuple[int, int]) -> np.ndarray:
    """Return what follows each token of the rows' chunks, as `ModelPrograms.draft` reads it."""
    found = np.full(shape, NONE, np.int32)
    for i, row in enumerate(rows):
        known = row.sequence.tokens[row.start + 1 : row.start + row.count + 1]
        # What the row draws now is known to the device alone.
        following = [*known, HELD][: row.count]
        found[i, : row.count] = following
    return found


def noisy_pages(pages: Pages, key: jax.Array) -> Pages:
    """Return pages that hold normal numbers, or the bytes of packed ones; blocks repeat."""

    def filled(pool: jax.Array) -> jax.Array:
        block = (min(NOISE_PAGES, len(pool)), *pool.shape[1:])
        if pool.dtype == jnp.uint8:
            wide = (*block[:-1], fp8_cache.LATENT + fp8_cache.ROPE)
            noise = fp8_cache.pack(jax.random.normal(key, wide, jnp.bfloat16))
        else:
            noise = jax.random.normal(key, block, pool.dtype)

        def put(number: jax.Array, pool: jax.Array) -> jax.Array:
            # The last block ends with the pool and covers a part of the one before.
            return jax.lax.dynamic_update_slice_in_dim(pool, noise, number * len(noise), axis=0)

        return jax.lax.fori_loop(0, -(-len(pool) // len(noise)), put, pool)

    return jax.tree.map(filled, pages)
