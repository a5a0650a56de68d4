"""The measurement of a run says what it measured."""

from jaxfound.training.measure import measure_training
from tests.training.tiny import tiny


def test_a_measurement_names_its_rounds_and_agrees_with_itself(tmp_path):
    cfg = tiny(tmp_path, "optimizer.warmup_steps=0")
    found = measure_training(cfg, steps=3, rounds=2)
    assert found.tokens_per_step == 8 * 16
    assert len(found.step_alone_s) == len(found.step_in_loop_s) == len(found.outside_shares) == 2
    assert found.tokens_per_s > 0
    assert {"jax", "python"} <= found.versions.keys()
    share = 1 - found.step_alone_s[0] / found.step_in_loop_s[0]
    assert found.outside_shares[0] == share
