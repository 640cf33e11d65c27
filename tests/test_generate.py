"""`tvm-moe generate`, and the small model that is trained to show it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from tests import tiny_models
from tests.test_checkpoint_int8 import compress
from tvm_moe import MoEError, cli, generate, small_model

transformers = pytest.importorskip("transformers", minversion="5")
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of bytes, with its tokenizer."""
    made = tmp_path_factory.mktemp("model")
    model = small_model.make(**TINY)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(made)
    transformers.ByT5Tokenizer().save_pretrained(made)
    (made / "held-out.txt").write_text("Some text, and some more of it.")
    return made


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["generate", *map(str, arguments)])


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_text_speed_and_bits_of_both_sides(folder, dtype, tmp_path):
    done = invoke(
        folder, "--dtype", dtype, "--prompt", "for x", "--new-tokens", 6, "--compare", "eager", "--rounds", 1,
        "--held-out", folder / "held-out.txt", "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    ours, theirs = found["sides"]
    assert (ours["name"], theirs["name"]) == ("tvm_moe", "eager")
    assert f"packed 1 MoE layer" in done.output  # noqa: F541
    for side in found["sides"]:
        assert len(side["tokens"]) == 6
        assert side["prefill"] > 0
        assert side["decode"] > 0
        assert 0 < side["experts"] < 1
    # An untrained model of 384 tokens spends about their logarithm on each byte, whoever runs its experts.
    assert abs(ours["bits_per_byte"] - math.log2(384)) < 0.5
    assert abs(ours["bits_per_byte"] - theirs["bits_per_byte"]) < 0.05
    assert "bits per byte" in done.output


def test_the_text_is_that_of_transformers(folder):
    """BF16 of ours against its own greedy text, as far as both choose the same."""
    found = generate.generate(str(folder), "bf16", "abc", new_tokens=8, compare="eager", rounds=1)
    ours, theirs = (side["tokens"] for side in found["sides"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = small_model.encode(b"abc")[None]
    want = model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8)[0, 3:].tolist()
    assert theirs == want
    assert ours[0] == want[0]


def test_a_checkpoint_stored_in_int8(tmp_path):
    tiny_models.make("qwen3_moe", vocab_size=384).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    compress(tmp_path)
    found = generate.generate(str(tmp_path), "int8", "abc", new_tokens=3, rounds=1)
    assert found["packed"] == "as stored"
    assert len(found["sides"][0]["tokens"]) == 3
    with pytest.raises(MoEError, match="is stored in INT8 and runs as it is: --dtype int8"):
        generate.generate(str(tmp_path), "bf16", "abc")


def test_a_model_without_a_tokenizer(tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(MoEError, match=r"no tokenizer|no model that transformers can open"):
        generate.generate(str(tmp_path), "bf16", "abc")


def test_one_token_has_no_decode_speed(folder):
    found = generate.generate(str(folder), "bf16", "abc", new_tokens=1, rounds=2)
    assert found["sides"][0]["decode"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-folder", "--prompt", "a"), "no-such-folder: no model that transformers can open"),
        (("FOLDER", "--prompt", ""), "the prompt has no tokens; give at least one character"),
        (("FOLDER", "--prompt", "a", "--new-tokens", "1024"), "are 1025 together, this model takes at most 1024"),
        (("FOLDER", "--prompt", "a", "--compare", "magic"), "--compare magic: "),
        (("FOLDER", "--prompt", "a", "--held-out", "none.txt"), "--held-out none.txt: cannot be read"),
        (("FOLDER", "--prompt", "a", "--isa", "sse9"), "isa='sse9' is no level of"),
    ],
)
def test_bad_arguments(folder, arguments, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = invoke(*(folder if a == "FOLDER" else a for a in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.output.splitlines()[-1]


def test_training_lowers_the_bits(tmp_path):
    torch.manual_seed(0)
    model, data, seen = small_model.make(**TINY), small_model.text(), []
    small_model.train(model, data[:4096], steps=12, batch=4, progress=lambda step, bits: seen.append(bits))
    assert len(seen) == 12
    assert seen[-1] < seen[0] - 0.5
    assert not model.training


def test_bits_per_byte_are_those_of_the_definition():
    model, tokens = small_model.make(**TINY), small_model.encode(b"to be or not to be")
    with torch.inference_mode():
        logits = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
    want = -logits[:-1].gather(1, tokens[1:, None]).mean().item() / math.log(2)
    assert small_model.bits_per_byte(model, tokens) == pytest.approx(want, rel=1e-5)
    # Two tokens for each byte: twice the bits a byte.
    assert small_model.bits_per_byte(model, tokens, len(tokens) // 2) == pytest.approx(2 * want, rel=1e-5)
    with pytest.raises(MoEError, match="at least two tokens"):
        small_model.bits_per_byte(model, tokens[:1])


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(MoEError, match="exists; remove it or give another folder"):
        small_model.write(tmp_path, steps=1)
