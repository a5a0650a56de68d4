"""The arithmetic of `jaxfound serve --plan`, by hand: DeepSeek-V2-Lite and SmolLM2 on an H200."""

import dataclasses
import json

import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.presets import PRESETS
from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.serving.admission import most_cached
from jaxfound.serving.capacity import Load, capacity_lines, plan_capacity
from jaxfound.serving.page_pool import PagePool
from jaxfound.serving.request import Request
from pallas_kernels.hardware import find

H200 = find("h200")
LOAD = Load(requests=2000, prompt_tokens=1024, new_tokens=256)


def model(preset: str) -> ModelConfig:
    return ModelConfig.model_validate_json(json.dumps(PRESETS[preset]))


@pytest.fixture(scope="module")
def lite():
    serve = ServeConfig(max_length=4096)
    return plan_capacity(model("deepseek-v2-lite"), serve, hardware=H200, load=LOAD)


def test_pages_of_deepseek_v2_lite_on_an_h200(lite):
    assert lite.usable_bytes == 135_679_338_086  # 0.9 x 150,754,820,096
    # 15,706,484,224 parameters of 2 bytes, of which routers and norms have 4 as 26 x 64 biases do.
    routers, norms = 26 * 2048 * 64, 27 * (2 * 2048 + 512) + 2048
    weights = 31_412_968_448 + 2 * (routers + norms) + 6_656
    assert lite.weight_bytes == weights == 31_420_043_776
    assert lite.page_bytes == 64 * 27 * (512 + 64) * 2 == 1_990_656
    assert lite.num_pages == (135_679_338_086 - weights) // 1_990_656 == 52_374
    assert lite.num_tokens == 3_351_936


def test_pages_against_rows_and_latents_against_heads(lite):
    # A request caches 1,024 + 256 - 1 tokens: 20 pages. A token of 16 heads leaves keys of 192 and
    # values of 128: 27 x 16 x 320 x 2 bytes.
    found = [
        (x.kept, x.is_paged, x.bytes_a_token, x.slots_a_request, x.concurrent, x.cards)
        for x in lite.layouts
    ]
    every_head = "keys and values of every head"
    assert found == [
        ("latent", True, 31_104, 1_280, 52_374 // 20, 1),
        ("latent", False, 31_104, 4_096, 3_351_958 // 4_096, 3),
        (every_head, True, 276_480, 1_280, 5_891 // 20, 7),
        (every_head, False, 276_480, 4_096, 377_095 // 4_096, 22),
    ]
    assert [x.concurrent for x in lite.layouts] == [2_618, 818, 294, 92]


def test_pages_of_smollm2_on_an_h200():
    found = plan_capacity(model("smollm2-135m"), ServeConfig(), hardware=H200, load=LOAD)
    norms = 30 * 2 * 576 + 576
    assert found.weight_bytes == 2 * (134_515_008 + norms) == 269_100_288
    assert found.page_bytes == 64 * 30 * 2 * 3 * 64 * 2 == 1_474_560
    assert found.num_pages == (135_679_338_086 - 269_100_288) // 1_474_560 == 91_830
    assert found.max_length == 8_192
    # 91,830 pages of 20 each, and 5,877,183 tokens in rows of 8,192.
    assert [(x.kept, x.concurrent) for x in found.layouts] == [
        ("keys and values", 4_591),
        ("keys and values", 717),
    ]


def test_an_eight_bit_latent_takes_656_bytes_a_layer():
    serve = ServeConfig(max_length=4096, cache_format="fp8")
    found = plan_capacity(model("deepseek-v2-lite"), serve, hardware=H200, load=LOAD)
    assert found.page_bytes == 64 * 27 * 656
    assert [x.kept for x in found.layouts][::2] == [
        "latent in 8 bits",
        "keys and values of every head",
    ]


@pytest.mark.parametrize("preset", ["smollm2-135m", "tiny-mla-moe"])
def test_an_eight_bit_cache_of_another_model_is_refused(preset):
    serve = ServeConfig(cache_format="fp8")
    load = Load(prompt_tokens=8, new_tokens=8)
    with pytest.raises(ConfigError, match="cache_format=fp8 packs"):
        plan_capacity(model(preset), serve, hardware=H200, load=load)


def test_cards_that_share_weights_cut_heads_and_hold_latents_whole():
    serve = ServeConfig(max_length=4096)
    found = plan_capacity(model("deepseek-v3"), serve, hardware=H200, load=Load(64))
    # 671,026,404,352 parameters of 2 bytes, of which routers and norms have 4 as 58 x 256 biases
    # do: 8 cards have 1,085 GB to use, 16 have 2,171.
    routers, norms = 58 * 7168 * 256, 61 * (2 * 7168 + 1536 + 512) + 7168
    weights = 1_342_052_808_704 + 2 * (routers + norms) + 59_392
    assert found.weight_bytes == weights
    assert found.cache_bytes == found.usable_bytes - weights // 16 == 51_787_604_198
    # A latent of 61 x 576 x 2 bytes is on each card; of 128 heads of 320 channels each has 8.
    assert found.page_bytes == 64 * 70_272
    assert found.num_pages == 51_787_604_198 // (64 * 70_272) == 11_514
    assert [(x.cards_a_copy, x.concurrent, x.cards) for x in found.layouts] == [
        (16, 11_514 // 20, 16),
        (16, 51_787_604_198 // 70_272 // 4_096, 16),
        (16, 51_787_604_198 // (64 * 61 * 8 * 320 * 2) // 20, 16),
        (16, 51_787_604_198 // (61 * 8 * 320 * 2) // 4_096, 32),
    ]
    assert [x.concurrent for x in found.layouts] == [575, 179, 129, 40]
    assert next(iter(capacity_lines(found))).startswith("16 x NVIDIA H200: 150.8 GB each")


def test_in_float32_matrices_and_pages_take_twice_the_bytes():
    serve, load, cpu = ServeConfig(), Load(8, 64, 64), find("cpu")
    half, full = (
        plan_capacity(model("smollm2-135m"), serve, hardware=cpu, load=load, precision=precision)
        for precision in (PrecisionConfig(), PrecisionConfig(compute="float32"))
    )
    norms = 30 * 2 * 576 + 576
    assert full.weight_bytes - 4 * norms == 2 * (half.weight_bytes - 4 * norms)
    assert full.page_bytes == 2 * half.page_bytes


def in_8_bits(preset: str, format: str, *, pattern: str = "layers.*"):
    rules = (PrecisionRule(pattern=pattern, format=format),)
    serve, precision = ServeConfig(max_length=4096), PrecisionConfig(rules=rules)
    return plan_capacity(model(preset), serve, hardware=H200, load=LOAD, precision=precision)


def test_weights_in_8_bits_leave_more_pages(lite):
    # Of each of 26 layers: experts, shared ones among them; latent down, queries, output. Each
    # square of 128 x 128 has a scale of 4 bytes; the 64 rows of a rotated key are padded to one.
    experts, blocks = 66 * 3 * 2048 * 1408, 66 * 3 * 16 * 11
    mixer = 2048 * 512 + 2048 * 16 * 192 + 2048 * 2048
    more = 16 * (4 + 1) + 16 * 24 + 16 * 16
    saved = 26 * (experts + mixer - 4 * (blocks + more))
    found = in_8_bits("deepseek-v2-lite", "fp8_weights")
    assert found.weight_bytes == lite.weight_bytes - saved
    assert found.num_pages > lite.num_pages
    assert in_8_bits("deepseek-v2-lite", "fp8").weight_bytes == found.weight_bytes


def test_several_cards_keep_no_weights_in_8_bits():
    serve, load = ServeConfig(max_length=4096), Load(64)
    plain = plan_capacity(model("deepseek-v3"), serve, hardware=H200, load=load)
    assert plain.layouts[0].cards_a_copy == 16
    assert in_8_bits("deepseek-v3", "fp8_weights").weight_bytes == plain.weight_bytes


def test_a_rule_for_nothing_is_refused():
    with pytest.raises(ConfigError, match="matches no operation"):
        in_8_bits("smollm2-135m", "fp8_weights", pattern="layers.ffn.experts")


def test_modules_that_draft_have_weights_and_a_cache_of_their_own():
    def planned(draft_tokens: int):
        serve = ServeConfig(max_length=1024, draft_tokens=draft_tokens)
        load = Load(prompt_tokens=8, new_tokens=8)
        return plan_capacity(model("tiny-mla-moe"), serve, hardware=H200, load=load)

    plain, drafting = planned(0), planned(1)
    assert (plain.page_bytes, drafting.page_bytes) == (64 * 4 * 40 * 2, 64 * 5 * 40 * 2)
    assert drafting.weight_bytes > plain.weight_bytes


def test_pages_that_are_given_are_what_there_is():
    serve = ServeConfig(max_length=4096, num_pages=40)
    found = plan_capacity(model("deepseek-v2-lite"), serve, hardware=H200, load=LOAD)
    assert found.num_pages == 40
    assert [(x.concurrent, x.cards) for x in found.layouts] == [(2, 1000), (0, 0), (0, 0), (0, 0)]
    assert "none is enough" in list(capacity_lines(found))[-2]


def test_the_plan_and_the_scheduler_count_alike(lite):
    request = Request("a", tuple(range(LOAD.prompt_tokens)), LOAD.new_tokens)
    pool = PagePool(lite.num_pages, page_size=lite.page_size)
    taken = pool.pages_for(most_cached(request)) * lite.page_size
    assert taken == lite.layouts[0].slots_a_request


def test_a_model_that_no_number_of_cards_holds_is_refused():
    small = dataclasses.replace(H200, memory_bytes=10**6)
    with pytest.raises(ConfigError, match=r"weights of 31.4 GB .* do not fit on 1024 cards"):
        plan_capacity(model("deepseek-v2-lite"), ServeConfig(), hardware=small, load=LOAD)


REFUSED = [
    ({"load": Load(1, 4000, 97)}, "4000 . 97 tokens is longer than the longest .* 4096"),
    ({"hardware": find("abacus")}, "the memory of 'abacus' is not known"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_cannot_be_planned_is_refused(change, text):
    given = {"hardware": H200, "load": LOAD} | change
    with pytest.raises(ConfigError, match=text):
        plan_capacity(model("deepseek-v2-lite"), ServeConfig(max_length=4096), **given)


def test_a_load_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1 request"):
        Load(requests=0)


def test_the_plan_in_lines(lite):
    assert list(capacity_lines(lite)) == [
        "NVIDIA H200: 150.8 GB each, 135.7 GB of it for weights and pages",
        "weights: 31.4 GB",
        "cache: 104.3 GB a card = 52,374 pages of 64 tokens (1,990,656 bytes) = 3,351,936 tokens",
        "load: 2,000 requests at once, each of 1,024 prompt and 256 new tokens; "
        "a reserved row holds 4,096",
        "  kept of a token                room      bytes a token  slots a request  at once  cards",
        "  latent                         pages            31,104            1,280    2,618      1",
        "  latent                         reserved         31,104            4,096      818      3",
        "  keys and values of every head  pages           276,480            1,280      294      7",
        "  keys and values of every head  reserved        276,480            4,096       92     22",
        "serve.max_rows=32 lets an engine run 32 at once; the pages would hold 2,000 of this load",
    ]
