"""The decoding step as it is compiled for an H200 that need not be there: what it moves."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.presets import PRESETS
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.models.pages import page_shapes
from jaxfound.models.served import serving_arrays
from jaxfound.parallelism.axes import TABLE_RULES
from jaxfound.serving.compiled import Lowering, Place
from jaxfound.serving.programs import ModelPrograms
from pallas_kernels import deviceless, hardware

H200 = "NVIDIA H200"
ROWS, PAGE, WIDTH = 64, 64, 256
NUM_PAGES = ROWS * WIDTH
# Operations that write their result anew.
MOVES = r"copy|copy-start|gather|dynamic-slice|concatenate|transpose|slice"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing())),
    pytest.mark.usefixtures("optimized"),
]


# How latents are cached, and whether weights are kept in 8 bits.
FORMS = {
    "bfloat16": ("compute", False),
    "latents in 8 bits": ("fp8", False),
    "weights in 8 bits": ("compute", True),
}


@pytest.fixture(scope="module", params=FORMS.values(), ids=list(FORMS))
def form(request):
    return request.param


@pytest.fixture(scope="module")
def lowering(form):
    """DeepSeek-V2-Lite with a dense layer and two of experts, 64 requests of 16 K tokens."""
    cache_format, in_8_bits = form
    values = {**PRESETS["deepseek-v2-lite"], "num_layers": 3, "max_positions": WIDTH * PAGE}
    cfg = ModelConfig.model_validate(values, strict=False)
    rules = (PrecisionRule(pattern="*", format="fp8_weights"),) if in_8_bits else ()
    policy = PrecisionConfig(compute="bfloat16", rules=rules)
    frame = Frame(cfg, execution=Execution(precision=policy))
    device = deviceless.topology(H200)[0]
    place = Place(TABLE_RULES, None, device)
    arrays = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place.whole),
        jax.eval_shape(partial(serving_arrays, frame), frame.shapes()),
    )
    pages = page_shapes(
        cfg,
        num_pages=NUM_PAGES,
        page_size=PAGE,
        dtype=jnp.bfloat16,
        cache_format=cache_format,
    )
    model = ModelPrograms(frame, PAGE, NUM_PAGES, max_rows=ROWS, num_ids=cfg.vocab_size)
    return Lowering.of(model, arrays, pages=pages, place=place)


def test_a_decoding_step_copies_neither_pages_nor_weights(lowering, form):
    with hardware.target(H200), deviceless.without_cache():
        program = lowering.decode(ROWS, WIDTH).compile()
    memory = program.memory_analysis()
    pool = sum(s.size * s.dtype.itemsize for s in lowering.pages)
    assert memory.alias_size_in_bytes == pool
    # The parts of the attention before they are joined, and the activations of all experts.
    assert memory.temp_size_in_bytes < 100e6
    text = program.as_text()
    assert "mpmd_map" in text
    # Each layer's four of attention, and three of the dense feed-forward or of the shared
    # experts; of two layers the routed experts too.
    expected = 3 * (4 + 3) + 2 * 3 if form[1] else 0
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == expected
    smallest = 512 * 16 * 128  # elements of the smallest up-projection
    moved = re.findall(rf"= (\w+)\[([\d,]+)\]\S* (?:{MOVES})\(", text[text.index("ENTRY") :])
    large = [shape for shape in moved if elements(shape) >= smallest]
    assert large == []


def elements(shape):
    size = 1
    for dim in shape[1].split(","):
        size *= int(dim)
    return size


@pytest.mark.parametrize("form", [FORMS["weights in 8 bits"]], indirect=True, ids=["8 bits"])
def test_a_prompt_s_step_widens_no_expert_before_it_multiplies(lowering):
    with hardware.target(H200), deviceless.without_cache():
        program = lowering.prefill(1, 512, width=WIDTH, num_logits=1).compile()
    text = program.as_text()
    # Of the two layers with experts three products each; linear operations have too many rows.
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 2 * 3
    one_expert_layer = 3 * 64 * 2048 * 1408
    assert program.memory_analysis().temp_size_in_bytes < one_expert_layer
