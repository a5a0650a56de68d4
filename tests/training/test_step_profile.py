"""The breakdown of a step adds up, and each operation is of the part it was written for."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxfound.communication.program import read_operation, read_program
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.training.step_profile import (
    PARTS,
    Seen,
    breakdown,
    kind_of_work,
    part_of,
    profiled,
)
from tests.models.tiny import model_config

LINE = '  %a = f32[8]{0} add(%b, %c), metadata={op_name="NAME"}'


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(step)/jvp()/while/body/dot_general", "forward"),
        ("jit(step)/transpose(jvp())/while/body/dot_general", "backward"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/mul", "recompute"),
        ("jit(step)/jit(tree_bias_correction)/div", "update"),
    ],
)
def test_the_name_of_an_operation_tells_its_part(name, part):
    assert part_of(read_operation(LINE.replace("NAME", name))) == part


def test_what_the_compiler_added_and_what_waits_for_others_have_parts_of_their_own():
    assert part_of(read_operation("  %c = f32[8]{0} copy(%b)")) == "copies"
    sent = '  %r = f32[8]{0} all-reduce-start(%b), metadata={op_name="jit(step)/transpose(jvp())"}'
    assert part_of(read_operation(sent)) == "collectives"


PROGRAM = """HloModule jit_step

ENTRY %main (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  %f = f32[8]{0} add(%b, %b), metadata={op_name="jit(step)/jvp()/add"}
  %loop = f32[8]{0} while(%f), condition=%main, body=%main
  %g = f32[8]{0} add(%f, %b), metadata={op_name="jit(step)/transpose(jvp())/add"}
  %r = f32[8]{0} all-reduce(%g), replica_groups={}, to_apply=%main
  ROOT %u = f32[8]{0} add(%r, %b), metadata={op_name="jit(step)/add"}
}
"""


def test_parts_add_up_and_only_what_nothing_covers_is_of_the_collectives():
    seen = [
        Seen("loop", 0.0, 9.0),
        Seen("f", 0.0, 1.0),
        Seen("g", 2.0, 4.0),
        # One second beside g, two alone.
        Seen("r", 3.0, 6.0),
        Seen("u", 6.0, 7.0),
        # Half beside u.
        Seen("f", 6.5, 7.5),
    ]
    found = breakdown(seen, read_program(PROGRAM), steps=1, most=2)
    assert found.step_s == 7.5
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    expected = {"forward": 1.75, "idle": 1.0, "backward": 2.0, "collectives": 2.0, "update": 0.75}
    assert {p: s for p, s in found.parts.items() if s} == pytest.approx(expected)
    assert [(o.operation, o.calls) for o in found.operations] == [("r", 1.0), ("f", 2.0)]


def test_a_real_step_is_taken_apart():
    def step(w, x):
        with jax.named_scope("loss"):
            grad = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - 1e-3 * grad, x

    compiled = jax.jit(step).lower(jnp.ones((128, 128)), jnp.ones((256, 128))).compile()
    state = [jnp.ones((128, 128)), jnp.ones((256, 128))]

    def take():
        state[0], _ = compiled(*state)
        return state[0]

    found = profiled(take, read_program(compiled.as_text()), steps=3)
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.parts["forward"] > 0
    assert found.parts["backward"] > 0
    assert found.operations[0].calls == 1.0
    assert found.operations[0].source


def test_rounding_and_routing_are_told_from_the_rest():
    cfg = model_config("mla_moe_yarn", num_layers=2, mtp_depth=0)
    rules = PrecisionConfig(rules=(PrecisionRule(pattern="layers.mixer.*", format="fp8"),))
    frame = Frame(cfg, execution=Execution(precision=rules))
    params, buffers = frame.shapes()
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(params, buffers, ids):
        return frame.bind(params, buffers)(ids).sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, buffers, ids).compile()
    program = read_program(compiled.as_text())
    kinds = Counter(
        kind_of_work(op.name, program) for ops in program.computations.values() for op in ops
    )
    assert kinds["rounding"] > 10
    assert kinds["routing"] > 10
    assert kinds["products"] > 10


def test_a_profile_without_the_program_is_refused():
    with pytest.raises(ValueError, match="saw no operation"):
        breakdown([], read_program(PROGRAM), steps=1, most=1)
