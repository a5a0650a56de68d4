"""The walk of serving: from a folder of weights to a server that answers."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxfound.config.schema import ConfigError
from jaxfound.data.chat import read_template
from jaxfound.serving.engine import Engine
from jaxfound.serving.listen import HttpServer, bind, listen
from jaxfound.serving.open_model import OpenModel, open_model
from jaxfound.serving.pump import Pump
from jaxfound.serving.rollout import Rollout, Shadow, rolled_out
from jaxfound.serving.served import ServedModel
from jaxfound.serving.server import make_app
from jaxfound.serving.server_metrics import ServerMetrics

# Most continuations that one body may ask for, whatever the engine could hold.
MAX_SEQUENCES = 256
OWN_CHOICE = Rollout()


@dataclass(frozen=True)
class Address:
    """Where and to whom a server answers.

    Attributes:
        host: a name or an address of this machine.
        port: 0 = any that is free.
        name: of the model, in requests.
        api_key: asked for where there is one.
        template: a jinja file for chats, in place of the tokenizer's.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "model"
    api_key: str | None = None
    template: Path | None = None

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ConfigError("the API key is empty: give one, or none to ask for none")


@dataclass(frozen=True)
class Serving:
    """A server that has begun to answer.

    Attributes:
        url: of the server.
        name: of the model.
        device: kind of the devices.
        num_devices: that hold the model.
        max_length: most tokens of prompt and continuation.
        max_rows: requests that run at once.
        num_pages: of the cache.
        page_size: tokens of a page.
        open_s: seconds until the weights were there.
        compile_s: seconds until the programs were.
    """

    url: str
    name: str
    device: str
    num_devices: int
    max_length: int
    max_rows: int
    num_pages: int
    page_size: int
    open_s: float
    compile_s: float


def serve(
    path: Path,
    overrides: Sequence[str],
    *,
    address: Address,
    on_ready: Callable[[Serving], None],
    step: int | None = None,
    tokenizer: str | None = None,
    rollout: Rollout = OWN_CHOICE,
) -> tuple[Shadow, ...]:
    """Serve the weights at a path until SIGTERM or Ctrl-C; then let running requests end.

    Args:
        path: a run's folder, a published folder or a .gguf file.
        overrides: `key=value`, e.g. `serve.max_rows=8`.
        address: where and to whom.
        on_ready: called once, when requests are answered.
        step: which checkpoint; the newest by default.
        tokenizer: in place of the one that belongs to the weights.
        rollout: backends that run in place of, or beside, the registry's choice.

    Returns:
        What became of the backends that ran beside others.

    Raises:
        ConfigError: the port is taken, or a size does not fit.
        CheckpointError, DataError, PlanError, WeightsError: the weights cannot be opened.
        KernelError: a backend refuses this model or this device.
    """
    # 1. The port first: a mistake there is told before weights are read.
    there = bind(address.host, address.port)
    with there:
        # 2. Weights and tokenizer; 3. programs and pages, and the engine that steps them.
        began_s = time.monotonic()
        model = open_model(path, overrides, step=step, tokenizer=tokenizer)
        opened_s = time.monotonic()
        refuse_on_meshes(rollout, model)
        with rolled_out(rollout) as shadows:
            engine = Engine.of(model)
        compiled_s = time.monotonic()
        # 4. What clients may know of the model, and what they may ask.
        served = served_model(model, engine, address=address)
        with pumping(engine, model) as pump:
            metrics = ServerMetrics(engine.snapshot, shadows)
            app = make_app(pump, served, metrics, cfg=model.cfg.serve, api_key=address.api_key)
            facts = serving_facts(
                there.getsockname()[:2],
                model,
                engine,
                name=address.name,
                seconds=(opened_s - began_s, compiled_s - opened_s),
            )
            # 5. Answer, until a signal; listen drains the engine before it returns.
            server = HttpServer(app, pump, cfg=model.cfg.serve, on_ready=lambda: on_ready(facts))
            listen(there, server)
    return shadows


def refuse_on_meshes(rollout: Rollout, model: OpenModel) -> None:
    """Backends are compared on one device only; ConfigError otherwise."""
    if rollout.shadows and model.mesh is not None:
        raise ConfigError(
            f"--shadow compares on one device, and this model is on {model.mesh.size}: leave out "
            "parallel.*, or try the backend on a smaller model of the same kind"
        )


@contextmanager
def pumping(engine: Engine, model: OpenModel) -> Iterator[Pump]:
    """Step the engine in a thread of its own, for as long as this is entered."""
    pump = Pump(engine, request_timeout_s=model.cfg.serve.request_timeout_s)
    pump.start()
    try:
        yield pump
    finally:
        pump.close()


def served_model(model: OpenModel, engine: Engine, *, address: Address) -> ServedModel:
    """Return what clients see of a model; DataError if the template cannot be read."""
    template = address.template
    return ServedModel(
        name=address.name,
        tokenizer=model.tokenizer,
        start=model.start,
        max_length=engine.max_length,
        max_sequences=min(engine.max_open, MAX_SEQUENCES),
        template=None if template is None else read_template(model.tokenizer, template),
        created=int(time.time()),
    )


def serving_facts(
    bound: tuple[str, int],
    model: OpenModel,
    engine: Engine,
    *,
    name: str,
    seconds: tuple[float, float],
) -> Serving:
    """Return what is worth saying of a server that begins."""
    host, port = bound
    device = jax.local_devices()[0] if model.mesh is None else model.mesh.devices.flat[0]
    now = engine.snapshot()
    return Serving(
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        name=name,
        device=device.device_kind,
        num_devices=1 if model.mesh is None else model.mesh.size,
        max_length=engine.max_length,
        max_rows=model.cfg.serve.max_rows,
        num_pages=now.num_pages,
        page_size=now.page_size,
        open_s=seconds[0],
        compile_s=seconds[1],
    )
