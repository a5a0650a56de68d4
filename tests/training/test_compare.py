"""Two number formats on one text: losses by closed forms, damage found, nothing counted twice."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.data import ByteTokenizer, DataError
from jaxfound.data.text_rows import Edges, Text, read_texts, rows_of
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.execution import Execution
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.training.compare import compare, make_judge, measure, moves_of
from jaxfound.training.evaluate import make_evaluate
from jaxfound.training.gap import Gap, Tally, bootstrap, gap_of, name_of, summary
from jaxfound.training.run import run_directory
from jaxfound.training.state import TrainState
from jaxfound.training.step import batch_sharding
from tests.models.tiny import forward, run_config
from tests.training.written import (
    STEP,
    config,
    save_run,
    weights,
    with_outlier,
    write_texts,
    written_by,
)

FLOAT32 = PrecisionConfig(compute="float32")
BFLOAT16 = PrecisionConfig(compute="bfloat16")
FP8 = PrecisionConfig(rules=(PrecisionRule(pattern="*", format="fp8"),))
BYTES = ByteTokenizer()
EDGES = Edges((BYTES.bos_id,), (BYTES.eos_id,))


def text(words):
    return Text(BYTES.encode(words), len(words.encode()))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A config, a frame in float32, its weights, and documents that they would write."""
    folder = tmp_path_factory.mktemp("written")
    cfg = config(folder)
    frame = Frame(cfg.model)
    arrays = weights(frame)
    texts = written_by(frame, arrays)
    source = write_texts(folder / "written.jsonl", texts)
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"source": str(source)})})
    save_run(cfg, arrays)
    return cfg, frame, arrays, [text(t) for t in texts]


def compared(cfg, *, devices=1, **asked):
    return compare(cfg, run_directory(cfg), devices=jax.devices()[:devices], **asked)


@cache
def judge_of(model, formats, chunk):
    """What counts on one device, compiled once for each pair of formats."""
    cfg = run_config(model)
    plan = make_plan(cfg, 1, params=describe(model))
    mesh = build_mesh(plan, devices=jax.devices()[:1])
    frames = tuple(Frame(model, execution=Execution(precision=p)) for p in formats)
    return make_judge(frames, chunk=chunk, mesh=mesh), batch_sharding(frames[0], mesh)


def tallied(cfg, formats, sides, rows, *, chunk=5, size=8):
    """The sums of one device."""
    judge, sharding = judge_of(cfg.model, tuple(formats), chunk)
    return measure(judge, sides, rows, size=size, sharding=sharding)


THREE = ["short", "a document of more than sixteen letters, cut into windows", "middling text"]


def test_the_loss_is_numpys_and_that_of_training(written):
    """On three documents, read one at a time and unpacked; one is cut into windows of 16."""
    cfg, frame, arrays, _ = written
    rows = rows_of([text(t) for t in THREE], BYTES, edges=EDGES, seq_len=16)
    model = frame.bind(*arrays)
    nats, count = 0.0, 0
    for words in THREE:
        ids = np.array([BYTES.bos_id, *words.encode(), BYTES.eos_id])
        for start in range(0, len(ids) - 1, 16):
            inputs, targets = ids[start : start + 16], ids[start + 1 : start + 17]
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(inputs)] = inputs
            logits = np.asarray(forward(model, jnp.asarray(padded)), np.float64)[0, : len(targets)]
            log_z = np.log(np.exp(logits - logits.max()).sum(-1)) + logits.max()
            nats += (log_z - logits[np.arange(len(targets)), targets]).sum()
            count += len(targets)
    tally = tallied(cfg, [FLOAT32], (arrays,), rows)
    assert rows.num_tokens == count == sum(len(t) + 1 for t in THREE)
    assert tally.nats.sum() == pytest.approx(nats, rel=1e-5)

    mesh = build_mesh(make_plan(cfg, 1, params=describe(cfg.model)), devices=jax.devices()[:1])
    state = TrainState(jnp.zeros((), jnp.int32), *arrays, (), jnp.zeros(2, jnp.uint32))
    evaluate = make_evaluate(cfg, frame, mesh=mesh)
    trained = evaluate(state, [batch for batch, _ in rows.batches(8)])
    found = summary(tally, rows, [FLOAT32], step=0, device="cpu")
    assert trained.num_targets == found.num_tokens
    assert found.a.loss == pytest.approx(trained.loss, rel=1e-6)
    assert found.a.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    num_bytes = sum(len(t) for t in THREE)
    assert found.a.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_a_precision_beside_itself_differs_in_nothing(written):
    cfg, _, arrays, texts = written
    rows = rows_of(texts, BYTES, edges=EDGES, seq_len=16)
    tally = tallied(cfg, [FLOAT32] * 2, (arrays, arrays), rows)
    found = summary(tally, rows, [FLOAT32] * 2, step=STEP, device="cpu")
    gap = found.gap
    assert (gap.loss_increase, gap.low, gap.high) == (0, 0, 0)
    assert (gap.agreement, gap.num_flips, gap.mean_kl, gap.max_kl) == (1, 0, 0, 0)
    assert gap.verdict(0.0) == "passed"
    assert found.a == found.b


@pytest.fixture(scope="module")
def near(written):
    """bfloat16 beside float32 on one device."""
    cfg, *_ = written
    return compared(cfg, precision=FLOAT32, versus=BFLOAT16)


def test_bfloat16_is_near_float32_and_not_the_same(written, near):
    *_, texts = written
    found, gap = near, near.gap
    assert (found.step, found.num_bytes) == (STEP, sum(t.num_bytes for t in texts))
    assert found.num_tokens == found.num_bytes + len(texts)
    assert 0 < abs(gap.loss_increase) < 0.05
    assert gap.loss_increase == pytest.approx(found.b.loss - found.a.loss, abs=1e-12)
    assert gap.low < gap.loss_increase < gap.high
    assert 0 < gap.mean_kl < gap.max_kl < 1
    assert gap.agreement > 0.9


@pytest.mark.multidevice
def test_rows_split_over_a_mesh_give_the_same_numbers(written, near):
    cfg, *_ = written
    parallel = cfg.parallel.model_copy(update={"data": 2, "fsdp": 2, "tensor": 2})
    split = cfg.model_copy(update={"parallel": parallel})
    one = near
    many = compared(split, devices=8, precision=FLOAT32, versus=BFLOAT16)
    assert (many.num_tokens, many.num_pieces) == (one.num_tokens, one.num_pieces)
    assert many.a.loss == pytest.approx(one.a.loss, rel=1e-5)
    # bfloat16 sums split over devices are rounded at other places.
    assert many.gap.mean_kl == pytest.approx(one.gap.mean_kl, rel=0.3)


def scaled(arrays):
    """One of the two layers writes half as much again into the residual stream."""
    path = "layers.mixer.out.kernel"
    return Arrays({**arrays.params, path: arrays.params[path].at[1].mul(1.5)}, arrays.buffers)


def test_damage_to_one_layer_is_worse_beyond_doubt(written):
    cfg, _, arrays, texts = written
    rows = rows_of(texts, BYTES, edges=EDGES, seq_len=16)
    gap = gap_of(tallied(cfg, [FLOAT32] * 2, (arrays, scaled(arrays)), rows), rows)
    assert gap.verdict(0.01) == "worse"
    assert gap.low > 0.01
    assert gap.agreement < 0.99


def test_an_outlier_that_float32_never_reads_ruins_fp8_and_only_fp8(written):
    cfg, _, arrays, texts = written
    rows = rows_of(texts, BYTES, edges=EDGES, seq_len=16)

    def gap(versus, *sides):
        return gap_of(tallied(cfg, [FLOAT32, versus], sides, rows), rows)

    spoilt = with_outlier(arrays)
    assert gap(FLOAT32, arrays, spoilt).loss_increase == 0
    assert gap(FP8, arrays, spoilt) == gap(FP8, arrays, spoilt)
    assert gap(BFLOAT16, arrays, spoilt).verdict(0.05) == "passed"
    assert gap(FP8, arrays, arrays).verdict(0.5) == "passed"
    assert gap(FP8, arrays, spoilt).verdict(0.5) == "worse"


@pytest.mark.parametrize("chunk", [4, 0])
def test_chunks_change_nothing_and_hold_fewer_logits(written, chunk):
    cfg, _, arrays, texts = written
    rows = rows_of(texts[:5], BYTES, edges=EDGES, seq_len=16)
    here = tallied(cfg, [FLOAT32], (arrays,), rows, chunk=chunk)
    np.testing.assert_allclose(here.nats, tallied(cfg, [FLOAT32], (arrays,), rows).nats, rtol=1e-6)


def test_no_array_of_all_logits_exists(written):
    cfg, frame, arrays, texts = written
    mesh = build_mesh(make_plan(cfg, 1, params=describe(cfg.model)), devices=jax.devices()[:1])
    rows = rows_of(texts, BYTES, edges=EDGES, seq_len=16)
    batch = next(rows.batches(8))[0]
    program = str(jax.make_jaxpr(make_judge((frame, frame), chunk=5, mesh=mesh))(
        (arrays, arrays), batch
    ))  # fmt: skip
    assert "[8,16,260]" not in program
    assert "[8,5,260]" in program


def test_moves_are_those_of_numpy():
    """Agreement, KL(b || a) and margin of random logits, the last with an id that is padding."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (2, 2, 7, 11))
    logits[1] = logits[0] + rng.normal(0, 0.5, (2, 7, 11))
    logits[..., -1] = -1e30
    log_a, log_b = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logits)
    found = moves_of(*(jax.nn.log_softmax(jnp.asarray(each, jnp.float32)) for each in logits))
    np.testing.assert_array_equal(found.agrees, log_a.argmax(-1) == log_b.argmax(-1))
    assert not np.asarray(found.agrees).all()
    kl = (np.exp(log_b) * (log_b - log_a)).sum(-1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-4)
    top = np.sort(log_a, axis=-1)
    np.testing.assert_allclose(found.margin, top[..., -1] - top[..., -2], rtol=1e-5, atol=1e-6)


def test_flips_are_counted_by_how_near_a_was_to_a_tie():
    rows = rows_of([text("abcde")], BYTES, edges=Edges((), ()), seq_len=16)
    tally = Tally(np.zeros((2, 1)), flip_margins=[np.array([0.001, 0.05]), np.array([0.3, 2.0])])
    gap = gap_of(tally, rows)
    assert [(each.below, each.count) for each in gap.flips_by_margin] == [
        (0.01, 1), (0.1, 2), (0.5, 3),
    ]  # fmt: skip
    assert (gap.num_flips, gap.max_flip_margin, gap.agreement) == (4, 2.0, 0.0)


def test_every_token_but_a_documents_first_is_predicted_once():
    words = ["x", "", "hello", "q" * 40, "zz"]
    for edges in (EDGES, Edges((), ())):
        rows = rows_of([text(w) for w in words], BYTES, edges=edges, seq_len=16)
        pairs = []
        for batch, piece in rows.batches(3):
            assert (batch.loss_mask == (piece >= 0)).all()
            assert (batch.tokens.shape, batch.positions[batch.segment_ids == 0].max(initial=0)) == (
                (3, 16), 0,
            )  # fmt: skip
            found = [rows.documents[piece[piece >= 0]], *(f[piece >= 0] for f in batch[:2])]
            pairs += zip(*(f.tolist() for f in found), strict=True)
        expected = [
            (number, *pair)
            for number, w in enumerate(words)
            for ids in [[*edges.start, *w.encode(), *edges.end]]
            for pair in pairwise(ids)
        ]
        assert sorted(pairs) == sorted(expected)


def test_a_document_of_fewer_than_two_tokens_counts_in_nothing():
    plain = Edges((), ())
    rows = rows_of([text("x"), text("né")], BYTES, edges=plain, seq_len=16)
    assert (rows.num_tokens, rows.documents.tolist()) == (2, [1])
    # The first byte, `n`, is not predicted.
    assert rows.num_bytes == 2
    with pytest.raises(DataError, match="none of the 2 documents has 2 tokens"):
        rows_of([text("x"), text("y")], BYTES, edges=plain, seq_len=16)


def test_text_without_documents_is_refused_and_reading_stops_when_there_is_enough(
    written, tmp_path
):
    cfg, _, _, texts = written
    empty = write_texts(tmp_path / "empty.jsonl", ["", "  "])
    data = cfg.data.model_copy(update={"source": str(empty)})
    with pytest.raises(DataError, match=r"no usable document in .*empty.jsonl: 2 left out"):
        read_texts(data, BYTES)
    assert len(read_texts(cfg.data, BYTES)) == len(texts)
    few = read_texts(cfg.data, BYTES, min_tokens=31)
    assert [t.ids.tolist() for t in few] == [t.ids.tolist() for t in texts[:3]]


def test_the_interval_is_the_closed_forms():
    """Of many units it is 1.96 standard errors on each side; of equal rates it has no width."""
    rng = np.random.default_rng(1)
    counts = np.full(400, 10.0)
    extra = rng.normal(0.5, 2.0, 400) * counts
    low, high = bootstrap(extra, counts)
    per_token = extra / counts
    error = per_token.std(ddof=1) / math.sqrt(400)
    # 2000 samples place an end to about 5 % of the distance.
    assert low == pytest.approx(per_token.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(per_token.mean() + 1.96 * error, abs=0.2 * error)
    assert bootstrap(extra, counts) == (low, high)
    uneven = np.arange(1.0, 31.0)
    assert bootstrap(0.25 * uneven, uneven) == (0.25, 0.25)
    assert bootstrap(np.ones(1), np.ones(1)) == (-math.inf, math.inf)
    assert all(math.isnan(end) for end in bootstrap(np.array([0.0, math.nan]), np.ones(2)))


GAP = Gap(0.0, 0.0, 0.0, "documents", 30, 1.0, 0.0, 0.0, 0, 0.0, ())
VERDICTS = [
    (-0.02, -0.01, "passed"),
    (0.001, 0.01, "passed"),
    (0.005, 0.02, "not shown"),
    (0.011, 0.02, "worse"),
    (-math.inf, math.inf, "not shown"),
    (math.nan, math.nan, "not shown"),
]


@pytest.mark.parametrize(("low", "high", "says"), VERDICTS)
def test_only_an_interval_that_ends_within_the_bound_passes(low, high, says):
    assert replace(GAP, low=low, high=high).verdict(0.01) == says


def test_few_documents_give_an_interval_over_their_pieces(written):
    cfg, _, arrays, texts = written
    long = Text(np.concatenate([t.ids for t in texts[:9]]), 135)
    rows = rows_of([long], BYTES, edges=EDGES, seq_len=16)
    gap = gap_of(tallied(cfg, [FLOAT32, BFLOAT16], (arrays, arrays), rows), rows)
    assert (gap.unit, gap.num_units) == ("pieces", 9)


def test_a_loss_that_is_no_number_never_passes(written):
    cfg, _, arrays, texts = written
    broken = Arrays({**arrays.params, "head.kernel": arrays.params["head.kernel"] * np.nan}, {})
    rows = rows_of(texts, BYTES, edges=EDGES, seq_len=16)
    tally = tallied(cfg, [FLOAT32] * 2, (arrays, broken), rows)
    found = summary(tally, rows, [FLOAT32] * 2, step=0, device="cpu")
    assert math.isnan(found.b.loss)
    assert math.isfinite(found.a.loss)
    assert math.isnan(found.gap.max_kl)
    assert found.gap.verdict(1e9) == "not shown"


def test_a_precision_has_the_name_that_the_command_line_reads():
    rules = (PrecisionRule(pattern="layers.ffn.*", format="fp8"),)
    assert name_of(PrecisionConfig(rules=rules)) == "bfloat16,layers.ffn.*=fp8"
    assert name_of(FLOAT32) == "float32"
