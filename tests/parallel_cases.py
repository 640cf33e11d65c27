"""Cases of test_parallel: generators that every rank runs. All exchanges come before the yield, after it what may fail on
one rank alone: the ranks stay together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, Case, make_case, moe_bound
from tests.parallel_tools import (
    BF16,
    F16,
    F32,
    KINDS,
    TOKENS,
    call,
    equal,
    layer,
    near,
    order_bound,
    part,
    raises,
    rank,
    skipping,
    world,
)
from tvm_moe.kernels import DTYPES
from tvm_moe.parallel import EXCHANGES, ExpertParallelMoE, TensorParallelMoE

CASES: dict[str, Callable[[], Iterator[None]]] = {}


def listed(name: str, *args: Any, **options: Any) -> Callable[..., Any]:
    def enter(function: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        CASES[name] = partial(function, *args, **options)
        return function

    return enter


def each_activation(kind: str) -> Callable[..., Any]:
    """The case in each dtype and with each activation and its parameters."""

    def enter(function: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        for weights in DTYPES:
            for options in ACTIVATION_OPTIONS:
                listed("-".join(map(str, (kind, weights, *options.values()))), weights, **options)(function)
        return function

    return enter


def on_one_rank(case: Case, counts: list[int]) -> Tensor:
    """bool [T]: tokens whose experts one rank holds: no sum crosses ranks, its order is that of one process."""
    owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
    ranks = [{owner[e] for e in row if 0 <= e < len(owner)} for row in case.ids.tolist()]
    return torch.tensor([len(own) <= 1 for own in ranks], dtype=torch.bool)


# Expert parallelism. Sizes are odd, so that nothing in a message lies at a multiple of anything.


@listed("expert-int8-generic", "int8", isa="generic")
@listed("expert-bf16-generic", "bf16", isa="generic")
@listed("expert-fewer-than-ranks", "int8", E=1, k=1)
@listed("expert-quantizing", "bf16", dtype="int8")
@listed("expert-f16", "int8", x_dtype=F16)
@listed("expert-int8-f32", "int8", x_dtype=F32)
@listed("expert-bf16-f32", "bf16", x_dtype=F32)
@each_activation("expert")
def expert(weights: str, E: int = 7, k: int = 3, isa: str | None = None, **options: Any) -> Iterator[None]:
    """All exchanges; E divides by no number of ranks, and a rank has no tokens."""
    whole = skipping(make_case(T=sum(TOKENS), E=E, H=37, I=21, k=k, weights=weights, bias=True, **options))
    own = part(whole, sum(TOKENS[: rank()]), TOKENS[rank()])
    modules = {name: layer(ExpertParallelMoE, whole, isa=isa, exchange=name) for name in EXCHANGES}
    got = {name: call(module, whole if name == "replicated" else own) for name, module in modules.items()}
    yield
    packed = tvm_moe.pack_experts(whole.w13, whole.w2, isa=isa, **whole.options)
    want, alone = own.run(packed), on_one_rank(own, modules["all_to_all"].counts)
    near(got["all_to_all"], want, order_bound(own, world()))
    equal(got["all_to_all"][alone], want[alone])
    near(got["all_reduce"], want, order_bound(own, world()))
    equal(got["all_reduce"][alone], want[alone])
    near(got["replicated"], whole.run(packed), order_bound(whole, world()))


@listed("expert-named-twice")
def named_twice() -> Iterator[None]:
    """More slots than experts, and wide ids whose low halves are those of experts."""
    ids = torch.tensor([[0, 2, 2, 1, 0], [1, 1, 1, 1, 2**32], [2, -(2**32), 0, 1, 2]])
    case = make_case(T=3, E=3, k=3).but(ids=ids, weights=torch.rand(3, 5))
    got = call(layer(ExpertParallelMoE, case), case)
    yield
    near(got, case.run(case.pack()), order_bound(case, world()))


@listed("expert-nobody-has-tokens")
def nobody_has_tokens() -> Iterator[None]:
    case = make_case(T=0, E=7)
    got = [call(layer(ExpertParallelMoE, case, exchange=exchange), case) for exchange in EXCHANGES]
    yield
    assert [result.shape for result in got] == [case.x.shape] * 3


@listed("expert-other-shares")
def other_shares() -> Iterator[None]:
    """The first rank holds one expert, the last all others, those between them none."""
    case = make_case(T=9, E=5)
    begin, end = {0: (0, 1), world() - 1: (1, 5)}.get(rank(), (1, 1))
    packed = tvm_moe.pack_experts(case.w13[begin:end], case.w2[begin:end]) if begin < end else None
    got = call(ExpertParallelMoE(packed, begin, 5), case)
    yield
    near(got, case.run(case.pack()), order_bound(case, world()))


@listed("weight-on-input")
def weight_on_input() -> Iterator[None]:
    cases = [make_case(T=9, E=7, H=37, I=21, k=1, weights=weights, on_input=True) for weights in DTYPES]
    cases = [case.but(weights=torch.linspace(0.2, 1.8, 9)[:, None]) for case in cases]  # not the softmax over one: 1
    got = [[call(layer(kind, case), case) for kind in KINDS] for case in cases]
    yield
    for case, (expert, tensor) in zip(cases, got, strict=True):
        equal(expert, case.run(case.pack()))
        near(tensor, case.but(x=case.x.float()).reference(), moe_bound(case) + order_bound(case, 21 + world()))


@listed("strided-inputs")
def strided_inputs() -> Iterator[None]:
    """Columns that lie one after the other: neither rows nor slots are contiguous."""
    cases = [make_case(T=9, E=7, H=37, I=21, k=3, x_dtype=torch.float32, weights=weights) for weights in DTYPES]
    lying = [{n: getattr(case, n).T.contiguous().T for n in ("x", "weights", "ids")} for case in cases]
    got = [
        [call(layer(kind, case), case.but(**inputs)) for kind in KINDS]
        for case, inputs in zip(cases, lying, strict=True)
    ]
    yield
    for case, (expert, tensor) in zip(cases, got, strict=True):
        near(expert, case.run(case.pack()), order_bound(case, world()))
        near(tensor, case.reference(), moe_bound(case) + order_bound(case, 21 + world()))


@listed("another-default-dtype")
def another_default_dtype() -> Iterator[None]:
    """What a layer makes for itself is f32 whatever torch makes by default."""
    cases = [make_case(T=9, E=7, H=37, I=21, weights=weights) for weights in DTYPES]
    modules = [[layer(kind, case) for kind in KINDS] for case in cases]
    torch.set_default_dtype(torch.float64)
    try:
        got = [[call(module, case) for module in both] for case, both in zip(cases, modules, strict=True)]
    finally:
        torch.set_default_dtype(F32)
    yield
    for case, (expert, tensor) in zip(cases, got, strict=True):
        near(expert, case.run(case.pack()), order_bound(case, world()))
        near(tensor, case.but(x=case.x.float()).reference(), moe_bound(case) + order_bound(case, 21 + world()))


@listed("a-group-of-some")
def a_group_of_some() -> Iterator[None]:
    """The last two ranks, whose numbers in the group may not be their numbers."""
    members = [world() - 2, world() - 1]
    group = dist.new_group(members)
    case, got = make_case(T=9, E=5), []
    if rank() in members:
        got = [call(layer(kind, case, group=group), case) for kind in KINDS]
    yield
    if rank() in members:
        near(got[0], case.run(case.pack()), order_bound(case, 2))
        near(got[1], case.run(case.pack()), order_bound(case, 20 + 2))
    else:
        raises("is not in the group", layer, ExpertParallelMoE, case, group=group)


# Sums of small integers are exact: any order gives the same bits.


def integers(seed: int, *shape: int, most: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def exact_bf16() -> Case:
    case = make_case(T=9, E=7, H=24, I=21, k=4, activation="relu2", x_dtype=F32)
    x, w13, w2 = integers(0, 9, 24, most=2), integers(1, 7, 21, 24, most=1), integers(2, 7, 24, 21, most=2)
    return case.but(x=x, w13=w13, w2=w2, weights=torch.full((9, 4), 0.5))


def exact_int8() -> Case:
    """All scales are 1, 1/64 and 127: x has a single 127, min(silu(g), 127) is 127, and so is the largest u.

    That is in the first column: a rank without it would quantize otherwise.
    """
    E, H, I, k, T = 7, 24, 21, 4, 9
    gate, up = integers(3, E, I, H, most=20).abs() + 1, integers(4, E, I, H, most=30)
    up[:, 0] = 64
    scales = {"w13_scale": torch.ones(E, 2 * I), "w2_scale": torch.ones(E, H)}
    scales["w13_scale"][:, I:] = 1 / 64
    w13, w2 = torch.cat([gate, up], 1).to(torch.int8), integers(5, E, H, I, most=3).to(torch.int8)
    options = {"activation": "swiglustep", "limit": 127.0, **scales}
    return Case(127 * torch.eye(T, H), w13, w2, torch.full((T, k), 0.5), make_case(T=T, E=E, k=k).ids, options)


@listed("exact-bf16", exact_bf16)
@listed("exact-int8", exact_int8)
def exact(make: Callable[[], Case]) -> Iterator[None]:
    case = make()
    got = [call(layer(ExpertParallelMoE, case, exchange=exchange), case) for exchange in EXCHANGES]
    got.append(call(layer(TensorParallelMoE, case), case))
    yield
    want = case.run(case.pack())
    assert want.unique().numel() > 50
    for result in got:
        equal(result, want)


# Tensor parallelism.


@listed("tensor-int8-generic", "int8", isa="generic")
@listed("tensor-bf16-generic", "bf16", isa="generic")
@listed("tensor-int8-fewer-columns-than-ranks", "int8", I=1)
@listed("tensor-bf16-fewer-columns-than-ranks", "bf16", I=3, interleaved=True)
@listed("tensor-quantizing", "bf16", dtype="int8")
@listed("tensor-f16", "int8", x_dtype=F16)
@listed("tensor-int8-f32", "int8", x_dtype=F32)
@listed("tensor-bf16-f32", "bf16", x_dtype=F32)
@each_activation("tensor")
def tensor(weights: str, I: int = 21, isa: str | None = None, **options: Any) -> Iterator[None]:
    """I divides by no number of ranks. INT8's intermediate comes from torch's exp, and may be quantized to a neighbour."""
    case = skipping(make_case(T=9, E=5, H=37, I=I, k=3, weights=weights, bias=True, **options))
    got = call(layer(TensorParallelMoE, case, isa=isa), case)
    everyones = [torch.empty_like(got) for _ in range(world())]
    dist.all_gather(everyones, got)
    yield
    for other in everyones:
        equal(other, got)
    order = order_bound(case, I + world())
    near(got, case.but(x=case.x.float()).reference(), moe_bound(case) + order)
    if case.dtype == "bf16" or case.spec.name == "relu2":  # nothing but the order of sums differs
        near(got, case.run(tvm_moe.pack_experts(case.w13, case.w2, isa=isa, **case.options)), order)


@listed("tensor-shards")
def shards() -> Iterator[None]:
    """What a rank has loaded alone makes the layer of whole weights: w2 is quantized by its whole rows."""
    got, want = [], []
    cut = slice(rank() * 16 // world(), (rank() + 1) * 16 // world())
    for interleaved in (False, True):

        def own(w: Tensor, interleaved: bool = interleaved) -> Tensor:
            if interleaved:
                return w[:, 2 * cut.start : 2 * cut.stop]
            return torch.cat([half[:, cut] for half in w.chunk(2, 1)], 1)

        for dtype in DTYPES:
            case = make_case(T=9, E=5, H=37, I=16, k=3, bias=True, x_dtype=F32, dtype=dtype, interleaved=interleaved)
            options = case.options | {"w13_bias": own(case.options["w13_bias"])}
            shard = TensorParallelMoE.from_weights(own(case.w13), case.w2[:, :, cut], sharded=True, **options)
            got.append(call(shard, case))
            want.append(call(layer(TensorParallelMoE, case), case))
    yield
    for pair in zip(got, want, strict=True):
        equal(*pair)


@listed("tensor-nan-stays-in-its-token")
def nan_stays() -> Iterator[None]:
    """From a token, on all ranks; from an expert's bias, on the first alone."""
    results = []
    for weights in DTYPES:
        case = make_case(T=9, E=5, I=21, weights=weights, bias=True)
        want = call(layer(TensorParallelMoE, case), case)
        case.options["w13_bias"][2, 0] = case.x[4] = math.nan
        want[(case.ids == 2).any(1)] = want[4] = math.nan
        results.append((call(layer(TensorParallelMoE, case), case), want))
    yield
    for got, want in results:
        assert 0 < want.isnan().sum() < want.numel() - 24
        equal(got.nan_to_num(7), want.nan_to_num(7))


@listed("tensor-without-slots")
def without_slots() -> Iterator[None]:
    results = []
    for weights in DTYPES:
        case = make_case(T=4, E=5, I=21, weights=weights)
        module = layer(TensorParallelMoE, case)
        skipped, slotless = case.but(ids=case.ids * 0 - 1), case.but(ids=case.ids[:, :0], weights=case.weights[:, :0])
        results += [call(module, some) for some in (skipped, slotless, part(case, 0, 0))]
    yield
    assert [len(got) for got in results] == [4, 4, 0] * 2
    assert all(got.eq(0).all() for got in results)


# Ranks that do not fit together: all of them say so, and go on.


@listed("differing-layers", *KINDS)
def differing_layers(*kinds: type[nn.Module]) -> Iterator[None]:
    last = rank() == world() - 1
    for kind in kinds:
        for message, options in {
            f"hidden_size is 24 on rank 0 and 25 on rank {world() - 1}": {"H": 24 + last},
            f"activation is ('silu', 1.0, inf) on rank 0 and ('gelu', 1.0, inf) on rank {world() - 1}": {
                "activation": "gelu" if last else "silu"
            },
            f"dtype is 'bf16' on rank 0 and 'int8' on rank {world() - 1}": {"weights": "int8" if last else "bf16"},
            f"num_experts is 5 on rank 0 and 6 on rank {world() - 1}": {"E": 5 + last},
        }.items():
            raises(message, layer, kind, make_case(**options))
    yield


@listed("a-broken-layer", *KINDS)
def broken_layer(*kinds: type[nn.Module]) -> Iterator[None]:
    """Of one rank alone: its own error there, and there is no waiting for it elsewhere."""
    case, last = make_case(E=8, dtype="int8"), rank() == world() - 1
    if last:
        case.w2[-1] = math.inf
    for kind in kinds:
        raises("finite (NaN or Inf)" if last else f"rank {world() - 1} failed: expert", layer, kind, case)
    yield


@listed("experts-with-gaps")
def gaps() -> Iterator[None]:
    case = make_case(E=8)
    packed = tvm_moe.pack_experts(case.w13[:1], case.w2[:1])
    raises(f"the ranks hold {[1] * world()} experts, expected 8", ExpertParallelMoE, packed, rank(), 8)
    raises("experts of rank 1 begin at 0, those of the ranks before it end at 1", ExpertParallelMoE, packed, 0, 8)
    raises("unknown exchange 'x'", ExpertParallelMoE, packed, 0, 8, exchange="x")
    yield


@listed("differing-calls")
def differing_calls() -> Iterator[None]:
    """Then calls go on; so they do after one that no rank should have made."""
    case, one = make_case(E=7), rank() == world() - 1
    wrong = {
        "k is 2 on one rank and 3 on another": make_case(E=7, k=2 if one else 3),
        "dtype is torch.bfloat16 on one rank and torch.float32 on another": make_case(
            E=7, x_dtype=BF16 if one else F32
        ),
    }
    got = []
    for exchange in EXCHANGES:
        module = layer(ExpertParallelMoE, case, exchange=exchange)
        for message, other in wrong.items():
            raises(message, call, module, other)
        refused = "hidden_states has 7 columns" if one else "another rank's call was refused"
        raises(refused, module, case.x[:, :7] if one else case.x, case.weights, case.ids)
        got.append(call(module, case))
    for module in (layer(ExpertParallelMoE, case, exchange="replicated"), layer(TensorParallelMoE, case)):
        raises("tokens is 4 on one rank and 5 on another", call, module, make_case(E=7, T=4 if one else 5))
    yield
    near(got[0], case.run(case.pack()), order_bound(case, world()))
    near(got[1], case.run(case.pack()), order_bound(case, world()))


@listed("no-gradient")
def no_gradient() -> Iterator[None]:
    case = make_case(E=7, x_dtype=F32)
    modules = [layer(kind, case) for kind in KINDS]
    got = [module(case.x.clone().requires_grad_(), case.weights, case.ids) for module in modules]
    yield
    assert not any(result.requires_grad for result in got)
    assert all(f"rank {rank()} of {world()}" in repr(module) for module in modules)


@listed("graph-break")
def graph_break() -> Iterator[None]:
    """Nothing of the layers is in what torch.compile compiles around them, where it could be rounded otherwise."""
    if world() > 2:  # the compiler takes seconds to import
        yield
        return
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module.forward

    case = make_case(E=7)
    modules = [layer(kind, case) for kind in KINDS]
    got = [torch.compile(lambda x, m=m: m(x * 2, case.weights, case.ids) * 2, backend=backend)(case.x) for m in modules]
    want = [call(m, case.but(x=case.x * 2)) * 2 for m in modules]
    yield
    assert len(graphs) >= 2
    assert not [code for code in graphs if "tvm_moe" in code or "zeros" in code]
    for pair in zip(got, want, strict=True):
        equal(*pair)
