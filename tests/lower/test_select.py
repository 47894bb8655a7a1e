# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernel table: which rule fires, and where none does."""

import pytest

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.backends.cpu.backend import CPU
from nnfront.backends.cuda.backend import CUDA
from nnfront.backends.lowering import lower
from nnfront.ir import OPS, parse
from nnfront.lower import PACK, Program, Run
from nnfront.lower.explain import explain
from nnfront.passes import CUDA_PATTERNS, PATTERNS, run
from nnfront.passes.weight_layouts import LAYOUTS


def chosen(body: str, params: str, result: str) -> list[str]:
    text = f"def main[n, m]({params}) -> {result} {{ {body} return y }}"
    method = lower(parse(text)).methods["main"]
    return [i.kernel for i in method.body.walk() if isinstance(i, Run)]


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "linear_bfloat16"), ("float32", "linear_plain")])
def test_a_product_with_a_transpose_is_linear(dtype, kernel):
    body = f"t: {dtype}[4, m] = permute_dims(w, axes=(1, 0)) y: {dtype}[n, m] = matmul(x, t)"
    params = f"x: input {dtype}[n, 4], w: input {dtype}[m, 4]"
    assert chosen(body, params, f"{dtype}[n, m]") == [kernel]


@pytest.mark.parametrize("role", ["weight", "transformed"])
def test_a_product_with_a_weight_is_linear_with_a_view_of_it(role):
    body = "y: float32[n, 6] = matmul(x, w)"
    assert chosen(body, f"x: input float32[n, 4], w: {role} float32[4, 6]", "float32[n, 6]") == [
        "linear_plain"
    ]


def test_rope_tables_are_made_once_for_all_ropes():
    body = "a: float32[n, m, 2, 8] = rope(q, cos, sin) y: float32[n, m, 2, 8] = rope(a, cos, sin)"
    params = "q: input float32[n, m, 2, 8], cos: input float32[m, 3], sin: input float32[m, 3]"
    assert chosen(body, params, "float32[n, m, 2, 8]") == ["rope_tables", "rope_rotated", "rope_rotated"]
    other = body.replace("rope(a, cos, sin)", "rope(a, cos, sin, interleaved=True)")
    assert chosen(other, params, "float32[n, m, 2, 8]") == ["rope_tables", "rope_rotated"] * 2


def test_every_kernel_is_for_an_op_or_a_fusion():
    emitted = {PACK, "rope_tables", "one_piece", "within"}
    regions = {*(pattern.name for pattern in PATTERNS), *LAYOUTS}
    for kernel in CPU.kernels:
        assert kernel.op in OPS or kernel.op in regions or kernel.name in emitted
        assert kernel.why


@pytest.mark.parametrize("backend", [CPU, CUDA])
def test_a_kernels_name_stands_for_one_function(backend):
    """Programs name kernels: two functions under one name would be one of them for all."""
    found: dict[str, set[object]] = {}
    for kernel in backend.kernels:
        found.setdefault(kernel.name, set()).add((kernel.bind, kernel.workspace))
    assert {name for name, functions in found.items() if len(functions) > 1} == set()


def test_every_region_of_a_target_has_a_kernel():
    for backend, patterns in ((CPU, PATTERNS), (CUDA, CUDA_PATTERNS)):
        ops_of = {kernel.op for kernel in backend.kernels}
        assert {p.name for p in patterns} <= ops_of


GATED = """
    h: {dtype}[n, 6] = {product}
    p: ({dtype}[n, 3], {dtype}[n, 3]) = split(h, indices_or_sections=2, axis=1)
    a: {dtype}[n, 3] = p[0]
    b: {dtype}[n, 3] = p[1]
    c: {dtype}[n, 3] = silu(a)
    y: {dtype}[n, 3] = multiply(c, b)
"""


def gated(product: str, weight: str) -> Program:
    body = GATED.format(dtype="float32", product=product)
    params = f"x: input float32[n, 4], weight: input {weight}"
    return lower(run(parse(f"def main[n]({params}) -> float32[n, 3] {{ {body} return y }}"), "cpu"))


def test_a_region_becomes_one_instruction_where_a_kernel_takes_it():
    (made,) = gated("linear(x, weight)", "float32[6, 4]").methods["main"].body.instructions
    assert (made.op, made.kernel) == ("gated_product", "gated_product")
    assert [i.op for i in made.body.walk()] == ["linear", "split", "silu", "multiply"]


def test_a_region_that_no_kernel_takes_is_what_it_stands_for_and_tells_why():
    program = gated("matmul(x, weight)", "float32[4, 6]")
    runs = program.methods["main"].body.instructions
    assert [run.kernel for run in runs] == ["matmul", "split", "silu", "multiply"]
    assert runs[-1].refused == ("gated_product: it is not a plain linear",)
    assert "not gated_product: it is not a plain linear" in explain(program, {})


QUANTIZED = {
    "int4": ("uint8[8, 32]", "{dtype}[8, 2]", {"group_size": 32, "packed_axis": 1}),
    "int8_groups": ("int8[8, 64]", "{dtype}[8, 2]", {"group_size": 32}),
    "int8": ("int8[8, 64]", "{dtype}[8, 1]", {}),
}


def quantized(
    weight: str, scales: str, attrs: dict, dtype: str, product: str = "", x: str = "[n, 64]"
) -> str:
    """A method that multiplies with a dequantised weight, which is a region."""
    packed, group, axis = "packed_axis" in attrs, attrs.get("group_size"), attrs.get("axis", 1)
    dense = "[8, 64]" if axis else "[64, 8]"
    body = f"q: int8{dense} = unpack_int4(w, axis={attrs['packed_axis']})" if packed else ""
    body += f"d: {dtype}{dense} = dequantize({'q' if packed else 'w'}, s, group_size={group}, axis={axis}, dtype={dtype!r})"
    body = body.replace("'", '"')
    result = f"{product or dtype}[n, {8 if axis else 64}]"
    call = f'linear(x, d, out_dtype="{product}")' if product else "linear(x, d)"
    params = f"x: input {dtype}{x}, w: weight {weight}, s: weight {scales.format(dtype=dtype)}"
    return f"def main[n]({params}) -> {result} {{ {body} y: {result} = {call} return y }}"


def runs_of(text: str) -> list[Run]:
    method = lower(run(parse(text), "cpu")).methods["main"]
    return [i for i in method.body.walk() if isinstance(i, Run)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_product_with_codes_has_the_kernel_of_their_bits_and_groups(name, dtype):
    weight, scales, attrs = QUANTIZED[name]
    found = [
        each.kernel
        for each in runs_of(quantized(weight, scales, attrs, dtype))
        if each.op == "quantized_product"
    ]
    assert found == [f"{name}_product"]


@pytest.mark.parametrize(
    ("weight", "scales", "attrs", "options", "reasons"),
    [
        (
            "uint8[8, 32]",
            "float16[8, 2]",
            {"group_size": 32, "packed_axis": 1},
            {"dtype": "bfloat16"},
            {
                "int4_product: scales are float16, not bfloat16",
                "int8_groups_product: the format is int4, it takes int8 in any groups along the input axis",
            },
        ),
        (
            "int8[8, 64]",
            "float64[8, 2]",
            {"group_size": 32},
            {"dtype": "float64"},
            {
                "int8_groups_product: x is float64",
                "int8_product: the format is int8 in groups of 32, it takes int8",
            },
        ),
        (
            "uint8[4, 64]",
            "float32[8, 2]",
            {"group_size": 32, "packed_axis": 0},
            {"dtype": "float32"},
            {
                "int4_product: the format is int4 packed along axis 0, it takes int4 or uint4 in any groups along the input axis"
            },
        ),
        (
            "int8[64, 8]",
            "float32[8, 8]",
            {"group_size": 8, "axis": 0},
            {"dtype": "float32", "x": "[n, 8]"},
            {
                "int8_groups_product: the format is int8 in groups of 8 with scales along axis 0, it takes int8 in any groups along the input axis"
            },
        ),
        (
            "uint8[8, 32]",
            "bfloat16[8, 2]",
            {"group_size": 32, "packed_axis": 1},
            {"dtype": "bfloat16", "product": "float32"},
            {"int4_product: it is not a plain linear"},
        ),
    ],
)
def test_codes_that_no_kernel_reads_say_why(weight, scales, attrs, options, reasons):
    found = runs_of(quantized(weight, scales, attrs, **options))
    assert not [each for each in found if each.op == "quantized_product"]
    assert reasons <= set(found[-1].refused)


def test_rope_tables_are_made_once_for_regions_and_calls():
    heads = "float32[1, n, 2, 4]"
    text = f"""
        fused def part[n](q: input {heads}, cos: input float32[n, 2], sin: input float32[n, 2]) -> {heads} attrs(region="mine", operands=("q", "cos", "sin")) {{
            y: {heads} = rope(q, cos, sin) return y }}
        def main[n](q: input {heads}, cos: input float32[n, 2], sin: input float32[n, 2]) -> {heads} {{
            a: {heads} = @part(q, cos, sin)
            b: {heads} = @part(a, cos, sin)
            c: {heads} = rope(b, cos, sin)
            return c
        }}
    """
    ir = parse(text)
    ir = ir.with_functions(f.with_(is_outlined=f.kind == "fused") for f in ir.functions)
    runs = lower(ir).methods["main"].body.instructions
    assert [run.kernel for run in runs] == ["rope_tables", "rope_rotated", "rope_rotated", "rope_rotated"]


def test_what_a_rule_made_for_a_call_that_it_then_refuses_is_forgotten():
    heads = "float32[n, m, 2, 4]"
    attention = f"""
        parts: (float32[n, m, 8], float32[n, m, 8], float32[n, m, 8]) = split(qkv, indices_or_sections=(8, 16), axis=2)
        flat_q: float32[n, m, 8] = parts[0]
        flat_k: float32[n, m, 8] = parts[1]
        flat_v: float32[n, m, 8] = parts[2]
        q: {heads} = reshape(flat_q, shape=(n, m, 2, 4))
        k: {heads} = reshape(flat_k, shape=(n, m, 2, 4))
        v: {heads} = reshape(flat_v, shape=(n, m, 2, 4))
        turned_q: {heads} = rope(q, cos, sin)
        turned_k: {heads} = rope(k, cos, sin)
        y: {heads} = attention(turned_q, turned_k, v, softcap=2.0)
    """
    params = "qkv: input float32[n, m, 24], cos: input float32[m, 2], sin: input float32[m, 2]"
    text = f"def main[n, m]({params}) -> {heads} {{ {attention} return y }}"
    method = lower(run(parse(text), "cpu")).methods["main"]
    runs = [i for i in method.body.walk() if isinstance(i, Run)]
    assert "qkv_attention: it has a softcap" in runs[-1].refused
    made = {slot for argument in method.arguments for slot in argument.structure.leaves()}
    for each in runs:
        values = {slot for slot in each.inputs if method.slots[slot].kind == "value"}
        assert values <= made
        made |= set(each.outputs)
