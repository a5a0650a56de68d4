"""The script model of case S21 behind the whole server, on a port of this machine."""

import http.client
import json
import lzma
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jaxfound.serving.background import Background, background_server
from jaxfound.serving.open_model import open_model
from jaxfound.serving.run import Address
from tests.serving.scripted import DATA, post

DEADLINE_S = 60.0
# 64 pages of 2 tokens: one request of the whole context takes every page.
SIZES = {
    "page_size": 2,
    "num_pages": 64,
    "max_rows": 4,
    "max_waiting": 28,
    "token_budget": 32,
    "prefill_rows": 2,
}
_UNPACKED = TemporaryDirectory()


@cache
def script_model() -> Path:
    """The published folder; nobody writes into it."""
    packed, folder = DATA / "S21" / "script_model", Path(_UNPACKED.name) / "script_model"
    folder.mkdir()
    for path in packed.iterdir():
        raw = path.read_bytes()
        name, data = (path.stem, lzma.decompress(raw)) if path.suffix == ".xz" else (path.name, raw)
        (folder / name).write_bytes(data)
    return folder


def overrides(**sizes):
    return [f"serve.{name}={value}" for name, value in (SIZES | sizes).items()]


class Live(NamedTuple):
    """A server that answers."""

    there: Background

    @property
    def port(self):
        return self.there.port

    @property
    def engine(self):
        return self.there.engine

    def post(self, body, path="/v1/completions"):
        """Status and JSON of an answer."""
        return post(self.port, body, path, timeout_s=DEADLINE_S)

    def stream(self, body, path="/v1/completions"):
        """The objects of a streamed answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            lines = connection.getresponse().read().decode("utf-8").split("\n\n")
        finally:
            connection.close()
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextmanager
def running(**sizes):
    """The script model, served."""
    model = open_model(script_model(), overrides(**sizes))
    with background_server(model, address=Address(port=0, name="m")) as there:
        yield Live(there)
