"""`load_int8`: checkpoints that compressed-tensors wrote, against transformers models of the same weights, dequantized.

Two facts together say that a loaded model is right: each layer's experts give what the reference gives of the stored
INT8 weights, within a derived bound, and everything else is, bit for bit, a model that transformers loaded itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.24")

from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeForCausalLM

import tvm_moe
from tests.helpers import Case, assert_matches_reference
from tvm_moe import CheckpointError, MoEError, checkpoint, demo, isa, reference
from tvm_moe.integrations.transformers import int8, load_int8
from tvm_moe.integrations.transformers.experts import PACKED

from . import tiny_models
from .test_checkpoint_int8 import compress

FAMILIES = [
    "qwen3_moe", "qwen2_moe", "mixtral", "minimax_m2", "olmoe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3",
]  # fmt: skip
PROMPT = torch.arange(3, 43).view(2, 20)
GREEDY = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}


def written(folder, name="qwen3_moe", ignore=("lm_head", "re:.*gate$"), **changes):
    """An INT8 checkpoint by compressed-tensors, and the same weights dequantized by it in a BF16 checkpoint."""
    model = tiny_models.small(name, **changes)
    model.save_pretrained(folder / "int8")
    model.save_pretrained(folder / "plain")
    weights = compress(folder / "int8", ignore)
    dequantized = {name: weight.bfloat16() for name, weight in weights.items() if name.endswith("weight")}
    tiny_models.rewrite(folder / "plain", lambda tensors: {**tensors, **dequantized})
    return folder / "int8", folder / "plain"


def by_transformers(plain):
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, experts_implementation="eager").eval()


def stacked(path, layer):
    """(w13, w2) int8 and (w13_scale, w2_scale) of all experts of a layer."""
    experts = list(checkpoint.open(path).layer(layer).experts())
    return [torch.stack([getattr(e, name) for e in experts]) for name in ("w13", "w2", "w13_scale", "w2_scale")]


def experts_of(model, layer):
    return model.model.layers[layer].mlp.experts


def packed_of(model, layer):
    return experts_of(model, layer).get_submodule(PACKED).packed


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(INT8 checkpoint, the model that was loaded of it, transformers' own model of the dequantized weights)."""
    path, plain = written(tmp_path_factory.mktemp(request.param), request.param)
    return path, load_int8(path), by_transformers(plain)


def tensors_of(model):
    """Parameters and buffers, those that no checkpoint holds too, but not those of experts."""
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in found if ".experts." not in name}


def test_everything_but_the_experts_is_what_transformers_loads(pair):
    _, loaded, expected = pair
    got, wanted = tensors_of(loaded), tensors_of(expected)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert (loaded.dtype, loaded.training, type(loaded)) == (torch.bfloat16, False, type(expected))
    assert not hasattr(loaded.config, "quantization_config")


def test_experts_within_the_bound_of_the_reference(pair):
    path, loaded, _ = pair
    calls = {}
    layers = checkpoint.open(path).layers
    hooks = [
        experts_of(loaded, i).register_forward_hook(lambda module, args, out, i=i: calls.__setitem__(i, (*args, out)))
        for i in layers
    ]
    loaded(PROMPT)
    for hook in hooks:
        hook.remove()
    assert list(calls) == layers
    for i, (x, ids, weights, out) in calls.items():
        w13, w2, s13, s2 = stacked(path, i)
        case = Case(x, w13, w2, weights, ids.int(), {"w13_scale": s13, "w2_scale": s2})
        assert out.abs().max() > 0.01
        assert_matches_reference(out, case)


def give_experts(model, path, function):
    """Lets ``function(x, w13, w2, weights, ids, **scales)`` of the stored INT8 weights run a model's experts."""
    for i in checkpoint.open(path).layers:
        w13, w2, s13, s2 = stacked(path, i)
        run = partial(function, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)
        experts_of(model, i).forward = lambda x, ids, weights, run=run: run(x, topk_weights=weights, topk_ids=ids)


def ours(x, w13, w2, topk_weights, topk_ids, **scales):
    return tvm_moe.fused_moe(x, tvm_moe.pack_experts(w13, w2, **scales), topk_weights, topk_ids)


@torch.no_grad()
def test_logits_of_the_dequantized_model_with_reference_experts(pair):
    path, loaded, expected = pair
    give_experts(expected, path, reference.fused_moe)
    got, want = loaded(PROMPT).logits.float(), expected(PROMPT).logits.float()
    # What rounds otherwise moves a row of an intermediate by a step, 1/127 of its largest value, or a result by bf16's
    # 2^-8: no layer's output moves by more than 1/127 of its norm, and the residual around it makes that less.
    assert (got - want).norm() / want.norm() < 1 / 127


@torch.no_grad()
def test_logits_and_greedy_text(pair):
    """Of the dequantized model whose experts alone are ours: the same operations, so the same bits."""
    path, loaded, expected = pair
    give_experts(expected, path, ours)
    logits = loaded(PROMPT).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, expected(PROMPT).logits)
    text = loaded.generate(PROMPT, **GREEDY)
    assert text.shape == (2, 36)
    assert torch.equal(text, expected.generate(PROMPT, **GREEDY))


def test_layers_in_bf16_stay_so(tmp_path):
    path, plain = written(tmp_path, ignore=("lm_head", "re:.*gate$", "re:.*layers.0.*"))
    loaded, expected = load_int8(path), by_transformers(plain)
    assert [packed_of(loaded, i).dtype for i in (0, 1)] == ["bf16", "int8"]
    assert all(torch.equal(tensor, tensors_of(expected)[name]) for name, tensor in tensors_of(loaded).items())


def test_tied_embeddings(tmp_path):
    path, _ = written(tmp_path, tie_word_embeddings=True)
    loaded = load_int8(path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, load_file(path / "model.safetensors")["model.embed_tokens.weight"])


def test_quantized_lm_head_and_router(tmp_path):
    path, plain = written(tmp_path, ignore=())
    loaded, expected = load_int8(path), by_transformers(plain)
    assert load_file(path / "model.safetensors")["lm_head.weight"].dtype == torch.int8
    assert all(torch.equal(tensor, tensors_of(expected)[name]) for name, tensor in tensors_of(loaded).items())


def test_shards(tmp_path):
    """Weights and their scales may lie in different files."""
    path, _ = written(tmp_path)
    expected = load_int8(path)
    tensors = load_file(path / "model.safetensors")
    split(path, tensors)
    got = load_int8(path)
    assert torch.equal(got(PROMPT).logits, expected(PROMPT).logits)


def split(path, tensors):
    files = {name: f"{'b' if name.endswith('_scale') else 'a'}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_options(tmp_path):
    path, _ = written(tmp_path)
    GenerationConfig(max_new_tokens=3, eos_token_id=63).save_pretrained(path)
    loaded = load_int8(path, dtype=torch.float32, isa="generic", attn_implementation="eager")
    assert loaded.dtype == loaded(PROMPT).logits.dtype == torch.float32
    assert packed_of(loaded, 0).isa == "generic"
    assert loaded.config._attn_implementation == "eager"
    assert loaded.generation_config.max_new_tokens == 3
    assert loaded.name_or_path == str(path)
    tensors, got = load_file(path / "model.safetensors"), tensors_of(loaded)
    quantized = [name for name in got if f"{name}_scale" in tensors]
    assert len(quantized) == 8  # attention
    for name in quantized:
        assert torch.equal(got[name], tensors[name] * tensors[f"{name}_scale"].float())


def test_saving_is_refused(tmp_path):
    path, _ = written(tmp_path)
    with pytest.raises(MoEError, match="save"):
        load_int8(path).save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_experts_of_another_kind_are_refused(tmp_path, monkeypatch):
    path, _ = written(tmp_path)
    row = checkpoint.FORMATS["qwen3_moe"]
    monkeypatch.setitem(checkpoint.FORMATS, "qwen3_moe", replace(row, activation="gelu"))
    with pytest.raises(CheckpointError, match=r"layer 0: transformers has experts .*silu.* the checkpoint .*gelu"):
        load_int8(path)
    monkeypatch.undo()
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda *_: None)
    with pytest.raises(CheckpointError, match="layer 0: Qwen3MoeExperts does not ask for other implementations"):
        load_int8(path)


def test_layers_must_agree_with_transformers(tmp_path, monkeypatch):
    path, _ = written(tmp_path)
    monkeypatch.setattr(int8, "experts_modules", lambda model: {1: "model.layers.1.mlp.experts"})
    with pytest.raises(CheckpointError, match=r"experts in layers \[1\], by config.json they are in \[0, 1\]"):
        load_int8(path)


def test_what_the_model_class_ignores_is_not_read(tmp_path, monkeypatch):
    """Such as DeepSeek-V3's layer for predicting several tokens, which is as large as any other."""
    path, _ = written(tmp_path)
    broken = {"model.layers.2.self_attn.q_proj.weight": torch.zeros(32, 32, dtype=torch.int8)}
    tiny_models.rewrite(path, lambda tensors: {**tensors, **broken})
    with pytest.raises(CheckpointError, match=r"layers.2.* is int8, but"):
        load_int8(path)
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    load_int8(path)


def test_progress_on_a_terminal_only(tmp_path, capfd, monkeypatch):
    path, _ = written(tmp_path)
    capfd.readouterr()
    load_int8(path)
    out, err = capfd.readouterr()
    assert (out, "packing experts" in err) == ("", False)
    terminal = Console(file=StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(int8, "Console", lambda stderr: terminal)
    load_int8(path)
    assert "packing experts" in terminal.file.getvalue()


MEMORY = """
import sys, threading
from pathlib import Path
from tvm_moe.integrations.transformers import load_int8

def anonymous():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    global peak
    while not stop.wait(0.0005):
        peak = max(peak, anonymous())

load_int8(sys.argv[1])  # libraries, kernels and scratch
before, peak, stop = anonymous(), 0, threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_int8(sys.argv[2])
stop.set()
watcher.join()
print(max(peak, anonymous()) - before)
"""


def test_memory_is_the_loaded_model_and_a_layer(tmp_path):
    """In BF16 the experts alone would take twice as much. In a process of its own, which has freed nothing before."""
    small, _ = written(tmp_path)
    path = demo.make_checkpoint(tmp_path / "demo", "int8")
    peak = int(subprocess.run([sys.executable, "-c", MEMORY, small, path], capture_output=True, check=True).stdout)
    loaded = load_int8(path)
    packed = [packed_of(loaded, i).nbytes for i in (0, 1)]
    dense = sum(tensor.nbytes for tensor in tensors_of(loaded).values())
    assert sum(packed) < peak < sum(packed) + dense + max(packed)


def changed(path, change):
    tiny_models.rewrite(path, change)
    return path


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


SHARED = "model.layers.1.mlp.shared_experts.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "the checkpoint has no tensor for model.norm.weight; download"),
        (without("model.layers.1.mlp.gate.weight"), "no tensor for model.layers.1.mlp.gate.weight"),
        (without(SHARED, f"{SHARED}_scale"), f"no tensor for {SHARED}"),
        (without(f"{SHARED}_scale"), f"'{SHARED}' is int8, but '{SHARED}_scale' is missing"),
        (without(EXPERT), f"tensor '{EXPERT}' is missing"),
        (without(f"{EXPERT}_scale"), f"tensor '{EXPERT}_scale' is missing"),
        (
            lambda tensors: {**tensors, "model.norm.weight": torch.ones(31)},
            r"tensors of another shape for model.norm.weight \(\[31\], expected \[32\]\)",
        ),
        (
            lambda tensors: {**tensors, f"{SHARED}_scale": torch.ones(1)},
            r"\(48, 32\) has a scale \(1,\), expected \[N, K\] and \[N, 1\]",
        ),
        (
            lambda tensors: {**tensors, EXPERT.replace("weight", "weight_zero_point"): torch.zeros(24, 1)},
            "weight_zero_point': of INT8 experts only weights and their scales are supported",
        ),
        (
            lambda tensors: {**tensors, EXPERT.replace("weight", "bias"): torch.zeros(24)},
            r"up_proj.bias': of INT8 experts only weights",
        ),
    ],
)
def test_damaged_checkpoints(change, message, tmp_path):
    path, _ = written(tmp_path, "deepseek_v3")
    with pytest.raises(CheckpointError, match=message):
        load_int8(changed(path, change))


def test_what_is_no_int8_checkpoint(tmp_path):
    path, plain = written(tmp_path)
    with pytest.raises(CheckpointError, match=r"not stored in INT8; .* prepare_\(model, dtype='int8'\)"):
        load_int8(plain)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        load_int8(tmp_path / "absent")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="FP8 weights are not supported"):
        load_int8(path)


def test_a_level_this_cpu_lacks_is_said_before_reading(tmp_path, monkeypatch):
    path, _ = written(tmp_path)
    monkeypatch.setattr(isa, "features", frozenset)
    monkeypatch.setattr(int8, "load_dense", None)
    with pytest.raises(tvm_moe.UnsupportedISAError, match="amx"):
        load_int8(path, isa="amx")


def test_a_dense_model_is_refused(tmp_path):
    path, _ = written(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0, 1]}))
    with pytest.raises(CheckpointError, match="describes a dense model"):
        load_int8(path)
