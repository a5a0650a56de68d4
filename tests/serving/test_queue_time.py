"""How long a request waited for its first step, by the engine's clock."""

from jaxfound.config.serve import ServeConfig
from jaxfound.data import ByteTokenizer
from jaxfound.serving.engine import Engine
from jaxfound.serving.request import Request
from jaxfound.serving.scheduler import Scheduler
from tests.serving.fake_runner import FakeRunner


def test_waiting_is_counted_to_the_first_step_and_no_further():
    cfg = ServeConfig(page_size=4, max_rows=1, token_budget=4, prefill_rows=1)
    scheduler = Scheduler(cfg, num_pages=64, max_length=64)
    now = {"s": 0.0}
    engine = Engine(
        FakeRunner(cfg, 64), scheduler, ByteTokenizer(), start=(256,), clock=lambda: now["s"]
    )
    for name in ("first", "second"):
        # Prompts of three chunks: the wait ends with the first one.
        engine.add(Request(name, (97,) * 10, max_tokens=3, ignore_eos=True))
    waits = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                waits[output.id] = output.queue_s
        now["s"] += 1.0
    # One row: the first draws its three tokens in steps 2 to 4; the last is read in step 5.
    assert waits["first"] == 0.0
    assert waits["second"] == 6.0
