"""The engine over a runner without a model: order of its steps, ends, failures, `generate`."""

import pytest

from jaxfound.serving import RequestError, Sampling, UnavailableError
from jaxfound.serving.request import Request
from jaxfound.serving.step import RowResult
from tests.serving.fake_runner import EOS, FakeStep, fake_engine, one_by_one, run

ENDLESS = {"max_tokens": 8, "ignore_eos": True}


def request(id="r", prompt=(97, 98), **fields):
    return Request(id, prompt, **(ENDLESS | fields))


def ids(outputs):
    return [token for output in outputs for token in output.tokens]


def ended(outputs):
    return {id: each[-1].finish_reason for id, each in outputs.items()}


def test_a_step_is_begun_before_the_one_before_it_is_read():
    engine, _, runner = fake_engine()
    run(engine, [request(max_tokens=4)])
    # The fourth token ends the request, which is known without reading it: no fifth step.
    assert runner.events == [
        ("dispatch", 0),
        *[("dispatch", 1), ("read", 0), ("dispatch", 2), ("read", 1), ("dispatch", 3)],
        *[("read", 2), ("read", 3)],
    ]


def test_a_token_that_was_computed_after_the_end_is_dropped():
    engine, scheduler, runner = fake_engine()
    endings = (request(prompt=(97, number), ignore_eos=False) for number in range(200))
    first = next(r for r in endings if one_by_one(r) != ([], "stop") and len(one_by_one(r)[0]) < 7)
    outputs = run(engine, [first])["r"]
    assert (ids(outputs), outputs[-1].finish_reason) == one_by_one(first)
    # The step after the end-of-text id was under way.
    assert runner.num_steps == len(ids(outputs)) + 2
    assert scheduler.snapshot().pages_in_use == 0


def test_a_preempted_request_repeats_nothing():
    engine, scheduler, _ = fake_engine(num_pages=8, max_length=32, prefix_cache=False)
    wanted = [request(f"r{i}", (97, 98 + i), max_tokens=28) for i in range(3)]
    outputs = run(engine, wanted)
    assert scheduler.snapshot().num_preempted > 0
    for one in wanted:
        assert ids(outputs[one.id]) == one_by_one(one)[0]
        counts = [output.num_completion_tokens for output in outputs[one.id]]
        assert counts == sorted(set(counts))


def test_a_request_with_a_shared_beginning_tells_how_much_was_cached():
    engine, _, _ = fake_engine()
    prompt = (97,) * 10
    assert run(engine, [request(prompt=prompt)])["r"][-1].num_cached_tokens == 0
    # Two full pages of four; the last token is always computed.
    assert run(engine, [request(prompt=prompt)])["r"][-1].num_cached_tokens == 8


def test_a_cancelled_request_gives_its_pages_back_before_the_next_step():
    engine, scheduler, _ = fake_engine()
    engine.add(request())
    engine.step()
    assert scheduler.snapshot().pages_in_use > 0
    assert engine.cancel("r")
    assert scheduler.snapshot().pages_in_use == 0
    assert not engine.cancel("r")
    (last,) = engine.step()
    assert (last.finish_reason, last.tokens) == ("cancelled", ())
    assert engine.step() == []
    assert not engine.has_work


def test_a_new_request_may_have_the_id_of_one_that_was_just_cancelled():
    engine, _, _ = fake_engine()
    engine.add(request())
    engine.step()
    engine.cancel("r")
    again = request(prompt=(99,))
    outputs = run(engine, [again])["r"]
    assert outputs[0].finish_reason == "cancelled"
    assert ids(outputs) == one_by_one(again)[0]


@pytest.mark.parametrize("place", ["dispatch", "read"])
def test_a_step_that_fails_ends_what_had_begun_and_the_rest_is_served(place):
    engine, scheduler, _ = fake_engine(max_rows=2, fails={3: place})
    wanted = [request(f"r{i}", (97, 98 + i)) for i in range(5)]
    outputs = run(engine, wanted)
    assert [ended(outputs)[f"r{i}"] for i in range(5)] == ["error"] * 2 + ["length"] * 3
    assert "the device fell over" in outputs["r0"][-1].error
    for one in wanted[2:]:
        assert ids(outputs[one.id]) == one_by_one(one)[0]
    assert engine.healthy
    assert scheduler.snapshot().pages_in_use == 0


def test_pages_of_a_failed_step_are_no_prefix_of_later_prompts():
    engine, _, _ = fake_engine(fails={0: "read"})
    prompt = (97,) * 12
    assert ended(run(engine, [request(prompt=prompt)])) == {"r": "error"}
    outputs = run(engine, [request(prompt=prompt)])["r"]
    assert outputs[-1].num_cached_tokens == 0
    assert ids(outputs) == one_by_one(request(prompt=prompt))[0]


def test_an_engine_whose_runner_stays_broken_ends_all_and_takes_no_more():
    engine, _, runner = fake_engine(max_rows=2, fails={3: "read"})
    runner.recovers = False
    outputs = run(engine, [request(f"r{i}") for i in range(4)])
    assert set(ended(outputs).values()) == {"error"}
    assert not engine.healthy
    with pytest.raises(UnavailableError, match="the device is gone"):
        engine.add(request())


def test_a_row_without_a_usable_token_ends_alone(monkeypatch):
    engine, _, runner = fake_engine()
    whole = runner.dispatch

    def spoilt(batch):
        step = whole(batch)
        rows = (*batch.prefill, *batch.decode)
        results = [
            RowResult(error="logits are not finite") if row.sequence.request.id == "bad" else result
            for row, result in zip(rows, step.results, strict=True)
        ]
        return FakeStep(runner, step.number, results, fails=False)

    monkeypatch.setattr(runner, "dispatch", spoilt)
    good = request("good")
    outputs = run(engine, [request("bad"), good])
    assert ended(outputs) == {"bad": "error", "good": "length"}
    assert outputs["bad"][-1].error == "logits are not finite"
    assert ids(outputs["good"]) == one_by_one(good)[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ()}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 63}, "Use max_tokens up to 62"),
        ({"prompt": (97, 259)}, "prompt holds the id 259; ids go from 0 to 258"),
        ({"prompt": (-1,)}, "prompt holds the id -1"),
        ({"sampling": Sampling(logit_bias=((259, 1.0),))}, "logit_bias holds the id 259"),
        ({"stop": ("x", "")}, "stop holds an empty text"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"logprobs": -1}, "from 0 to 20"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(fields, says):
    engine, _, _ = fake_engine(max_length=64)
    with pytest.raises(RequestError, match=says):
        engine.add(request(**fields))
    assert not engine.has_work


def test_an_id_in_use_and_one_too_many_are_refused():
    engine, _, _ = fake_engine(max_rows=2, max_waiting=1)
    for id in ("a", "b", "c"):
        engine.add(request(id))
    with pytest.raises(UnavailableError, match="3 requests run and wait"):
        engine.add(request("d"))
    with pytest.raises(RequestError, match="'a' is the id"):
        engine.add(request("a"))


def test_no_seed_is_another_seed_for_each_request():
    engine, _, _ = fake_engine()
    wanted = [request(f"r{i}", sampling=Sampling(seed=None), max_tokens=40) for i in range(4)]
    found = {tuple(ids(outputs)) for outputs in run(engine, wanted).values()}
    assert len(found) == 4


def test_generate_returns_continuations_in_the_order_of_the_prompts():
    engine, scheduler, _ = fake_engine(max_waiting=1)
    prompts = ["ab", "b", [97, 97], "c" * 9] * 5
    found = engine.generate(prompts, max_tokens=9, sampling=Sampling(seed=7), stop=["ca"])
    for prompt, one in zip(prompts, found, strict=True):
        given = (256, *prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        alone = Request("x", given, 9, Sampling(seed=7), stop=("ca",))
        outputs = run(fake_engine()[0], [alone])["x"]
        assert one.tokens == tuple(ids(outputs))
        assert one.text == "".join(output.text for output in outputs)
        assert one.finish_reason == outputs[-1].finish_reason
        assert one.num_prompt_tokens == len(given)
    assert scheduler.snapshot().pages_in_use == 0


def test_generate_keeps_the_news_of_other_requests():
    engine, _, _ = fake_engine()
    other = request("other")
    engine.add(other)
    engine.generate(["a"], max_tokens=3)
    assert ids(run(engine)["other"]) == one_by_one(other)[0]


def test_generate_takes_a_sampling_for_each_prompt():
    engine, _, _ = fake_engine()
    how = [Sampling(seed=seed) for seed in (1, 2, 1)]
    first, second, third = engine.generate(["a"] * 3, max_tokens=20, sampling=how)
    assert first.tokens == third.tokens != second.tokens
    with pytest.raises(ValueError, match="shorter"):
        engine.generate(["a", "b"], max_tokens=3, sampling=how[:1])


def test_generate_refuses_before_it_begins():
    engine, _, runner = fake_engine(max_length=16)
    with pytest.raises(RequestError, match="give a list"):
        engine.generate("ab", max_tokens=3)
    with pytest.raises(RequestError, match="Use a prompt of at most 15 tokens"):
        engine.generate(["a", "b" * 20], max_tokens=3)
    assert runner.num_steps == 0


def test_generate_says_when_the_runner_fails_and_leaves_nothing_behind():
    engine, scheduler, _ = fake_engine(fails={2: "read"})
    with pytest.raises(UnavailableError, match="the device fell over"):
        engine.generate(["a"], max_tokens=9, ignore_eos=True)
    assert not engine.has_work
    assert len(engine.generate(["a"], max_tokens=9, ignore_eos=True)[0].tokens) == 9
    assert scheduler.snapshot().pages_in_use == 0


def test_an_end_of_text_id_is_not_among_the_ids():
    engine, _, _ = fake_engine()
    for number in range(60):
        (found,) = engine.generate([[97, number]], max_tokens=20)
        assert EOS not in found.tokens
        assert found.finish_reason == one_by_one(Request("x", (97, number), 20))[1]
