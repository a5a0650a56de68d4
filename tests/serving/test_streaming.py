"""Text as it is made: pieces, starts of prompts, and ids that no tokenizer has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import ConfigError
from jaxfound.config.model import ModelConfig
from jaxfound.data import ByteTokenizer
from jaxfound.models import Execution
from jaxfound.models.build import Arrays, Frame
from jaxfound.serving import Generator, Sampling

GREEDY = Sampling(temperature=0.0)
ROWS = 300
SIZES = ModelConfig(
    vocab_size=ROWS, embed_dim=2, num_layers=1, num_heads=1, ffn_dim=1, max_positions=256
)


class Script(Frame):
    """A model that answers any prompt with a text, byte by byte, then eos.

    The rows that no id of the byte tokenizer has would win every draw.
    """

    def __init__(self, text, *, prompt_ids):
        self.cfg, self.execution = SIZES, Execution()
        raw = text.encode()
        self.answers = np.full(512, ByteTokenizer.eos_id)
        self.answers[: len(raw)] = list(raw)
        self.first = prompt_ids - 1

    def bind(self, *arrays):
        return self

    def extend(self, tokens, cache, positions):
        wanted = jnp.asarray(self.answers)[jnp.maximum(positions - self.first, 0)]
        beyond = (jnp.arange(ROWS) >= ByteTokenizer.vocab_size)[None, None, :]
        return 50.0 * jax.nn.one_hot(wanted, ROWS) + 1000.0 * beyond, cache


def generator(text, *, prompt_ids=3, start=None):
    frame = Script(text, prompt_ids=prompt_ids)
    return Generator(frame, Arrays({}, {}), ByteTokenizer(), 0, start)


def test_pieces_hold_whole_characters_and_their_sum_is_the_text():
    text = "né 漢🙂!"
    there = generator(text)
    pieces = list(there.stream("ab", max_tokens=40, sampling=GREEDY))
    assert pieces == list(text)
    assert there.text("ab", max_tokens=40, sampling=GREEDY) == text


@pytest.mark.parametrize(("max_tokens", "tail"), [(1, "\ufffd"), (2, "\ufffd"), (3, "漢")])
def test_a_character_cut_by_max_tokens_ends_as_one_mark(max_tokens, tail):
    there = generator("漢")
    assert list(there.stream("ab", max_tokens=max_tokens, sampling=GREEDY)) == [tail]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=50, top_p=0.9),
        Sampling(temperature=100.0, top_p=0.9),
    ],
)
def test_rows_beyond_the_tokenizers_ids_are_never_drawn(sampling):
    there = generator("a" * 100)
    assert max(there.tokens("ab", max_tokens=100, sampling=sampling)) < 259


def test_a_prompt_begins_as_the_weights_want_it():
    ab = [97, 98]
    assert generator("x")._prompt("ab") == [256, *ab]
    assert generator("x", start=())._prompt("ab") == ab
    assert generator("x", start=(1, 2))._prompt("ab") == [1, 2, *ab]
    # Ids are a whole prompt: a chat's start token is already among them.
    assert generator("x")._prompt([5, 6]) == [5, 6]


def test_nothing_to_continue_is_refused():
    with pytest.raises(ConfigError, match="an empty prompt"):
        list(generator("x", start=()).tokens("", max_tokens=1))
