"""The command line itself: start-up, options that all commands share."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

from tvm_moe import MoEError, SlowPathWarning, cli


def test_help_is_fast():
    """It loads nothing heavy."""
    code = "import sys, tvm_moe.cli; sys.exit(bool({'torch', 'tvm', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "x", "--json"], ["run", "x", "--json=-"]),
        (["run", "--json", "--tokens", "2", "x"], ["run", "--json=-", "--tokens", "2", "x"]),
        (["run", "x", "--json", "-"], ["run", "x", "--json", "-"]),
        (["run", "x", "--json", "file"], ["run", "x", "--json", "file"]),
        (["run", "x", "--json=file"], ["run", "x", "--json=file"]),
    ],
)
def test_json_needs_no_value(args, expected):
    assert cli.with_json_value(args) == expected


def test_parse_layers():
    assert cli.parse_layers("0,2,5-7") == [0, 2, 5, 6, 7]
    assert cli.parse_layers(None) is None


@pytest.mark.filterwarnings("default::tvm_moe.errors.SlowPathWarning")
def test_warnings_are_notes(monkeypatch, tmp_path):
    def warn(path):
        warnings.warn("building something", SlowPathWarning, stacklevel=1)
        raise MoEError("two\nlines")

    monkeypatch.setattr("tvm_moe.checkpoint.open", warn)
    outcome = CliRunner().invoke(cli.app, ["run", str(tmp_path)])
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.split("\n")[-3:] == ["note: building something", "error: two lines", ""]


def test_no_arguments_show_the_help():
    outcome = CliRunner().invoke(cli.app, [])
    assert "Usage" in outcome.output
    assert not isinstance(outcome.exception, ValueError)


def test_a_range_of_layers_that_ends_before_it_begins():
    with pytest.raises(MoEError, match="--layers is '1-0'"):
        cli.parse_layers("1-0")


@pytest.mark.parametrize(
    ("name", "arch"),
    [("aarch64-linux-gnu", "aarch64"), ("x86_64-unknown-linux-gnu", "x86_64"), ("aarch64-apple-darwin", None)],
)
def test_triples_of_an_architecture(name, arch, monkeypatch, tmp_path):
    """Modules are for Linux with glibc; a triple of another system is not cut down to its architecture."""
    asked = []
    monkeypatch.setattr("tvm_moe.modules.require_compiler", lambda what: asked.append(what) or sys.exit(7))
    outcome = CliRunner().invoke(cli.app, ["build", "--mtriple", name, "--out", str(tmp_path / "out")])
    assert outcome.exit_code == (7 if arch else 2)
    assert asked == ([f"{arch} modules"] if arch else [])
