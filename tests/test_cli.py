"""The command line itself: start-up, options that all commands share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tvm_moe import cli


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
