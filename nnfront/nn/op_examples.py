# SPDX-License-Identifier: Apache-2.0
"""An example of every function of `nnfront.op`: `help(op.NAME)` and docs/ops.md show it, and a test runs it.

Lines of Python; what the last one gives is what the example shows. `torch`, `nn`, `op` and `spec` are there.
"""

from __future__ import annotations

# Names, four spaces at least, and the code, in which NAME stands for each of several; or the names alone and the code under them, indented.
_EXAMPLES = """
relu elu            op.NAME(torch.tensor([-1.0, 2.0]))
relu6               op.relu6(torch.tensor([-1.0, 2.0, 8.0]))
silu mish           op.NAME(torch.tensor([-1.0, 0.0, 1.0]))
hardswish           op.hardswish(torch.tensor([-4.0, 0.0, 4.0]))
gelu                op.gelu(torch.tensor([-1.0, 0.0, 1.0]), approximate="tanh")
softplus            op.softplus(torch.tensor([-1.0, 0.0, 30.0]))
leaky_relu          op.leaky_relu(torch.tensor([-1.0, 2.0]), alpha=0.1)
prelu               op.prelu(torch.tensor([[-1.0, -2.0]]), torch.tensor([0.1, 0.5]))
swiglu geglu        op.NAME(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
add                 op.add(torch.tensor([[1.0], [2.0]]), torch.tensor([10.0, 20.0]))
subtract            op.subtract(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.5]))
multiply            op.multiply(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.5]))
divide              op.divide(torch.tensor([3, 4]), torch.tensor([2, 2]))
floor_divide remainder    op.NAME(torch.tensor([-3, 3]), torch.tensor([2, 2]))
power               op.power(torch.tensor([2.0, 3.0]), torch.tensor([2.0, 0.5]))
maximum minimum     op.NAME(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 3.0]))
clip                op.clip(torch.tensor([-2.0, 0.5, 2.0]), -1, 1)
negative abs        op.NAME(torch.tensor([1.0, -2.0]))
sign                op.sign(torch.tensor([3.0, 0.0, -2.0]))
square              op.square(torch.tensor([3.0, -2.0]))
floor ceil          op.NAME(torch.tensor([1.5, -1.5]))
round               op.round(torch.tensor([0.5, 1.5, 2.4]))
sqrt                op.sqrt(torch.tensor([4.0, 9.0]))
rsqrt               op.rsqrt(torch.tensor([4.0, 16.0]))
reciprocal          op.reciprocal(torch.tensor([4.0, 0.5]))
exp sin cos tanh erf sigmoid    op.NAME(torch.tensor([0.0, 1.0]))
log                 op.log(torch.tensor([1.0, 10.0]))
astype              op.astype(torch.tensor([1.7, -1.7]), "int32")
less less_equal greater greater_equal equal not_equal    op.NAME(torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2]))
logical_and logical_xor    op.NAME(torch.tensor([True, True]), torch.tensor([True, False]))
logical_or          op.logical_or(torch.tensor([True, False]), torch.tensor([False, False]))
logical_not         op.logical_not(torch.tensor([True, False]))
bitwise_and bitwise_or bitwise_xor    op.NAME(torch.tensor([12, 10]), torch.tensor([6, 6]))
bitwise_not         op.bitwise_not(torch.tensor([0, 7]))
left_shift          op.left_shift(torch.tensor([1, 3]), torch.tensor([2, 0]))
right_shift         op.right_shift(torch.tensor([-8, 9]), torch.tensor([1, 0]))
where               op.where(torch.tensor([True, False]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
full                op.full((2, 2), 7.0).torch()
zeros ones          op.NAME((2, 2)).torch()
empty               op.empty((2, 3)).shape
full_like           op.full_like(torch.tensor([1.0, 2.0]), 7)
zeros_like ones_like stop_lift_params    op.NAME(torch.tensor([1.0, 2.0]))
triu                op.triu(torch.ones(3, 3), 1)
tril                op.tril(torch.ones(3, 3))
sum prod            op.NAME(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), axis=1)
max                 op.max(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), axis=0, keepdims=True)
min                 op.min(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
mean                op.mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
var                 op.var(torch.tensor([1.0, 2.0, 3.0]), correction=1)
any                 op.any(torch.tensor([[True, False], [False, False]]), axis=1)
all                 op.all(torch.tensor([[True, False], [True, True]]), axis=1)
argmax argmin       op.NAME(torch.tensor([[1.0, 5.0], [7.0, 2.0]]), axis=-1)
cumsum              op.cumsum(torch.tensor([1, 2, 3]), axis=0)
sort                op.sort(torch.tensor([3.0, 1.0, 2.0]), descending=True)
argsort             op.argsort(torch.tensor([3.0, 1.0, 2.0]))
topk                op.topk(torch.tensor([3.0, 1.0, 2.0]), k=2)
reshape             op.reshape(torch.arange(6), (2, -1))
permute_dims permute    op.NAME(torch.tensor([[1, 2], [3, 4]]), (1, 0))
pow                 op.pow(torch.tensor([2.0, 3.0]), 2)
unsqueeze           op.unsqueeze(torch.ones(2, 3), 1).shape
squeeze             op.squeeze(torch.ones(2, 1, 3), 1).shape
broadcast_to        op.broadcast_to(torch.tensor([[1], [2]]), (2, 3))
repeat              op.repeat(torch.tensor([1, 2]), 2)
tile                op.tile(torch.tensor([1, 2]), (2,))
flip                op.flip(torch.tensor([1, 2, 3]), 0)
bitcast             op.bitcast(torch.tensor([1, 0, 0, 0], dtype=torch.uint8), "int32")
getitem             op.getitem(torch.arange(6).reshape(2, 3), (slice(None), -1))
pad                 op.pad(torch.ones(1, 2), (0, 1, 1, 0))
concat              op.concat([torch.ones(1, 2), torch.zeros(1, 2)], dim=0)
stack               op.stack([torch.tensor([1, 2]), torch.tensor([3, 4])], dim=1)
split               op.split(torch.arange(6), 3)
chunk               op.chunk(torch.arange(5), 2)
take                op.take(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0]), axis=0)
gather              op.gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1], [0]]))
scatter             op.scatter(torch.zeros(1, 3), torch.tensor([[2, 0]]), torch.tensor([[5.0, 6.0]]))
scatter_add         op.scatter_add(torch.ones(1, 3), torch.tensor([[2, 2]]), torch.tensor([[5.0, 6.0]]))
matmul              op.matmul(torch.ones(2, 3), torch.ones(3, 4))
linear              op.linear(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4))
einsum              op.einsum("ij,jk->ki", torch.ones(2, 3), torch.ones(3, 4)).shape
softmax             op.softmax(torch.tensor([0.0, 0.0, 0.0, 0.0]))
log_softmax         op.log_softmax(torch.tensor([0.0, 0.0]))
layer_norm          op.layer_norm(torch.tensor([[1.0, 3.0]]), 2, torch.ones(2), torch.zeros(2))
rms_norm            op.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), axes=-1)
group_norm          op.group_norm(torch.randn(2, 4, 8), 2, torch.ones(4), torch.zeros(4)).shape
conv1d              op.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 3), padding=1)
conv2d              op.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), stride=2).shape
conv3d              op.conv3d(torch.ones(1, 1, 4, 4, 4), torch.ones(2, 1, 2, 2, 2)).shape
conv1d_transpose    op.conv1d_transpose(torch.ones(1, 1, 2), torch.ones(1, 1, 2), stride=2)
interpolate         op.interpolate(torch.tensor([[[1.0, 2.0]]]), scale_factor=2, data_layout="NCW")
multinomial_from_uniform    op.multinomial_from_uniform(torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5]]))
quantize            op.quantize(torch.tensor([[-127.0, 64.0]]), bits=8)
dequantize          op.dequantize(torch.tensor([[-127, 64]], dtype=torch.int8), torch.tensor([[0.5]]))
quantize_blocks     op.quantize_blocks(torch.ones(1, 256), "q4_k").shape
quantize_calibrated    op.quantize_calibrated(torch.ones(1, 32), torch.eye(32)[None], "int4")[1]
dequantize_blocks    op.dequantize_blocks(op.quantize_blocks(torch.ones(1, 256), "q6_k"), "q6_k")[0, :2]
pack_int4           op.pack_int4(torch.tensor([1, -1], dtype=torch.int8))
unpack_int4         op.unpack_int4(torch.tensor([241], dtype=torch.uint8))
shard               op.shard(torch.arange(6.0), torch.tensor(1), axis=0, world=2)
all_reduce all_to_all    op.NAME(torch.tensor([1.0, 2.0]), world=1)
all_gather          op.all_gather(torch.tensor([1.0, 2.0]), axis=0, world=1)
split_heads         op.split_heads(torch.ones(1, 5, 8), 4).shape
merge_heads         op.merge_heads(torch.ones(1, 5, 2, 4)).shape

scaled_dot_product_attention
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    op.scaled_dot_product_attention(q, k, k, is_causal=True).shape
attention
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    op.attention(q, k, k, window=3).shape
causal_conv1d
    y, state = op.causal_conv1d(torch.ones(1, 5, 4), torch.ones(4, 3))
    y.shape, state.shape
ssm_scan
    b = torch.ones(1, 5, 1, 6)
    y, state = op.ssm_scan(torch.ones(1, 5, 2, 4), torch.ones(1, 5, 2), -torch.ones(2), b, b)
    y.shape, state.shape
selective_scan
    b = torch.ones(1, 5, 6)
    y, state = op.selective_scan(torch.ones(1, 5, 4), torch.ones(1, 5, 4), -torch.ones(4, 6), b, b)
    y.shape, state.shape
gated_delta_rule
    k, v, beta = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 6), torch.rand(1, 5, 2)
    y, state = op.gated_delta_rule(k, k, v, -beta, beta, qk_l2norm=True)
    y.shape, state.shape
moe_mlp
    gate_up, down = torch.randn(4, 2 * 6, 8), torch.randn(4, 8, 6)
    experts, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
    op.moe_mlp(torch.randn(2, 8), gate_up, down, experts, weights).shape
linear_int8
    weight, scales = torch.tensor([[2, 4]], dtype=torch.int8), torch.tensor([[0.5]])
    op.linear_int8(torch.tensor([[1.0, -0.5]]), weight, scales)
add_low_rank
    y, x, a, b = torch.zeros(2, 3, 6), torch.randn(2, 3, 8), torch.randn(4, 2, 8), torch.randn(4, 6, 2)
    op.add_low_rank(y, x, a, b, torch.tensor([-1, 3])).shape
rope
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    op.rope(torch.randn(1, 5, 2, 4), torch.cos(angles), torch.sin(angles)).shape
get_timestep_embedding
    op.get_timestep_embedding(torch.tensor([0.0, 1.0]), embedding_dim=4)
sample_top_p_top_k_from_sorted_prob
    prob, token = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[2, 0, 1]])
    top_p, top_k = torch.tensor([[0.8]]), torch.tensor([[2]])
    op.sample_top_p_top_k_from_sorted_prob(prob, token, top_p, top_k, torch.tensor([[0.9]]))
renormalize_top_p_top_k_prob
    prob = torch.tensor([[0.1, 0.6, 0.3]])
    top_p, top_k = torch.tensor([[0.8]]), torch.tensor([[2]])
    op.renormalize_top_p_top_k_prob(prob, op.sort(prob, descending=True), top_p, top_k)
print_
    op.print_(torch.tensor(3.0), format="x is {:.1f}")
within
    # Passes write it, not authors.
    nn.ir.OPS["within"].run([6, 7], {"ranges": [(1, 8, 2), (None, None, None)]})
arange
    op.arange(3).torch(), op.arange(0, 6, 2, dtype="int64").torch()
dim_value
    op.dim_value(7).torch()
enter_case
    # Passes write it, not authors.
    op.enter_case("batch = 1")
extern
    nn.register_extern("examples.twice", lambda x: x * 2)
    op.extern("examples.twice", [torch.tensor([1.0, 2.0])], nn.Tensor.placeholder([2], "float32"))
cond
    class Halve(nn.Module):
        def forward(self, x):
            return op.cond(op.sum(x) > 4, lambda: x / 2, lambda: x)


    method = nn.compile(Halve().export({"forward": {"x": spec.Tensor(["n"])}})).load({})["forward"]
    method(torch.tensor([1.0, 2.0])), method(torch.tensor([4.0, 2.0]))
scan
    class Sums(nn.Module):
        def forward(self, x):
            return op.scan(lambda total, row: (total + row, total), op.zeros((2,)), x)


    method = nn.compile(Sums().export({"forward": {"x": spec.Tensor(["n", 2])}})).load({})["forward"]
    method(torch.ones(3, 2))
cache_append
    class Step(nn.Module):
        def step(self, x, cache):
            op.cache_append(cache[0], x, x)
            return op.attention(x, cache=cache[0], is_causal=False)


    cache = spec.Cache(layers=1, kv_heads=1, head_size=2, batch="batch", max_seq="max_seq")
    ir = Step().export({"step": {"x": spec.Tensor(["batch", "seq", 1, 2]), "cache": cache}})
    session = nn.compile(ir).load({})
    session["step"](torch.ones(1, 3, 1, 2), session.make_cache(batch=1, max_seq=8)).shape
cache_positions
    class Step(nn.Module):
        def step(self, x, cache):
            places = op.cache_positions(cache[0], x.shape[1])
            return places, op.attention(x, x, x, cache=cache[0])


    cache = spec.Cache(layers=1, kv_heads=1, head_size=2, batch="batch", max_seq="max_seq")
    ir = Step().export({"step": {"x": spec.Tensor(["batch", "seq", 1, 2]), "cache": cache}})
    session = nn.compile(ir).load({})
    cache = session.make_cache(batch=1, max_seq=8)
    session["step"](torch.ones(1, 3, 1, 2), cache)[0], session["step"](torch.ones(1, 2, 1, 2), cache)[0]
positions
    class Places(nn.Module):
        def forward(self, tokens):
            return op.positions(tokens, nn.NO_CACHE)


    ir = Places().export({"forward": {"tokens": spec.Tensor(["n", "seq"], "int64")}})
    method = nn.compile(ir).load({})["forward"]
    method(torch.ones(2, 3, dtype=torch.int64))
cache_read cache_write
    class Total(nn.Module):
        def step(self, x, cache):
            total = op.cache_read(cache[0], "total") + op.sum(x, axis=1)
            op.cache_write(cache[0], "total", total, x.shape[1])
            return total


    layers = [spec.Layer(per_sequence={"total": spec.Tensor([2])})]
    cache = spec.State(layers, batch="batch", max_seq="max_seq")
    ir = Total().export({"step": {"x": spec.Tensor(["batch", "seq", 2]), "cache": cache}})
    session = nn.compile(ir).load({})
    cache = session.make_cache(batch=1, max_seq=8)
    session["step"](torch.ones(1, 3, 2), cache), session["step"](torch.ones(1, 1, 2), cache)
cache_split cache_join
    # What `cache[0]`, and the end of the method, become in the IR.
    class Step(nn.Module):
        def step(self, x, cache):
            return op.attention(x, x, x, cache=cache[0])


    cache = spec.Cache(layers=1, kv_heads=1, head_size=2, batch="batch", max_seq="max_seq")
    Step().export({"step": {"x": spec.Tensor(["batch", "seq", 1, 2]), "cache": cache}})
"""


def _read(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            for name in names:
                found[name] = f"{found.get(name, '')}{line.removeprefix('    ')}\n"
        elif "    " in line:
            several, _, code = line.partition("    ")
            found |= {name: code.strip().replace("NAME", name) for name in several.split()}
        elif line:
            names = line.split()
        else:
            found |= {name: f"{found[name]}\n" for name in names}
    return {name: f"{code.strip()}\n" for name, code in found.items()}


EXAMPLES: dict[str, str] = _read(_EXAMPLES)
"""Name of a function of `nnfront.op` -> the code of its example."""
