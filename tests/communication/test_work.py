"""FLOPs and bytes of printed operations against products written out."""

import pytest

from jaxfound.communication.program import read_program, type_bytes
from jaxfound.communication.work import Peaks, bytes_of, flops_of, seconds_of

PEAKS = Peaks(flops={"bfloat16": 100.0, "tf32": 50.0, "float32": 10.0}, memory_bps=1000.0)
CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
    "}}}"
)
INSIDE = """
%cuts (big: f32[48,4,8], at: s32[]) -> f32[1,4,8] {
  %big = f32[48,4,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %same = f32[48,4,8]{2,1,0} bitcast(%big)
  ROOT %part = f32[1,4,8]{2,1,0} dynamic-slice(%same, %at, %zero, %zero)
}

%writes (all: f32[48,4,8], new: f32[1,4,8], where: s32[]) -> f32[48,4,8] {
  %all = f32[48,4,8]{2,1,0} parameter(0)
  %new = f32[1,4,8]{2,1,0} parameter(1)
  %where = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %put = f32[48,4,8]{2,1,0} dynamic-update-slice(%all, %new, %where, %nought, %nought)
}

%multiplies (left: bf16[4,8], right: bf16[8,16]) -> f32[4,16] {
  %left = bf16[4,8]{1,0} parameter(0)
  %right = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%left, %right), lhs_contracting_dims={1}
}
"""
ENTRY = """
ENTRY %main (stack: f32[48,4,8]) -> f32[4,16] {
  %stack = f32[48,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %layer = f32[1,4,8]{2,1,0} parameter(2)
  %a = bf16[4,8]{1,0} parameter(3)
  %b = bf16[8,16]{1,0} parameter(4)
  %c = f32[4,8]{1,0} parameter(5)
  %d = f32[8,16]{1,0} parameter(6)
  %q = bf16[2,32,4,8]{3,2,1,0} parameter(7)
  %k = bf16[2,16,1,8]{3,2,1,0} parameter(8)
  %OPERATION
}
"""
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
ATTENTION = "%op = (bf16[2,4,32,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k)"
# 2 x 4 x 16 x 8 of a product; scores and mixing are 2 x (2 x 32 x 4 x 8 x 16) each, five backward.
PRODUCT, SCORES = 2 * 4 * 16 * 8, 2 * 2 * 32 * 4 * 8 * 16
FLOPS = {
    "bfloat16": (f"%op = f32[4,16]{{1,0}} dot(%a, %b), {DIMS}", {"bfloat16": PRODUCT}),
    "float32 by default": (f"%op = f32[4,16]{{1,0}} dot(%c, %d), {DIMS}", {"tf32": PRODUCT}),
    "float32 exactly": (
        f"%op = f32[4,16]{{1,0}} dot(%c, %d), {DIMS}, operand_precision={{highest,highest}}",
        {"float32": PRODUCT},
    ),
    "in a fusion": (
        "%op = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%multiplies",
        {"bfloat16": PRODUCT},
    ),
    "by cuBLAS": (
        f"%op = (f32[4,16]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), {CUBLAS}",
        {"bfloat16": PRODUCT},
    ),
    "attention": (
        f'{ATTENTION}, custom_call_target="__cudnn$fmhaSoftmax"',
        {"bfloat16": 2 * SCORES},
    ),
    "causal attention, backward": (
        f'{ATTENTION}, custom_call_target="__cudnn$fmhaSoftmaxBackward", '
        'backend_config={"mask_type": "PADDING_CAUSAL"}',
        {"bfloat16": 5 * SCORES // 2},
    ),
    "a kernel of unknown arithmetic": (
        '%op = f32[4,16]{1,0} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2"',
        {},
    ),
}


def operation(line):
    program = read_program("HloModule m\n" + INSIDE + ENTRY.replace("%OPERATION", line))
    return program.operation(line.split(" = ")[0].lstrip("%")), program


@pytest.mark.parametrize("name", FLOPS)
def test_the_flops_of_products_are_read_by_format(name):
    line, expected = FLOPS[name]
    assert flops_of(*operation(line)) == expected


ROW = 4 * 8 * 4
# Bytes that are read and written.
BYTES = {
    "arrays": (f"%op = f32[4,16]{{1,0}} dot(%a, %b), {DIMS}", 4 * 8 * 2 + 8 * 16 * 2 + 4 * 16 * 4),
    "a cut from a stack": (
        "%op = f32[1,4,8]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%cuts",
        2 * ROW + 4,
    ),
    "a layer put into a stack": (
        "%op = f32[48,4,8]{2,1,0} fusion(%stack, %layer, %i), kind=kLoop, calls=%writes",
        2 * ROW + 4,
    ),
    "a cut outside of a fusion": (
        "%op = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={1,4,8}",
        2 * ROW,
    ),
    "a layer put in place outside of one": (
        "%op = f32[48,4,8]{2,1,0} dynamic-update-slice(%stack, %layer, %i, %i, %i)",
        2 * ROW,
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_of_an_array_that_is_cut_or_filled_the_part_counts(name):
    line, expected = BYTES[name]
    assert bytes_of(*operation(line)) == expected


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_memory():
    found, program = operation(FLOPS["bfloat16"][0])
    assert seconds_of(found, program, PEAKS) == PRODUCT / 100
    slow_memory = Peaks(PEAKS.flops, memory_bps=1.0)
    assert seconds_of(found, program, slow_memory) == BYTES["arrays"][1]


@pytest.mark.parametrize(
    "line",
    [
        "%op = f32[8,4]{1,0} bitcast(%c)",
        "%op = (f32[4,8]{1,0}) tuple(%c)",
        "%op = f32[4,8]{1,0} copy-done(%c)",
    ],
)
def test_what_moves_nothing_takes_no_time(line):
    assert seconds_of(*operation(line), PEAKS) == 0


@pytest.mark.parametrize(
    ("printed", "num_bytes"),
    [
        ("bf16[32,1,4,7]{3,2,1,0:T(8,128)}", 32 * 4 * 7 * 2),
        ("(f32[], /*index=1*/pred[3]{0}, u32[], token[])", 4 + 3 + 4),
        ("f8e4m3fn[64,2]{1,0}", 128),
        ("s4[64]{0}", 32),
        ("c64[<=5]{0}", 40),
    ],
)
def test_bytes_of_a_type_are_read_from_how_it_is_printed(printed, num_bytes):
    assert type_bytes(printed) == num_bytes


def test_an_element_type_of_unknown_width_is_refused():
    with pytest.raises(ValueError, match="width of the element type 'weird'"):
        type_bytes("weird[4]")


FRAMES = """HloModule m

FileNames
1 "/mine/train.py"
2 "/site/jaxfound/models/layers/mlp.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=19 end_line=19 column=6 end_column=6}
2 {file_name_id=2 function_name_id=1 line=39 end_line=39 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] negate(%x), metadata={op_name="jit(f)/neg" stack_frame_id=2}
  ROOT %z = f32[] negate(%y), metadata={op_name="neg" source_file="/old/way.py" source_line=7}
}
"""


def test_an_operation_knows_its_line_and_who_called_it():
    program = read_program(FRAMES)
    stacks = {op.name: program.stack(op) for op in program.computations["main"]}
    assert stacks == {
        "x": (),
        "y": ("/site/jaxfound/models/layers/mlp.py:39", "/mine/train.py:19"),
        "z": ("/old/way.py:7",),
    }


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        read_program("module @jit_f {}")
