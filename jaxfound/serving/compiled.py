"""All programs of a server, compiled before its first request.

They are called as compiled, never traced again: a size that was forgotten is an error, not a pause
of seconds in the middle of somebody's text.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxfound.config.model import ModelConfig
from jaxfound.models.build import Arrays
from jaxfound.models.pages import Pages, empty_pages, page_specs
from jaxfound.parallelism.axes import ShardingRules
from jaxfound.parallelism.mesh import program_options
from jaxfound.resources.topology import Device
from jaxfound.serving.program_sizes import ProgramSizes
from jaxfound.serving.programs import DRAW_COLUMNS, PLAN_COLUMNS, ModelPrograms, Rows, put
from jaxfound.serving.sampler import (
    LEVELS,
    MAX_TOP,
    History,
    Level,
    RowSampling,
    empty_history,
    empty_rows,
)

type Program = Callable[..., Any]

# Drawing programs, and the likely tokens that each reports. Where any are asked for, the level
# that can do everything draws: rows get the same tokens, and there are few programs.
DRAWS: tuple[tuple[Level, int], ...] = (*((level, 0) for level in LEVELS), (LEVELS[-1], MAX_TOP))


@dataclass(frozen=True)
class Place:
    """Where a server's arrays lie.

    Attributes:
        rules: which dims the mesh axes split.
        mesh: None for one device.
        device: where there is no mesh.
    """

    rules: ShardingRules
    mesh: Mesh | None
    device: Device

    @property
    def whole(self) -> Sharding:
        """On every device."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec())

    def pages(self, shapes: Pages) -> Pages:
        """Return where a pool's arrays lie."""
        if self.mesh is None:
            return jax.tree.map(lambda _: self.whole, shapes)
        is_spec = lambda x: isinstance(x, PartitionSpec)
        specs = page_specs(shapes, self.rules)
        return jax.tree.map(partial(NamedSharding, self.mesh), specs, is_leaf=is_spec)


@dataclass(frozen=True)
class Programs:
    """Compiled programs by size.

    Attributes:
        decode: by (rows, pages of the block table).
        prefill: by (rows, chunk).
        draw: by (rows, places of each, level, likely tokens).
        score: by (rows, chunk), for the log-probabilities of prompts.
        draft_decoded: what guesses behind a decoding program, by its sizes; none without drafts.
        draft_prefilled: the same behind a prefill program.
        admit: remembers how a row draws.
        admit_history: remembers the tokens of a row with penalties.
        empty: makes a pool and rows without anything in them.
    """

    decode: Mapping[tuple[int, int], Program]
    prefill: Mapping[tuple[int, int], Program]
    draw: Mapping[tuple[int, int, Level, int], Program]
    score: Mapping[tuple[int, int], Program]
    draft_decoded: Mapping[tuple[int, int], Program]
    draft_prefilled: Mapping[tuple[int, int], Program]
    admit: Program
    admit_history: Program
    empty: Program

    @property
    def temp_bytes(self) -> int:
        """Bytes of a device that the hungriest program takes beside its arguments and results."""
        found = [program.memory_analysis() for program in self._each()]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=0)

    @property
    def num_programs(self) -> int:
        """How many there are."""
        return len(self._each())

    def _each(self) -> list[Any]:
        groups = [getattr(self, field.name) for field in fields(self)]
        return [p for g in groups for p in (g.values() if isinstance(g, Mapping) else (g,))]


def compile_programs(
    model: ModelPrograms, arrays: Arrays, *, pages: Pages, sizes: ProgramSizes, place: Place
) -> Programs:
    """Compile every program of a server.

    Args:
        model: what the programs compute.
        arrays: the weights, where they lie.
        pages: shapes of the pool.
        sizes: of the programs.
        place: of everything but the weights.
    """
    lowering = Lowering.of(model, arrays, pages=pages, place=place)
    mesh = nullcontext() if place.mesh is None else jax.set_mesh(place.mesh)
    with mesh:
        decodes = [(rows, width) for rows in sizes.rows for width in sizes.widths]
        lowered = {
            "decode": {size: lowering.decode(*size) for size in decodes},
            "prefill": {
                (rows, chunk): lowering.prefill(
                    rows, chunk, width=sizes.max_pages, num_logits=sizes.rows_for(rows)
                )
                for rows, chunk in sizes.prefills()
            },
            "draw": {
                (rows, places, level, num_top): lowering.draw(
                    rows, places, level=level, num_top=num_top
                )
                for rows, places in drawn_sizes(sizes, num_drafts=model.num_drafts)
                for level, num_top in DRAWS
            },
            "score": {size: lowering.score(*size) for size in sizes.prefills()},
            "draft_decoded": {
                (rows, width): lowering.draft(
                    rows, 1 + model.num_drafts, width=width, decoding=True
                )
                for rows, width in decodes
                if model.num_drafts
            },
            "draft_prefilled": {
                (rows, chunk): lowering.draft(rows, chunk, width=sizes.max_pages, decoding=False)
                for rows, chunk in sizes.prefills()
                if model.num_drafts
            },
            "admit": lowering.put(lowering.rows.sampling),
            "admit_history": lowering.put(lowering.rows.history),
            "empty": lowering.empty(),
        }
    # The compiler works outside of Python's lock, on as many cores as there are.
    is_leaf = lambda x: isinstance(x, jax.stages.Lowered)
    leaves, tree = jax.tree.flatten(lowered, is_leaf=is_leaf)
    options = program_options(place.mesh)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiled = list(pool.map(lambda each: each.compile(options), leaves))
    return Programs(**jax.tree.unflatten(tree, compiled))


@dataclass(frozen=True)
class Lowering:
    """Lowers the functions of a model at the sizes asked for.

    Attributes:
        model: the functions.
        cfg: of the model.
        place: of everything but the weights.
        arrays: shapes and places of the weights.
        pages: of the pool.
        rows: of what is remembered of rows.
    """

    model: ModelPrograms
    cfg: ModelConfig
    place: Place
    arrays: Arrays
    pages: Pages
    rows: Rows

    @classmethod
    def of(cls, model: ModelPrograms, arrays: Arrays, *, pages: Pages, place: Place) -> "Lowering":
        """Return it for arrays that are there, and a pool that is not."""
        shape = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        rows = jax.eval_shape(partial(_no_rows, model))
        return cls(
            model=model,
            cfg=model.frame.cfg,
            place=place,
            arrays=jax.tree.map(lambda a: shape(a, a.sharding), arrays),
            pages=jax.tree.map(shape, pages, place.pages(pages)),
            rows=jax.tree.map(lambda a: shape(a, place.whole), rows),
        )

    def decode(self, rows: int, width: int) -> jax.stages.Lowered:
        """Return the program that decodes `rows` over block tables of `width` pages."""
        plan = self._numbers(rows, len(PLAN_COLUMNS) + width)
        out = (self.place.whole, self.place.pages(self.pages))
        jitted = jax.jit(self.model.decode, donate_argnums=1, out_shardings=out)
        return jitted.lower(self.arrays, self.pages, self.rows.last, self.rows.drafts, plan)

    def prefill(self, rows: int, chunk: int, *, width: int, num_logits: int) -> jax.stages.Lowered:
        """Return the program that prefills `chunk` tokens of each row."""
        plan = self._numbers(rows, len(PLAN_COLUMNS) + width)
        jitted = jax.jit(
            partial(self.model.prefill, num_logits=num_logits),
            donate_argnums=1,
            out_shardings=(self.place.whole, self.place.pages(self.pages)),
        )
        return jitted.lower(self.arrays, self.pages, plan, self._numbers(rows, chunk))

    def draw(self, rows: int, places: int, *, level: Level, num_top: int) -> jax.stages.Lowered:
        """Return the program that draws at most `places` tokens of each row."""
        logits = self._array(jnp.float32, rows, places, self.cfg.padded_vocab_size)
        jitted = jax.jit(
            partial(self.model.draw, level=level, num_top=num_top),
            donate_argnums=0,
            out_shardings=self.place.whole,
        )
        all_rows, plan = self.rows, self._numbers(rows, len(DRAW_COLUMNS))
        kept = (all_rows.last, all_rows.history if remembers(level) else None)
        return jitted.lower(kept, logits, all_rows.sampling, all_rows.drafts, plan)

    def draft(self, rows: int, tokens: int, *, width: int, decoding: bool) -> jax.stages.Lowered:
        """Return the program that guesses behind one of the model's with so many tokens a row."""
        pages = self.place.pages(self.pages)
        jitted = jax.jit(
            partial(self.model.draft, decoding=decoding),
            donate_argnums=1,
            out_shardings=(pages, self.place.whole),
        )
        plan = self._numbers(rows, len(PLAN_COLUMNS) + width)
        kept, final = (self.pages, self.rows.drafts), self._states(rows, tokens)
        nexts = self._numbers(rows, tokens)
        return jitted.lower(self.arrays, kept, self.rows.last, final, nexts, plan)

    def score(self, rows: int, chunk: int) -> jax.stages.Lowered:
        """Return the program that scores the tokens of a prefilled chunk."""
        final, nexts = self._states(rows, chunk), self._numbers(rows, chunk)
        jitted = jax.jit(partial(self.model.score, num_top=MAX_TOP), out_shardings=self.place.whole)
        return jitted.lower(self.arrays, final, nexts)

    def put(self, rows: RowSampling | History) -> jax.stages.Lowered:
        """Return the program that replaces one of these rows."""
        one = jax.tree.map(lambda a: self._array(a.dtype, *a.shape[1:]), rows)
        jitted = jax.jit(put, donate_argnums=0, out_shardings=self.place.whole)
        return jitted.lower(rows, self._numbers(), one)

    def empty(self) -> jax.stages.Lowered:
        """Return the program that makes a pool and rows."""

        def make() -> tuple[Pages, Rows]:
            return empty_pages(self.pages), _no_rows(self.model)

        out = (self.place.pages(self.pages), jax.tree.map(lambda _: self.place.whole, self.rows))
        return jax.jit(make, out_shardings=out).lower()

    def _states(self, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        dtype = self.model.frame.execution.dtype
        return self._array(dtype, rows, tokens, self.cfg.embed_dim)

    def _numbers(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(jnp.int32, *shape)

    def _array(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.place.whole)


def drawn_sizes(sizes: ProgramSizes, *, num_drafts: int) -> list[tuple[int, int]]:
    """Return the (rows, places of each) that are drawn together: of prompts, and of decoding."""
    prompts = {(sizes.rows_for(rows), 1) for rows in sizes.prefill_rows}
    return sorted(prompts | {(rows, 1 + num_drafts) for rows in sizes.rows})


def remembers(level: Level) -> bool:
    """Return whether what a level draws depends on the tokens that a row has had."""
    return LEVELS.index(level) >= LEVELS.index("shaped")


def _no_rows(model: ModelPrograms) -> Rows:
    num_rows, vocab = model.max_rows, model.frame.cfg.padded_vocab_size
    return Rows(
        last=jnp.zeros(num_rows, jnp.int32),
        drafts=jnp.zeros((num_rows, model.num_drafts), jnp.int32),
        sampling=empty_rows(num_rows),
        history=empty_history(num_rows, vocab_size=vocab),
    )
