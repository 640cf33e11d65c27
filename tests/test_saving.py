"""Packed files: mapped back with equal results, moved to other levels, and refused when they are not what they seem."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tvm_moe import ModuleError, MoEError, PackedExperts, UnsupportedISAError, isa, kernels
from tvm_moe.experts import load_model, save_model

F32 = torch.float32


def stored_case(kernel, **options):
    """A case whose weights the kernel stores exactly, so that it may be repacked without loss."""
    return make_case(T=9, H=66, I=35, bias=True, weights="int8" if kernel.dtype == "int8" else "bf16", **options)


@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_a_saved_layer_is_mapped_back(kernel, options, tmp_path):
    case, path = stored_case(kernel, **options), tmp_path / "layer.safetensors"
    packed = case.pack(kernel)
    packed.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]
    loaded = PackedExperts.load(path, kernel.isa)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert repr(loaded) == repr(packed)
    assert loaded.layer.activation == packed.layer.activation
    assert torch.equal(case.run(loaded), case.run(packed))


def test_a_file_may_be_replaced_while_it_is_mapped(kernel, tmp_path):
    case, path = stored_case(kernel), str(tmp_path / "layer.safetensors")
    case.pack(kernel).save(path)
    loaded, want = PackedExperts.load(path, kernel.isa), case.run(case.pack(kernel))
    loaded.save(path)
    assert torch.equal(case.run(loaded), want)
    assert torch.equal(case.run(PackedExperts.load(path, kernel.isa)), want)
    stored_case(kernel, seed=1).pack(kernel).save(path)
    assert torch.equal(case.run(loaded), want)


def test_a_failed_save_leaves_the_old_file(kernel, tmp_path, monkeypatch):
    case, path = stored_case(kernel), tmp_path / "layer.safetensors"
    packed = case.pack(kernel)
    packed.save(path)

    def full(tensors, file, **_):
        Path(file).write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr("tvm_moe.packed_file.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        packed.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]
    assert torch.equal(case.run(PackedExperts.load(path, kernel.isa)), case.run(packed))


@pytest.mark.parametrize(
    "options", [{}, {"activation": "swigluoai", "interleaved": True}, {"activation": "relu2"}], ids=str
)
def test_another_level_repacks(kernel, options, tmp_path):
    case, path = stored_case(kernel, **options), tmp_path / "layer"
    case.pack(kernel).save(path)
    for other in kernels.rows_for(isa.machine(), kernel.dtype):
        if isa.executable(other)[0]:
            loaded = PackedExperts.load(path, other.isa)
            assert loaded.isa == other.isa
            assert torch.equal(case.run(loaded), case.run(case.pack(other)))
            assert_matches_reference(case.run(loaded), case)


def test_a_level_this_cpu_lacks(kernel, tmp_path, monkeypatch):
    """Where it was packed for more than this CPU has: repacked. Where that is demanded: refused."""
    case, path = stored_case(kernel), tmp_path / "layer"
    case.pack(kernel).save(path)
    monkeypatch.setattr(isa, "features", frozenset)
    loaded = PackedExperts.load(path)
    assert loaded.isa == "generic"
    assert_matches_reference(case.run(loaded), case)
    if kernel.features:
        with pytest.raises(UnsupportedISAError, match=f"isa='{kernel.isa}' needs the CPU features"):
            PackedExperts.load(path, kernel.isa)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "layer.safetensors"
    make_case(E=2, H=66, I=35, weights="int8").pack().save(path)
    return path


def rewrite(path, change):
    """Save the file again after ``change(tensors, metadata)``."""
    with safe_open(path, framework="pt") as file:
        tensors, meta = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, meta)
    save_file(tensors, path, metadata=meta)


def sizes(meta, **changes):
    meta["sizes"] = json.dumps(json.loads(meta["sizes"]) | changes)


FOREIGN = {
    "no metadata": (lambda t, m: m.clear(), "no packed experts file: format None"),
    "another format": (lambda t, m: m.update(format="tvm_moe packed experts 9"), "experts 9.*experts 1"),
    "unknown kernel": (lambda t, m: m.update(kernel="fp4_1x1"), "packed for 'fp4_1x1'"),
    "no kernel": (lambda t, m: m.pop("kernel"), "packed for None"),
    "no sizes": (lambda t, m: m.pop("sizes"), "damaged or foreign.*sizes"),
    "sizes that are no JSON": (lambda t, m: m.update(sizes="{"), "damaged or foreign"),
    "sizes that are a list": (lambda t, m: m.update(sizes="[1]"), "damaged or foreign"),
    "a size that is text": (lambda t, m: sizes(m, hidden="66"), "damaged or foreign"),
    "a size that is negative": (lambda t, m: sizes(m, hidden=-66), "damaged or foreign.*hidden is -66"),
    "a size too many": (lambda t, m: sizes(m, depth=3), "damaged or foreign.*depth"),
    "other sizes": (lambda t, m: sizes(m, intermediate=400), "tensor w13 is .*expected"),
    "more experts": (lambda t, m: sizes(m, experts=3), "tensor w13 is .*expected"),
    "a bias that does not exist": (lambda t, m: sizes(m, bias2=True), "tensor bias2 is .*expected"),
    "no activation": (lambda t, m: m.pop("activation"), "damaged or foreign.*activation"),
    "unknown activation": (lambda t, m: m.update(activation='["mish", 1.0, "inf"]'), "damaged or foreign.*mish"),
    "a limit of nothing": (lambda t, m: m.update(activation='["silu", 1.0, "none"]'), "damaged or foreign"),
    "a missing tensor": (lambda t, m: t.pop("start2"), "tensor start2 is None, expected"),
    "a shorter tensor": (lambda t, m: t.update(w2=t["w2"][:1].clone()), r"tensor w2 is \(1, .*expected .*\(2, "),
    "another dtype": (lambda t, m: t.update(scale2=t["scale2"].double()), "tensor scale2 is .*expected .*float32"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused(saved, case):
    change, message = FOREIGN[case]
    rewrite(saved, change)
    with pytest.raises(ModuleError, match=message) as error:
        PackedExperts.load(saved)
    assert saved.name in str(error.value)


@pytest.mark.parametrize("kept", [0, 7, 100, 2000, -1])
def test_truncated_files_are_refused(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(ModuleError, match=r"layer.safetensors is damaged or foreign"):
        PackedExperts.load(saved)


@pytest.mark.parametrize("content", [b"\x7fELF" * 100, b"PK\x03\x04" + b"\0" * 99, b"\xff" * 4096])
def test_other_kinds_of_files_are_refused(saved, content):
    saved.write_bytes(content)
    with pytest.raises(ModuleError, match="damaged or foreign"):
        PackedExperts.load(saved)


def test_no_file_at_all(tmp_path):
    with pytest.raises(ModuleError, match="no packed experts file"):
        PackedExperts.load(tmp_path / "absent")
    with pytest.raises(ModuleError, match="no packed experts file"):
        PackedExperts.load(tmp_path)


def test_whole_models(tmp_path):
    cases = {0: make_case(seed=0), 3: make_case(seed=3, weights="int8"), 12: make_case(seed=12, activation="gelu")}
    save_model(tmp_path / "new" / "folder", {i: case.pack() for i, case in cases.items()})
    loaded = load_model(tmp_path / "new" / "folder")
    assert next(loaded)[0] == 0  # one by one
    for i, packed in loaded:
        assert torch.equal(cases[i].run(packed), cases[i].run(cases[i].pack()))
    assert [i for i, _ in load_model(tmp_path / "new" / "folder", "generic")] == [0, 3, 12]


@pytest.mark.parametrize(
    "index", [None, "{", "[]", "{}", '{"layers": 3}', '{"layers": {"a": "layer-00000.safetensors"}}']
)
def test_an_index_that_is_none(tmp_path, index):
    save_model(tmp_path, {0: make_case().pack()})
    (tmp_path / "packed.json").unlink() if index is None else (tmp_path / "packed.json").write_text(index)
    with pytest.raises(ModuleError, match=r"packed.json: no readable index of packed layers"):
        list(load_model(tmp_path))


def test_a_missing_layer(tmp_path):
    save_model(tmp_path, {0: make_case().pack(), 1: make_case().pack()})
    (tmp_path / "layer-00001.safetensors").unlink()
    with pytest.raises(ModuleError, match=r"no packed experts file .*layer-00001"):
        list(load_model(tmp_path))


def test_limits_survive(tmp_path):
    for options in ({}, {"limit": 0.1}, {"activation": "swigluoai", "alpha": 1 / 3, "limit": 1e30}):
        packed = make_case(**options).pack()
        packed.save(tmp_path / "layer")
        assert PackedExperts.load(tmp_path / "layer").layer.activation == packed.layer.activation
    assert make_case().pack().layer.activation.limit == math.inf


def test_copies_are_the_same_and_pickling_names_the_way_out(kernel):
    packed = make_case(dtype=kernel.dtype).pack(kernel)
    assert copy.deepcopy(packed) is packed
    assert copy.copy(packed) is packed
    with pytest.raises(MoEError, match="use save"):
        pickle.dumps(packed)


def test_saving_into_no_folder(kernel, tmp_path):
    with pytest.raises(MoEError, match="there is no folder"):
        make_case(dtype=kernel.dtype).pack(kernel).save(tmp_path / "absent" / "file")


@pytest.mark.isa("avx512_vnni", "int8")
def test_loading_honours_the_cap(monkeypatch, tmp_path):
    case = make_case(dtype="int8")
    case.pack(kernels.find("avx512_vnni", "int8")).save(tmp_path / "packed")
    monkeypatch.setenv(isa.ENVIRONMENT, "generic")
    assert PackedExperts.load(tmp_path / "packed").isa == "generic"


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": {"bias13": 5}},
        {"sizes": {"gated": False}},
        {"sizes": {"experts": 4.0}},
        {"activation": ["relu2", 1.0, "inf"]},
        {"activation": ["silu", 1.0, "-5"]},
        {"activation": ["swigluoai", float("inf"), "7.0"]},
    ],
    ids=str,
)
def test_metadata_that_does_not_fit_is_refused(changes, tmp_path):
    file = tmp_path / "packed"
    make_case(dtype="bf16").pack().save(file)
    with safe_open(file, framework="pt") as opened:
        meta, tensors = opened.metadata(), {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    for key, value in changes.items():
        meta[key] = json.dumps(json.loads(meta[key]) | value if key == "sizes" else value)
    save_file(tensors, file, metadata=meta)
    with pytest.raises(ModuleError, match="damaged or foreign"):
        PackedExperts.load(file)


def test_only_regular_files_are_replaced(tmp_path):
    packed = make_case(dtype="bf16").pack()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MoEError, match="no regular file"):
        packed.save(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    packed.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert PackedExperts.load(tmp_path / "target").nbytes == packed.nbytes
