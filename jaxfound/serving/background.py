"""A server beside other work: in threads of this process, for notebooks and tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jaxfound.serving.engine import Engine
from jaxfound.serving.listen import HttpServer, bind
from jaxfound.serving.open_model import OpenModel
from jaxfound.serving.run import Address, pumping, served_model
from jaxfound.serving.server import make_app
from jaxfound.serving.server_metrics import ServerMetrics

# From a bound socket to the first answer.
START_S = 60.0


class Background(NamedTuple):
    """A server that answers.

    Attributes:
        url: of it.
        port: of this machine.
        engine: only to be looked at.
        server: `should_exit = True` ends it.
    """

    url: str
    port: int
    engine: Engine
    server: HttpServer


@contextmanager
def background_server(model: OpenModel, *, address: Address) -> Iterator[Background]:
    """Serve weights, which are taken over, until this is left; running requests end then.

    Args:
        model: from `open_model`.
        address: port 0 = any that is free.

    Raises:
        ConfigError: the port is taken, or a size does not fit.
    """
    with bind(address.host, address.port) as there:
        engine = Engine.of(model)
        served = served_model(model, engine, address=address)
        cfg, ready = model.cfg.serve, threading.Event()
        with pumping(engine, model) as pump:
            metrics = ServerMetrics(engine.snapshot)
            app = make_app(pump, served, metrics, cfg=cfg, api_key=address.api_key)
            server = HttpServer(app, pump, cfg=cfg, on_ready=ready.set)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [there]})
            thread.start()
            if not ready.wait(START_S):
                raise TimeoutError(f"the server did not begin to answer within {START_S:g} s")
            port = there.getsockname()[1]
            try:
                yield Background(f"http://{address.host}:{port}", port, engine, server)
            finally:
                server.should_exit = True
                thread.join()
