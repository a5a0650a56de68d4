"""A small model behind an engine and behind a generator, and mixed requests for both."""

import numpy as np

from jaxfound.config.serve import ServeConfig
from jaxfound.data import ByteTokenizer
from jaxfound.models.build import Frame
from jaxfound.serving import Generator, Sampling
from jaxfound.serving.engine import Engine
from jaxfound.serving.request import Request
from jaxfound.serving.runner import Runner
from jaxfound.serving.scheduler import Scheduler
from tests.models.tiny import model_config, weights_of

# Of every model of tests.models.tiny: 61 ids, in tables of 64 rows.
NUM_IDS = 61
# What a generator compiles one size of cache for.
MAX_LENGTH = 64
# The most that schedulers over one runner ask for.
LARGEST = ServeConfig(
    page_size=8, num_pages=300, max_rows=8, max_length=MAX_LENGTH, token_budget=64, prefill_rows=4
)
WIDE = LARGEST.model_copy(update={"max_rows": 32, "token_budget": 128})
GREEDY = Sampling(temperature=0.0)


class LetterTokenizer(ByteTokenizer):
    """Ids 0 … 57 are letters; then bos, eos and pad."""

    vocab_size, bos_id, eos_id, pad_id = NUM_IDS, 58, 59, 60

    def encode(self, text):
        return np.array([ord(letter) - 64 for letter in text], np.int32)

    def decode(self, ids):
        return "".join(chr(64 + token) for token in ids if token < 58)


def tiny_generator(name="mla_moe_yarn"):
    frame = Frame(model_config(name))
    return Generator(frame, weights_of(frame), LetterTokenizer(), 0)


def tiny_runner(generator, cfg=LARGEST):
    return Runner(generator.frame, generator.arrays, cfg, num_ids=NUM_IDS)


def tiny_engine(runner, *, num_pages=LARGEST.num_pages, tokenizer=None, **sizes):
    """An engine over a runner that may have more pages and rows than its scheduler uses."""
    runner.reset()
    cfg = runner.cfg.model_copy(update=sizes)
    scheduler = Scheduler(cfg, num_pages=num_pages, max_length=MAX_LENGTH)
    return Engine(runner, scheduler, tokenizer or LetterTokenizer(), start=(58,)), scheduler


def mixed_requests(num, *, seed=0):
    """Greedy requests and some that draw; of all lengths, some with beginnings they share."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 58, size).tolist() for size in (8, 17, 24)]
    found = []
    for i in range(num):
        beginning = shared[i % 7] if i % 7 < len(shared) else []
        prompt = [*beginning, *rng.integers(0, 58, rng.integers(1, 20)).tolist()]
        room = MAX_LENGTH - len(prompt)
        longest = int(rng.integers(1, 48)) if i % 5 else 1
        how = GREEDY if i % 3 else Sampling(temperature=1.0, top_p=0.9, seed=i)
        if i % 9 == 0:
            how = Sampling(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2, seed=i)
        found.append(Request(f"r{i}", tuple(prompt), min(longest, room), how))
    return found


def one_by_one(generator, requests):
    """The ids that each request gets alone."""
    return {
        request.id: list(
            generator.tokens(
                request.prompt, max_tokens=request.max_tokens, sampling=request.sampling
            )
        )
        for request in requests
    }


def drive(engine, requests, *, concurrency, cancels=0, seed=0):
    """Keep `concurrency` requests open; cancel a share of them, at any moment.

    Returns:
        Outputs by id, and the ids that were cancelled.
    """
    rng = np.random.default_rng(seed)
    waiting, outputs, cancelled = list(reversed(requests)), {}, set()
    num_open = 0
    while waiting or engine.has_work:
        while waiting and num_open < concurrency:
            engine.add(waiting.pop())
            num_open += 1
        if rng.random() < cancels:
            id = requests[rng.integers(0, len(requests))].id
            if engine.cancel(id):
                cancelled.add(id)
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
            num_open -= output.finish_reason is not None
    return outputs, cancelled
