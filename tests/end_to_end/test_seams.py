"""Each floor can be swapped by a fake: what is above it runs on what it promises, no more."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.data import Batch, BinLoader
from jaxfound.data.bins import Bins
from jaxfound.models import Execution, build
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.layers.embedding import Head
from jaxfound.parallelism import PlanError, ShardingRules, build_mesh, make_plan
from jaxfound.parallelism.plan import ParallelPlan
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.serving import Generator, Sampling
from jaxfound.training.evaluate import make_evaluate
from jaxfound.training.events import Event
from jaxfound.training.state import TrainState
from tests.training.tiny import DENSE, tiny

MODEL = ModelConfig.model_validate(DENSE)
FOUR = ModelConfig.model_validate({**DENSE, "vocab_size": 4})


def test_config_a_plan_needs_a_parameter_table_and_no_model(tmp_path):
    # Floor 1: a table by hand stands in for the model that would have described it.
    table = ParamTable((ParamSpec("w", (6, 4), "float32", ("embed", "ffn")),))
    cfg = tiny(tmp_path, "parallel.tensor=2", "parallel.fsdp=2")
    assert make_plan(cfg, 4, params=table).param_bytes == 6 * 4 * 4 // 4
    with pytest.raises(PlanError, match="tensor=3 does not divide ffn=4 of w"):
        make_plan(tiny(tmp_path, "parallel.tensor=3"), 3, params=table)


def test_kernels_a_layer_runs_on_another_matrix_product(monkeypatch):
    # Floor 1: linear is the one seam between layers and kernels.
    model = build(MODEL)
    tokens = jnp.arange(8)[None, :]
    expected = model(tokens)
    calls = []

    def counted(x, w, *, precision):
        calls.append(precision)
        return jnp.einsum("...k,kn->...n", x, w, precision="highest")

    monkeypatch.setattr("jaxfound.models.layers.linear.linear", counted)
    np.testing.assert_allclose(model(tokens), expected, atol=1e-5)
    assert calls
    assert set(calls) == {"float32"}


class MemoryStorage:
    """Checkpoints kept in memory: one file a step, so that there is something to sum."""

    def __init__(self):
        self.kept = {}

    def write(self, directory, arrays):
        directory.mkdir(parents=True)
        (directory / "here").write_text("in memory")
        self.kept[directory.parent.name.split(".")[0]] = dict(arrays)

    def read(self, directory, like):
        return {path: self.kept[directory.parent.name][path] for path in like}


def test_resources_checkpoints_run_on_another_storage(tmp_path):
    # Floor 2: the manager knows a Storage, not Orbax.
    with CheckpointManager(tmp_path, storage=MemoryStorage(), mode="sync") as checkpoints:
        checkpoints.save(3, {"w": jnp.arange(4)}, {})
        like = {"w": jax.ShapeDtypeStruct((4,), jnp.int32)}
        assert checkpoints.restore(3, like=like).state["w"].tolist() == [0, 1, 2, 3]


def test_data_a_loader_runs_on_bins_from_anywhere():
    # Floor 2: bins are arrays; no file has to exist.
    tokens = np.arange(24, dtype=np.uint16).reshape(6, 4)
    bins = Bins(
        tokens=tokens,
        targets=tokens + 1,
        segment_ids=np.ones_like(tokens),
        piece_offsets=np.arange(7),
        piece_documents=np.arange(6),
        pad_id=0,
    )
    batch = BinLoader(bins, batch_size=6, order="sequential").batch(0)
    assert batch.tokens.tolist() == tokens.tolist()
    assert batch.positions[0].tolist() == [0, 1, 2, 3]


def test_communication_the_reader_of_programs_needs_text_only():
    # Floor 3: a line of a program that nobody compiled.
    line = "  %a = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
    (found,) = collectives(line)
    assert axes_crossed(found, {"data": 2, "tensor": 2}) == ("tensor",)


@pytest.mark.multidevice
def test_parallelism_a_model_takes_rules_that_another_plan_made():
    # Floor 4: a plan by hand, and rules that keep the vocabulary whole.
    plan = ParallelPlan(
        degrees=(1, 2, 1, 1, 1, 2), rules=ShardingRules(unsplit=("vocab", "kv_heads"))
    )
    mesh = build_mesh(plan, devices=jax.devices()[:4])
    model = build(MODEL, execution=Execution(rules=plan.rules), mesh=mesh)
    assert model.embedding.table[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert "tensor" in str(model.layers.ffn.up.kernel[...].sharding.spec)


class FlatHead(Head):
    """A head that finds every token equally likely."""

    def matrix(self, embedding):
        return jnp.zeros((16, 4))


class Uniform:
    """A model that has read nothing."""

    embedding = None

    def __init__(self):
        self.head = FlatHead(FOUR, rngs=nnx.Rngs(0), execution=Execution())

    def row(self, tokens, positions, segment_ids, *, places=None):
        return None

    def hidden(self, tokens, row):
        return SimpleNamespace(final=jnp.zeros((*tokens.shape, 16)))


class FakeFrame(Frame):
    """A frame around a model of one's own."""

    def __init__(self, model):
        self.model, self.cfg, self.execution = model, FOUR, Execution()

    def bind(self, *arrays):
        return self.model


def test_models_an_evaluation_runs_on_anything_that_binds(tmp_path):
    # Floor 5: evaluation asks a frame for a model and the model for states.
    cfg = tiny(tmp_path, "train.batch_size=1", "train.seq_len=2")
    mesh = build_mesh(ParallelPlan(degrees=(1,) * 6), devices=jax.devices()[:1])
    whole = np.ones((1, 2), np.int32)
    batch = Batch(whole, whole, whole, whole, whole > 0)
    state = TrainState(jnp.zeros(()), {}, {}, (), jnp.zeros(2, jnp.uint32))
    result = make_evaluate(cfg, FakeFrame(Uniform()), mesh=mesh)(state, [batch, batch])
    assert result.loss == pytest.approx(np.log(4))
    assert result.num_targets == 4


def test_training_the_command_line_draws_events_from_anywhere(tmp_path, capsys):
    # Floor 6: the command line knows events, not how a run makes them.
    from jaxfound.cli.console import open_console
    from jaxfound.cli.train import show

    events = [
        Event("resume", 3, {"steps": 9}),
        Event("eval", 9, {"eval_loss": 1.5, "num_targets": 1000}),
        Event("finished", 9, {}),
    ]
    show(iter(events), cfg=tiny(tmp_path), console=open_console())
    out = capsys.readouterr().out
    assert "going on from step 3 of 9" in out
    assert "held-out loss 1.5000 nats a token over 1,000 tokens" in out


class Words:
    """A tokenizer of four words."""

    name, fingerprint = "words", "words"
    bos_id, eos_id, pad_id, vocab_size = 0, 3, 3, 4

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids):
        return " ".join(map(str, ids))


class Counting:
    """A model that always answers with the next number."""

    def extend(self, tokens, cache, positions):
        return jax.nn.one_hot(tokens + 1, 4), cache


def test_serving_generation_runs_on_a_model_that_only_counts():
    # Floor 6: generation asks a model for `extend` and a tokenizer for ids.
    generator = Generator(FakeFrame(Counting()), Arrays({}, {}), Words(), 0)
    assert generator.text("1", max_tokens=9, sampling=Sampling(temperature=0.0)) == "2"
