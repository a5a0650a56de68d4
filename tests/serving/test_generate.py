"""Generation from a run: the cache says what the whole row would, and limits are named."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import ConfigError
from jaxfound.models.build import Frame
from jaxfound.resources.checkpoint import CheckpointError
from jaxfound.serving import Sampling, load_generator
from jaxfound.training.run import run_directory
from tests.models.tiny import forward, weights_of
from tests.training.tiny import DENSE, MOE, tiny
from tests.training.written import save_run

GREEDY = Sampling(temperature=0.0)
MODELS = {"dense": DENSE, "moe": MOE}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """The folder of a run with checkpoints of steps 3 and 6."""
    cfg = tiny(tmp_path_factory.mktemp("run"), model=MODELS[request.param])
    return save_run(cfg, weights_of(Frame(cfg.model)), steps=(3, 6))


@pytest.fixture(scope="module")
def generator(saved):
    return load_generator(saved)


def test_greedy_text_is_what_the_whole_row_gives_token_by_token(generator):
    found = list(generator.tokens("d000 d0", max_tokens=12, sampling=GREEDY))
    model = generator.frame.bind(*generator.arrays)
    row = [generator.tokenizer.bos_id, *generator.tokenizer.encode("d000 d0")]
    for token in found:
        # Length 24 for every step: one compiled program, and padding after the end is not seen.
        padded = jnp.asarray([row + [0] * (24 - len(row))])
        assert token == int(np.argmax(forward(model, padded)[0, len(row) - 1]))
        row.append(token)
    assert found


def test_the_same_seed_gives_the_same_text_and_another_seed_another(generator):
    texts = [
        generator.text("d0", max_tokens=16, sampling=Sampling(temperature=1.5, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_an_empty_prompt_is_continued(generator):
    assert len(list(generator.tokens("", max_tokens=3, sampling=GREEDY))) <= 3


@pytest.mark.parametrize("max_tokens", [0, -1, 63])
def test_lengths_beyond_the_model_are_refused_with_the_number_that_fits(generator, max_tokens):
    with pytest.raises(ConfigError, match=r"Use max_tokens up to 61"):
        list(generator.tokens("d0", max_tokens=max_tokens))


def test_the_newest_checkpoint_is_the_default(generator):
    assert generator.step == 6


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run"):
        load_generator(tmp_path)


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    from jaxfound.config import save

    cfg = tiny(tmp_path)
    save(cfg, run_directory(cfg).config)
    with pytest.raises(CheckpointError, match="no committed checkpoint yet"):
        load_generator(run_directory(cfg).path)


def test_an_older_checkpoint_can_be_asked_for(saved):
    assert load_generator(saved, step=3).step == 3
    with pytest.raises(CheckpointError, match=r"no committed step 4 .*\[3, 6\]"):
        load_generator(saved, step=4)
