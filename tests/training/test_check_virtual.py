"""What virtual CPU devices cannot run for long is refused before anything is compiled."""

from pathlib import Path

import pytest

from jaxfound.config import load
from jaxfound.training.events import TrainingError
from jaxfound.training.run import check_virtual

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-mla-moe.yaml"
ALL = ["parallel.pipeline=2", "parallel.expert=2", "parallel.tensor=2", "parallel.zero_stage=2"]


def test_stages_that_split_experts_and_tensor_are_refused_on_cpu():
    with pytest.raises(TrainingError, match=r"pipeline=2 x expert=2 x tensor=2 .*tensor=1"):
        check_virtual(load(CONFIG, ALL), platform="cpu")


@pytest.mark.parametrize("one", range(3))
def test_two_of_the_axes_and_other_platforms_are_not(one):
    check_virtual(load(CONFIG, ALL), platform="gpu")
    check_virtual(load(CONFIG, [key for i, key in enumerate(ALL) if i != one]), platform="cpu")
