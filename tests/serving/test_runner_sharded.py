"""Programs cut over a mesh draw what those of one device draw."""

import math

import jax
import numpy as np
import pytest

from jaxfound.models import describe, execution_of
from jaxfound.models.build import Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.serving.request import ScheduledBatch
from jaxfound.serving.runner import Runner
from tests.models.tiny import model_config, run_config, tokens_of, weights_of
from tests.serving.by_hand import SERVE, ByHand, prefill

# One size of each kind; two rows and a prompt, which both meshes divide.
SMALL = SERVE.model_copy(update={"max_rows": 2, "token_budget": 16})
LAYOUTS = [
    pytest.param(
        "mla_moe_yarn",
        {"expert": 2, "tensor": 2},
        0,
        id="experts and heads",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "mla_moe_mtp",
        {"expert": 2, "tensor": 2},
        1,
        id="experts and heads, drafts",
        marks=pytest.mark.slow,
    ),
    pytest.param("gqa", {"data": 2, "tensor": 2}, 0, id="rows and heads"),
]


def drawn(runner, *, num_drafts):
    """Tokens, their log-probabilities, and the guesses, of which none need be right."""
    a = ByHand(tokens_of(11, seed=1), row=1, pages=range(20, 32), logprobs=2)
    b = ByHand(tokens_of(5, seed=2), row=0, pages=range(11, -1, -1), logprobs=2)
    logprobs, guesses = [], []

    def run(step):
        rows, results = (*step.prefill, *step.decode), runner.dispatch(step).read()
        for row, result in zip(rows, results, strict=True):
            logprobs.extend(each.logprob for each in result.logprobs)
            if result.tokens:
                {1: a, 0: b}[row.row].read(result)
        guesses.append(np.asarray(runner._rows.drafts).tolist())

    run(prefill(a.chunk(7), b.chunk(5)))
    run(ScheduledBatch((a.chunk(4),), (b.token(1 + num_drafts),)))
    for _ in range(4):
        run(ScheduledBatch((), (a.token(1 + num_drafts), b.token(1 + num_drafts))))
    return a.sequence.tokens, b.sequence.tokens, logprobs, guesses


@pytest.mark.multidevice
@pytest.mark.parametrize(("model", "layout", "num_drafts"), LAYOUTS)
def test_a_mesh_draws_what_one_device_draws(model, layout, num_drafts):
    serve = SMALL.model_copy(update={"draft_tokens": num_drafts})
    cfg = run_config(model_config(model), parallel=layout)
    plan = make_plan(cfg, math.prod(layout.values()), params=describe(cfg.model))
    mesh = build_mesh(plan, devices=jax.devices()[: plan.num_devices])
    frame = Frame(cfg.model, execution=execution_of(plan, cfg.precision))
    arrays = weights_of(frame)
    spread = jax.device_put(arrays, frame.shardings(mesh))
    many = Runner(frame, spread, serve, num_ids=61, mesh=mesh)
    one = Runner(Frame(cfg.model), arrays, serve, num_ids=61)
    *ids, logprobs, guesses = drawn(many, num_drafts=num_drafts)
    *expected_ids, expected, expected_guesses = drawn(one, num_drafts=num_drafts)
    assert ids == expected_ids
    assert guesses == expected_guesses
    np.testing.assert_allclose(logprobs, expected, rtol=2e-5, atol=2e-5)
    held = {name: a.addressable_shards[0].data.nbytes for name, a in _named(many._pages)}
    whole = {name: a.nbytes for name, a in _named(many._pages)}
    parts = layout["tensor"] if model == "gqa" else 1
    assert {name: n * parts for name, n in held.items()} == whole


def _named(pages):
    return pages._asdict().items()
