"""What the device runs: pure functions of weights, pages and rows, traced once a size.

A step is the model's program, which ends in logits, and then a program that draws: how rows draw
varies from step to step and would otherwise multiply the sizes of the model's programs. Where
modules look ahead, a third lets them guess the tokens that the next step checks
(docs/decisions/a-draft-is-what-would-be-drawn.md).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfound.models.build import Arrays, Frame
from jaxfound.models.pages import PagedView, Pages, paged_view, to_end, to_head
from jaxfound.serving.sampler import (
    Draws,
    History,
    Level,
    RowSampling,
    counted,
    logprobs_of,
    real_logits,
    sample_rows,
)

# Leading columns of a plan, before the block table. Rows that are none have row R and count 0.
PLAN_COLUMNS = ("row", "start", "count")
DRAW_COLUMNS = ("row", "index", "draws")
# In place of a token: the one that its row drew last; none.
HELD, NONE = -1, -2
# Prompt tokens whose logits exist at once, when their log-probabilities are asked for.
SCORED_AT_ONCE = 64


class Rows(NamedTuple):
    """What the device remembers of each running row, between steps.

    Attributes:
        last: the token that it drew last [R].
        drafts: guesses at the tokens that follow it; G may be 0.
        sampling: how it draws.
        history: what its penalties need.
    """

    last: Int[Array, " R"]
    drafts: Int[Array, "R G"]
    sampling: RowSampling
    history: History


class Computed(NamedTuple):
    """What a program of the model leaves.

    Attributes:
        logits: behind each token of rows that decode, [B 1 + G V]; of prompts behind the last one
            of each row [B 1 V], padded to the rows of a drawing program.
        final: normalised states of all tokens, the real ones of a row first.
    """

    logits: Float[Array, "B t V"]
    final: Float[Array, "b T D"]


@dataclass(frozen=True)
class ModelPrograms:
    """The functions of one model and one pool.

    Attributes:
        frame: the model without arrays.
        page_size: tokens of a page.
        num_pages: pages of one layer.
        max_rows: R; row R is none.
        num_ids: ids of the tokenizer.
        num_drafts: G, tokens that are guessed a step, each by a module of its own.
    """

    frame: Frame
    page_size: int
    num_pages: int
    max_rows: int
    num_ids: int
    num_drafts: int = 0

    def decode(
        self,
        arrays: Arrays,
        pages: Pages,
        last: Int[Array, " R"],
        drafts: Int[Array, "R G"],
        plan: Int[Array, "B columns"],
    ) -> tuple[Computed, Pages]:
        """Write each row's last token and its drafts to their pages, as if all were right."""
        row, count = plan[:, 0], plan[:, 2]
        tokens = jnp.concatenate([last[:, None], drafts], axis=1).at[row].get(mode="clip")
        model = self.frame.bind(*arrays)
        view = self._view(plan, count, num_tokens=tokens.shape[1], decoding=True)
        final, pages = model.extend_pages(to_end(tokens, count), pages, view)
        final = to_head(final, count)
        return Computed(model.logits(final), final), pages

    def prefill(
        self,
        arrays: Arrays,
        pages: Pages,
        plan: Int[Array, "b columns"],
        tokens: Int[Array, "b T"],
        *,
        num_logits: int,
    ) -> tuple[Computed, Pages]:
        """Write chunks of prompts to their pages.

        Args:
            num_logits: rows of the logits, at least those of the plan.
        """
        count = plan[:, 2]
        model = self.frame.bind(*arrays)
        view = self._view(plan, count, num_tokens=tokens.shape[1], decoding=False)
        final, pages = model.extend_pages(tokens, pages, view)
        ends = at_place(final, jnp.maximum(count - 1, 0))
        ends = jnp.pad(ends, ((0, num_logits - len(ends)), (0, 0), (0, 0)))
        return Computed(model.logits(ends), final), pages

    def draw(
        self,
        rows: tuple[Int[Array, " R"], History | None],
        logits: Float[Array, "B t V"],
        sampling: RowSampling,
        drafts: Int[Array, "R G"],
        plan: Int[Array, "B 3"],
        *,
        level: Level,
        num_top: int,
    ) -> tuple[Draws, tuple[Int[Array, " R"], History | None]]:
        """Draw what follows each row that draws, as far as its drafts turn out to be right.

        The token behind a draft is drawn only if the draft is what was drawn in its place: what
        comes out is what would have come without drafts.

        Args:
            rows: the last token and the history of all rows; None where the level needs none.
            logits: of the rows of the plan, t = 1 behind prompts and else 1 + G.
            sampling: of all rows.
            drafts: of all rows.
            plan: row, number of draws before, tokens to draw at most.
            level: of the rows that draw.
            num_top: likely tokens to report.

        Returns:
            Draws [B t], `NONE` where nothing was drawn; and the rows, which remember them.
        """
        last, history = rows
        row, index, most = plan[:, 0], plan[:, 1], plan[:, 2]
        how, guesses = picked(sampling, row), picked(drafts, row)
        seen = None if history is None else picked(history, row)
        newest = picked(last, row)
        found: list[Draws] = []
        for place in range(logits.shape[1]):
            drawn = sample_rows(
                logits[:, place],
                how,
                index + place,
                history=seen,
                num_ids=self.num_ids,
                level=level,
                num_top=num_top,
            )
            there = place < most
            if place:
                # A draw that is not finite is drawn again, and told, by the next step.
                right = guesses[:, place - 1] == found[-1].tokens
                there &= right & (drawn.tokens >= 0)
            # A draw that failed is -1; no row of the embedding has that number.
            newest = jnp.where(there, jnp.maximum(drawn.tokens, 0), newest)
            seen = None if seen is None else counted(seen, drawn.tokens, there)
            found.append(drawn._replace(tokens=jnp.where(there, drawn.tokens, NONE)))
        at = jnp.where(most > 0, row, self.max_rows)
        last = last.at[at].set(newest, mode="drop")
        if history is not None and seen is not None:
            num_drawn = history.num_drawn.at[at].set(seen.num_drawn, mode="drop")
            history = history._replace(num_drawn=num_drawn)
        return jax.tree.map(lambda *places: jnp.stack(places, axis=1), *found), (last, history)

    def draft(
        self,
        arrays: Arrays,
        kept: tuple[Pages, Int[Array, "R G"]],
        last: Int[Array, " R"],
        final: Float[Array, "B T D"],
        nexts: Int[Array, "B T"],
        plan: Int[Array, "B columns"],
        *,
        decoding: bool,
    ) -> tuple[Pages, Int[Array, "R G"]]:
        """Let the modules that look ahead guess what follows the token that each row drew last.

        A module reads, at each place, the state of the depth before and a later token. Behind the
        newest token that is a guess of the module before: what it caches there is as good.

        Args:
            kept: pages of all layers, and the drafts of all rows.
            last: of all rows.
            final: as the program of the model left it.
            nexts: the token that follows each of them: `HELD` for the one that the row drew last,
                `NONE` behind the row's end.
            plan: of the program of the model.
            decoding: whether that was `decode`.
        """
        pages, drafts = kept
        row = plan[:, 0]
        counts = (nexts != NONE).sum(axis=1)
        tokens = jnp.where(nexts == HELD, picked(last, row)[:, None], jnp.maximum(nexts, 0))
        width = tokens.shape[1]
        ends = jnp.full_like(counts, width - 1) if decoding else jnp.maximum(counts - 1, 0)
        if decoding:
            final, tokens = to_end(final, counts), to_end(tokens, counts)
        view = self._view(plan, counts, num_tokens=width, decoding=decoding)
        model = self.frame.bind(*arrays)
        guesses: list[Int[Array, "B 1"]] = []
        for depth in range(1, self.num_drafts + 1):
            final, pages = model.look_ahead_pages(final, tokens, pages, view, depth=depth)
            logits = real_logits(model.logits(at_place(final, ends)), num_ids=self.num_ids)
            guess = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
            tokens = jnp.where(jnp.arange(width)[None, :] == ends[:, None], guess, tokens)
            guesses.append(guess)
        at = jnp.where(counts > 0, row, self.max_rows)
        return pages, drafts.at[at].set(jnp.concatenate(guesses, axis=1), mode="drop")

    def score(
        self,
        arrays: Arrays,
        final: Float[Array, "b T D"],
        nexts: Int[Array, "b T"],
        *,
        num_top: int,
    ) -> Draws:
        """Return the log-probabilities of the tokens that follow, under the model [b x T]."""
        model = self.frame.bind(*arrays)
        states, ids = final.reshape(-1, final.shape[2]), nexts.reshape(-1)
        at_once = min(SCORED_AT_ONCE, len(ids))
        short = -len(ids) % at_once
        states, ids = jnp.pad(states, ((0, short), (0, 0))), jnp.pad(ids, (0, short))

        def one(part: tuple[jax.Array, jax.Array]) -> Draws:
            logits = real_logits(model.logits(part[0][None])[0], num_ids=self.num_ids)
            return logprobs_of(logits, part[1], num_top=num_top)

        parts = states.reshape(-1, at_once, states.shape[1]), ids.reshape(-1, at_once)
        scored = jax.lax.map(one, parts)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: nexts.size], scored)

    def _view(
        self,
        plan: Int[Array, "B columns"],
        counts: Int[Array, " B"],
        *,
        num_tokens: int,
        decoding: bool,
    ) -> PagedView:
        return paged_view(
            plan[:, 1],
            counts,
            plan[:, len(PLAN_COLUMNS) :],
            num_tokens=num_tokens,
            page_size=self.page_size,
            num_pages=self.num_pages,
            decoding=decoding,
        )


def at_place(x: Float[Array, "B T D"], place: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """Return one entry of each row."""
    return jnp.take_along_axis(x, place[:, None, None], axis=1)


def picked[Tree: (RowSampling, History, jax.Array)](rows: Tree, numbers: Int[Array, " B"]) -> Tree:
    """Return some of all rows; of those that are none, any."""
    return jax.tree.map(lambda a: a.at[numbers].get(mode="clip"), rows)


def put[Tree: (RowSampling, History)](rows: Tree, number: Int[Array, ""], row: Tree) -> Tree:
    """Return all rows with one of them replaced."""
    return jax.tree.map(lambda a, b: a.at[number].set(b), rows, row)
