"""A backend in two steps: beside the old one, whose tokens clients go on to get, then alone."""

from dataclasses import replace

import jax
import pytest

from jaxfound.config import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.serving.engine import Engine
from jaxfound.serving.rollout import Rollout, Shadow, rolled_out
from jaxfound.serving.runner import Runner
from jaxfound.serving.scheduler import Scheduler
from jaxfound.serving.server_metrics import ServerMetrics
from pallas_kernels.mla_decode import xla
from pallas_kernels.mla_decode.op import OP
from pallas_kernels.registry import Backend, KernelError
from tests.serving.tiny_engine import GREEDY, LetterTokenizer, tiny_generator

SIZES = ServeConfig(
    page_size=8, num_pages=12, max_rows=2, max_length=48, token_budget=48, prefill_rows=1
)


@pytest.fixture
def candidates(monkeypatch):
    """`same` computes as the backend that serves on a CPU; `wrong` is 1 % off."""

    def wrong(*args, **keys):
        return jax.tree.map(lambda x: 1.01 * x, xla.run(*args, **keys))

    more = (Backend("same", xla.refuses, xla.run), Backend("wrong", xla.refuses, wrong))
    monkeypatch.setattr("pallas_kernels.mla_decode.op.OP", replace(OP, backends=OP.backends + more))


def texts(rollout):
    """Text of two prompts, and what was counted."""
    generator = tiny_generator()
    with rolled_out(rollout) as shadows:
        runner = Runner(generator.frame, generator.arrays, SIZES, num_ids=61)
    scheduler = Scheduler(SIZES, num_pages=runner.num_pages, max_length=runner.max_length)
    engine = Engine(runner, scheduler, LetterTokenizer(), start=(58,))
    found = engine.generate(["ABC", "XYZ"], max_tokens=8, sampling=GREEDY)
    jax.effects_barrier()
    return [one.text for one in found], shadows


@pytest.mark.slow
def test_clients_get_the_old_tokens_whatever_the_candidate_computes(candidates):
    plain, _ = texts(Rollout())
    same, (good,) = texts(Rollout.parse(["mla_decode=same"], []))
    wrong, (bad,) = texts(Rollout.parse(["mla_decode=wrong"], []))
    assert same == wrong == plain
    assert good.num_checks > 0
    assert good.num_reverts == 0
    assert "--backend mla_decode=same is safe" in good.verdict
    assert bad.num_reverts == bad.num_checks == good.num_checks
    assert "REVERTED" in bad.verdict


def test_the_first_difference_is_logged_and_all_are_counted(caplog):
    shadow = Shadow("mla_decode", "new")
    for row, within in ((1e-9, True), (0.5, False), (float("nan"), False)):
        shadow.told(row, row, within)
    records = [r for r in caplog.records if r.message == "serve.shadow_reverted"]
    assert [(r.op, r.backend, r.worst_row) for r in records] == [("mla_decode", "new", 0.5)]
    lines = ServerMetrics(lambda: None, (shadow,)).text().decode()
    labels = '{backend="new",op="mla_decode"}'
    assert f"jaxfound_shadow_checks_total{labels} 3.0" in lines
    assert f"jaxfound_shadow_reverts_total{labels} 2.0" in lines


@pytest.mark.parametrize(
    ("shadows", "backends", "error"),
    [
        (["mla_decode"], [], ConfigError),
        (["attention=xla"], [], KernelError),
        (["mla_decode=fast"], [], KernelError),
        (["mla_decode=xla"], ["mla_decode=xla"], ConfigError),
    ],
)
def test_a_rollout_that_cannot_be_is_refused(shadows, backends, error):
    with pytest.raises(error):
        Rollout.parse(shadows, backends)
