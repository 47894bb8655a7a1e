# SPDX-License-Identifier: Apache-2.0
"""What the parser accepts, how it says what it does not, and that no text makes it crash or hang."""

from __future__ import annotations

import random

import pytest

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.errors import ParseError
from nnfront.ir import (
    OPS,
    Call,
    Constant,
    Function,
    If,
    MatchShape,
    Projection,
    Provenance,
    Scalar,
    TensorType,
    Tuple,
    parse,
    parse_function,
)

TEXT = """\
def f[n, seq: 1..64 % 16](
    x: input float32[n, 4],
    flag: input bool[],
    w.0: weight float32[4, 4],
) -> float32[n, 4] {
    y: float32[n, 4] = matmul(x, w.0)
    z: float32[n, 4] = if flag {
        half: float32[n, 4] = multiply(y, 0.5)
        yield half
    } else {
        yield y
    }
    return z
}"""


def value(text: str, params: str = "x: input float32[2]", dims: str = "") -> object:
    """The value of a binding."""
    return (
        parse_function(f"def f{dims}({params}) -> int64(0) {{ v: int64 = {text} return 0 }}")
        .bindings[0]
        .value
    )


def test_function_has_what_the_text_says() -> None:
    function = parse_function(TEXT)
    x, flag, w = function.params
    assert [(p.name, p.role) for p in function.params] == [
        ("x", "input"),
        ("flag", "input"),
        ("w.0", "weight"),
    ]
    first, second = function.bindings
    assert isinstance(first.value, Call)
    assert first.value.op is OPS["matmul"]
    assert first.value.args == (x, w)
    assert isinstance(second.value, If)
    assert second.value.condition is flag
    assert second.value.otherwise.result is first.var
    assert function.result is second.var


def test_equal_types_are_one_object() -> None:
    function = parse_function(TEXT)
    assert function.bindings[0].var.type is function.params[0].type


def test_facts_of_a_dim_are_those_of_the_header() -> None:
    function = parse_function("def f[a: 1..64 % 16, b: .. , c: ..8, d: 2.., e: % 4]"
                              "(x: input shape[a, b, c, d, e]) -> shape[a, b, c, d, e] { return x }")  # fmt: skip
    assert [symbol.facts for symbol in function.symbols] == [
        (1, 64, 16),
        (0, None, 1),
        (0, 8, 1),
        (2, None, 1),
        (0, None, 4),
    ]


def test_fresh_dims_are_new_ones_each_time() -> None:
    text = "def f[fresh n](x: input float32[n]) -> float32[n] { return x }"
    (a,), (b,) = parse_function(text).symbols, parse_function(text).symbols
    assert a != b
    assert a.name == b.name


def test_narrowed_type_stays_as_it_is_written() -> None:
    function = parse_function(
        "def f[n](x: input float32[n]) -> float32[16] { y: float32[16] = relu(x) return y }"
    )
    assert function.result_type == TensorType((16,), "float32")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("True", True),
        ("1", 1),
        ("-1", -1),
        ("1.0", 1.0),
        ("1e5", 1e5),
        ("-2.5E-3", -2.5e-3),
        ("-inf", float("-inf")),
    ],
)
def test_number(text: str, expected: object) -> None:
    scalar = value(text)
    assert isinstance(scalar, Scalar)
    assert (type(scalar.value), scalar.value) == (type(expected), expected)


def test_minus_zero_and_nan() -> None:
    assert str(value("-0.0").value) == "-0.0"  # type: ignore[attr-defined]
    assert str(value("nan").value) == "nan"  # type: ignore[attr-defined]


def test_tuples_fields_and_shapes() -> None:
    assert isinstance(value("(x,)"), Tuple)
    assert value("{a: x, b: 1}").names == ("a", "b")  # type: ignore[attr-defined]
    assert value("()").names is None  # type: ignore[attr-defined]
    assert value("{}").names == ()  # type: ignore[attr-defined]
    assert isinstance(value("x[1]"), Projection)
    assert isinstance(value("match_shape(x, float32[2])"), MatchShape)


def test_word_that_looks_like_a_call_is_a_variable_elsewhere() -> None:
    names = "const: input int64, dim: input int64, match_shape: input int64"
    assert value("(const, dim, match_shape)", names).fields[1].name == "dim"  # type: ignore[attr-defined]


def test_constant_of_a_list_and_of_bytes_are_the_same() -> None:
    a, b = value("const(float32[2], [1, -0.5])"), value('const(float32[2], "AACAPwAAAL8=")')
    assert isinstance(a, Constant)
    assert isinstance(b, Constant)
    assert a.data == b.data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(n, 2*n)", "(n, 2*n)"),
        ("(n + 1) // 3", "(n + 1) // 3"),
        ("((n + 1) // 3, -n)", "((n + 1) // 3, -n)"),
        ("-1", "-1"),
        ("1 + n", "n + 1"),
        ("-1 + n", "n - 1"),
        ("((1, 2), ())", "((1, 2), ())"),
        ("(1,)", "(1,)"),
        ("type(float32[n])", "type(float32[n])"),
        ("dim(n)", "n"),
        ("{a: 1, b: None}", "{a: 1, b: None}"),
        ("min(n, 3)", "min(n, 3)"),
    ],
)
def test_attribute(text: str, expected: str) -> None:
    function = parse_function(f"def f[n](x: input float32[n]) -> float32[n] attrs(a={text}) {{ return x }}")
    assert f"attrs(a={expected})" in str(function)


def test_comments_are_skipped_and_provenance_is_kept() -> None:
    function = parse_function("""
        # a comment
        def f() -> int64(1) {  # at the.header, which has none
            a: int64(1) = 1  # at model.layers.0.mlp (llama.py:41)
            b: int64(1) = 1  # at llama.py
            c: int64(1) = 1  # at this point we are done
            d: int64(1) = if True {  # at model.cond (a b.py:7)
                yield 1  # the end
            } else { yield 1 }
            # at nothing
            return 1
        }
    """)
    assert [binding.provenance for binding in function.bindings] == [
        Provenance("model.layers.0.mlp", "llama.py", 41),
        Provenance("llama.py"),
        None,
        Provenance("model.cond", "a b.py", 7),
    ]


def test_variables_of_branches_may_have_the_names_of_later_ones_no_more() -> None:
    with pytest.raises(ParseError, match=r"'half' is bound already, in line 8"):
        parse(TEXT.replace("return z", "half: float32[n, 4] = relu(z) return z"))


def problem(text: str) -> list[str]:
    """The lines of the error about a text."""
    with pytest.raises(ParseError) as raised:
        parse(text)
    return str(raised.value).split("\n")


@pytest.mark.parametrize(
    ("old", "new", "what", "help"),
    [
        ("matmul(", "matmull(", "line 6, column 24: there is no op 'matmull'", "did you mean 'matmul'?"),
        ("matmul(", "zzz(", "line 6, column 24: there is no op 'zzz'", "import the module that declares it"),
        ("if flag", "if flagg", "line 7, column 27: there is no variable 'flagg'", "did you mean 'flag'?"),
        ("return z", "return half", "line 13, column 12: there is no variable 'half' here: it is bound in another branch", None),
        ("y: float32[n, 4]", "y: float32[m, 4]", "line 6, column 16: the header declares no dim 'm'", None),
        ("y: float32[n, 4]", "y: float32[2*m, 4]", "line 6, column 16: the header declares no dim 'm'", None),
        ("y: float32", "y: flaot32", "line 6, column 8: there is no dtype 'flaot32'", "did you mean 'float32'?"),
        ("x: input", "x: inputs", "line 2, column 8: expected the role of 'x': input, weight, transformed or state, but got 'inputs'", None),
        ("y: float32[n, 4] =", "y: float32[n, 4]", "line 6, column 22: expected '=', but got 'matmul'", None),
        ("yield half", "return half", "line 9, column 9: expected a binding or 'yield', but got 'return'", None),
        ("return z\n}", "return z", "line 13, column 13: expected '}', but the text ends", None),
        ("multiply(y, 0.5)", "multiply(y 0.5)", "line 8, column 42: expected ',' or ')', but got '0.5'", None),
        ("multiply(y, 0.5)", "multiply(y, axis=0, 0.5)", "line 8, column 51: expected an attribute: operands come first, but got '0.5'", None),
        ("multiply(y, 0.5)", "(y)", "line 8, column 33: expected ',': a tuple of one field is written with a comma, as (x,), but got ')'", None),
        ("z: float32[n, 4] = if", "y: float32[n, 4] = if", "line 7, column 5: 'y' is bound already, in line 6", None),
        ("-> float32[n, 4]", "-> float32[4, n]", "line 13, column 12: the header of 'f' says that it returns float32[4, n], but this is float32[n, 4]", None),
        ("[n, seq", "[n, n", "line 1, column 10: there is a dim 'n' already", None),
        ("1..64 %", "64..1 %", "line 1, column 10: dim 'seq': max is 1, which is less than min, 64", None),
        ("1..64 %", "1 %", "line 1, column 17: expected '..' after the least value of a dim, but got '%'", None),
        ("def f", "function f", "line 1, column 1: expected a function: 'def' or its kind, but got 'function'", None),
        ("0.5", "$", "line 8, column 43: '$' does not belong into IR text", None),
        ("0.5", '"a\\q"', "line 8, column 43: this string has a bad escape", 'escapes are those of JSON: \\n, \\", \\\\, \\u00e9'),
        ("[n, seq", "[n, 2", "line 1, column 10: expected the name of a dim, but got '2'", None),
        ("y: float32[n, 4]", "y: float32[n*, 4]", "line 6, column 16: cannot read the dim 'n*'", "expected a number, a name or '(', but the text ends"),
        ("y: float32[n, 4]", "y: float32[n // 0, 4]", "line 6, column 16: division by zero in a dim expression", None),
        ("y: float32[n, 4]", "y: float32[, 4]", "line 6, column 16: expected a size, but got ','", None),
    ],
)  # fmt: skip
def test_error_says_where_and_what_was_expected(old: str, new: str, what: str, help: str | None) -> None:
    assert old in TEXT
    lines = problem(TEXT.replace(old, new, 1))
    assert lines[0] == what
    if help is not None:
        assert lines[-1] == f"  help: {help}"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("const(int64, [1])", "a constant is a tensor"),
        ("const(int8[1], [300])", "not every element is a int8 that can be written in a list"),
        ("const(int8[1], [1.0])", "not every element is a int8 that can be written in a list"),
        ("const(float8_e5m2[1], [1.0])", "not every element is a float8_e5m2 that can be written in a list"),
        ('const(int8[1], "!")', "this is not base64"),
        ("const(int8[1], [x])", "expected a number, but got 'x'"),
        ("{a: 1, a: 2}", "there is a field 'a' already"),
        ("relu(x, a=1, a=2)", "there is an attribute 'a' already"),
        ("x[-1]", "expected the number of a field, but got '-'"),
        ("9" * 5000, "this number is too long"),
        ("match_shape(x, cache(10001 * layer(kv_heads=1, head_size=1, dtype=int8, batch=1, max_seq=1)))", "a cache has at most 10000 layers"),
        ("match_shape(x, layer(kv_heads=1, head_size=1, dtype=int9, batch=1, max_seq=1))", "there is no dtype 'int9'"),
        ("match_shape(x, layer(heads=1))", "expected 'batch', but got 'heads'"),
        ("relu(x, a=(1", "this bracket is never closed"),
        ("@(x)", "expected the name of a function, but got '('"),
    ],
)  # fmt: skip
def test_error_about_a_value(value: str, what: str) -> None:
    (line, *_) = problem(f"def f(x: input float32[2]) -> int64(0) {{ v: int64 = {value} return 0 }}")
    assert line.partition(": ")[2] == what


def test_caret_is_under_the_place() -> None:
    assert problem(TEXT.replace("matmul(", "matmull(")) == [
        "line 6, column 24: there is no op 'matmull'",
        "      y: float32[n, 4] = matmull(x, w.0)",
        "                         ^",
        "  help: did you mean 'matmul'?",
    ]


def test_long_line_is_shown_around_the_place() -> None:
    fields = ", ".join(["x"] * 200)
    (_, line, caret, *_) = problem(
        f"def f(x: input int64) -> int64(0) {{ t: int64 = ({fields}, oops) return 0 }}"
    )
    assert len(line) <= 102
    assert line[caret.index("^") :].startswith("oops")


def test_functions_have_names_of_their_own() -> None:
    assert problem(f"{TEXT}\n{TEXT}")[0] == "line 15, column 1: there is a function 'f' already"


def test_one_function_is_one_function() -> None:
    with pytest.raises(ParseError, match="expected the end, after one function, but got 'def'"):
        parse_function(f"{TEXT}\n{TEXT}")


def test_text_without_functions_is_an_empty_module() -> None:
    assert len(parse(" # nothing\n")) == 0


@pytest.mark.parametrize(
    "deep",
    [
        "(" * 3000,
        "{a: " * 3000,
        "relu(x, a=" + "(" * 3000,
        "relu(x, a=" + "(" * 3000 + ")" * 3000 + ")",
        "relu(x, a=" + "(1," * 3000 + ")" * 3001,
        "relu(x, a=type(" + "fn() -> " * 3000 + "int8[])",
        "match_shape(x, " + "(" * 3000 + ",)" * 3000 + ")",
        "match_shape(x, cache(" + "2 * (" * 3000,
        "if x { a: int64 = " * 3000,
        "match_shape(x, float32[" + "(" * 3000 + "1" + ")" * 3000 + "])",
        "match_shape(x, float32[" + "-" * 3000 + "1])",
        "match_shape(x, float32[" + "1 + " * 3000 + "1])",
        "1" * 100_000,
        '"' + "a" * 100_000,
        "# at " + "(" * 50_000,
    ],
    ids=lambda text: text[:24],
)
def test_deep_and_long_text_ends_in_a_parse_error(deep: str) -> None:
    problem(f"def f(x: input bool) -> int64(0) {{ v: int64 = {deep}")


def test_random_tokens_never_crash_it() -> None:
    generator = random.Random(0)
    words = [
        *TEXT.split(),
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "=",
        "@f",
        '"s"',
        "1..",
        "%",
        "-",
        "const(",
        "cache(",
        "type(",
        "->",
    ]
    for _ in range(2000):
        text = " ".join(generator.choices(words, k=generator.randrange(1, 30)))
        with pytest.raises(ParseError):
            parse(f"def f(x: input float32[2]) -> float32[2] {{ {text}")


def test_six_thousand_bindings_parse() -> None:
    lines = [f"v{i + 1}: float32[batch, seq, 64] = add(v{i}, {i}.5)" for i in range(6000)]
    text = "def f[batch, seq: % 16](v0: input float32[batch, seq, 64]) -> float32[batch, seq, 64] {\n"
    function: Function = parse_function(text + "\n".join(lines) + "\nreturn v6000\n}")
    assert len(function.bindings) == 6000


def test_layers_of_keys_and_values_in_older_text_are_still_read() -> None:
    older = "layer(kv_heads=2, head_size=4, dtype=float16, batch=b, max_seq=m, window=8)"
    newer = "layer(batch=b, max_seq=m, per_token={keys: float16[2, 4], values: float16[2, 4]}, window=8)"
    text = "def f[b, m](c: input {0}) -> {0} {{ return c }}"
    old, new = (parse_function(text.format(layer)) for layer in (older, newer))
    assert str(old) == str(new)
    assert newer in str(old)
    assert old.params[0].type == new.params[0].type
