"""A server on several devices answers as one on one device does."""

from pathlib import Path

import jax
import pytest

from jaxfound.serving.background import background_server
from jaxfound.serving.open_model import open_model
from jaxfound.serving.run import Address
from jaxfound.training.run import train
from tests.models.tiny import model_config, run_config
from tests.serving.scripted import post

SMALL = ("max_rows=2", "max_length=64", "page_size=8", "num_pages=16", "token_budget=32")
BODIES = (
    {"prompt": "The ", "max_tokens": 16, "temperature": 0, "logprobs": 1},
    {"prompt": "def f(", "max_tokens": 16, "seed": 3, "temperature": 0.8},
)
LAYOUTS = [
    pytest.param(["parallel.tensor=2"], id="two of eight devices"),
    pytest.param(
        ["parallel.tensor=2", "parallel.expert=2", "serve.draft_tokens=1"],
        id="heads, experts and rows, drafts",
    ),
]

pytestmark = [pytest.mark.slow, pytest.mark.multidevice]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step: of weights that are as good as random."""
    folder = tmp_path_factory.mktemp("runs")
    model = model_config("mla_moe_mtp", vocab_size=259)
    data = {"prepared_dir": str(folder / "data")}
    list(train(run_config(model, name="small", runs_dir=str(folder), data=data)))
    return folder / "small"


def answers(run: Path, changes: list[str]) -> list[str]:
    sizes = [f"serve.{size}" for size in SMALL]
    model = open_model(run, ["precision.compute=float32", *sizes, *changes])
    with background_server(model, address=Address(port=0, name="small")) as server:
        found = [post(server.port, body, timeout_s=120.0) for body in BODIES]
    assert [status for status, _ in found] == [200, 200]
    return [answer["choices"][0]["text"] for _, answer in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_one_device(run, layout):
    assert jax.device_count() == 8
    assert answers(run, layout) == answers(run, [])
