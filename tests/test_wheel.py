"""The wheel, installed where nothing but its dependencies is: its modules serve, and nothing is built or written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tvm_moe import ModuleError, isa, kernels, modules, wheel

ROOT = Path(__file__).parent.parent
ARCH = isa.machine()
ROWS = [k for k in kernels.TABLE if ARCH in k.arches]
NAMES = [modules.filename(row, ARCH) for row in (None, *ROWS)]
SHIPPED = sorted([*NAMES, *(name.replace(".so", ".json") for name in NAMES)])

SERVE = """
import importlib.util, json, pathlib, shutil, sys
import helpers, tvm_moe
from tvm_moe import cache, isa, kernels

def never():
    raise AssertionError("the sources of modules were read")

cache.source_hash = never
explained = {}
for kernel in filter(lambda k: isa.executable(k)[0], kernels.TABLE):
    case = helpers.make_case(dtype=kernel.dtype, bias=True)
    packed = case.pack(kernel)
    helpers.assert_matches_reference(case.run(packed), case)
    explained[kernel.key] = tvm_moe.explain(packed)
compilers = [name for name in ("cc", "gcc", "g++", "clang", "ld") if shutil.which(name)]
print(json.dumps({
    "package": str(pathlib.Path(tvm_moe.__file__).parent), "explained": explained, "compilers": compilers,
    "tvm": importlib.util.find_spec("tvm") is not None, "compiler": "tvm_moe.compiler" in sys.modules,
}))
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of the checkout with this machine's modules: those that tests have in the cache, keyed by their sources."""
    folder = tmp_path_factory.mktemp("checkout")
    prebuilt = wheel.copy_checkout(folder)
    prebuilt.mkdir()
    for path in (modules.find_cpu(), *map(modules.find, ROWS)):
        for suffix in (".so", ".json"):
            shutil.copy2(path.with_suffix(suffix), prebuilt)
    return folder


@pytest.fixture(scope="session")
def made(checkout, tmp_path_factory):
    """The wheel."""
    prebuilt = checkout / "tvm_moe" / "prebuilt"
    return wheel.pack(checkout, wheel.platform(prebuilt, ARCH), tmp_path_factory.mktemp("dist"))


def dependencies(package):
    """The distributions that ``package`` needs, and those that they need."""
    found, wanted = {}, [package]
    while wanted:
        for text in importlib.metadata.requires(wanted.pop()) or ():
            needed = Requirement(text)
            name = canonicalize_name(needed.name)
            if name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                found[name] = importlib.metadata.distribution(name)
                wanted.append(name)
    return found


def link(distribution, site):
    """Lend a package of the running environment to another one."""
    for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        (site / name).symlink_to(distribution.locate_file(name))


@pytest.fixture(scope="session")
def python(made, tmp_path_factory):
    """An environment with the wheel and its dependencies alone; pip checks that they are all there."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in dependencies("tvm_moe").values():
        link(distribution, site)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet"]
    subprocess.run([*pip, "install", "--no-index", str(made)], check=True)
    subprocess.run([*pip, "check"], check=True)
    return python


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def served(python, home, tmp_path_factory):
    """What a process says that ran every kernel of this CPU, with no compiler on its PATH."""
    folder = tmp_path_factory.mktemp("serve")
    shutil.copy(ROOT / "tests" / "helpers.py", folder)
    (folder / "serve.py").write_text(SERVE)
    environment = {"HOME": str(home), "PATH": str(python.parent), "OMP_WAIT_POLICY": "passive"}
    command = [str(python), "-W", "error::UserWarning:tvm_moe", str(folder / "serve.py")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_layers_are_served_without_a_compiler(served):
    assert served["compilers"] == []
    assert not served["tvm"]
    assert not served["compiler"]
    assert set(served["explained"]) == {k.key for k in ROWS if isa.executable(k)[0]}


def test_the_packaged_modules_serve(served, python):
    folder = Path(served["package"]) / "prebuilt"
    assert folder.is_relative_to(python.parent.parent)
    for key, text in served["explained"].items():
        (line,) = [line for line in text.splitlines() if "served by" in line]
        assert line.endswith(f"module {folder / f'{ARCH}-{key}.so'}")
        assert "to be built" not in text
        assert "REFUSED" not in text
        assert "slow path" not in text


def test_nothing_is_written(served, home):
    assert list(home.iterdir()) == []
    folder = Path(served["package"]) / "prebuilt"
    assert sorted(p.name for p in folder.iterdir()) == SHIPPED


def test_the_tag_is_that_of_the_machine_code(made):
    assert made.name.endswith(f"-py3-none-manylinux_2_28_{ARCH}.whl")
    archive = ZipFile(made)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: false" in archive.read(name).decode()


def test_sizes(made):
    assert made.stat().st_size < wheel.LIMIT
    lines = wheel.sizes(made)
    assert [line.split()[1] for line in lines] == [*SHIPPED, str(made)]
    assert lines[-1].split()[0] == f"{made.stat().st_size:,}"


def test_files_carry_no_paths_of_the_machine_that_built_them(made, checkout):
    """Neither folders nor names of temporary files."""
    private = [str(p).encode() for p in (ROOT, checkout, modules.cache_folder().parent, Path(sys.prefix))]
    archive = ZipFile(made)
    for name in archive.namelist():
        content = archive.read(name)
        assert [p for p in [*private, b"/.build-", b"/tmp/tmp"] if p in content] == [], name


def test_the_same_files_give_the_same_bytes(made, checkout, tmp_path):
    """In any folder and for any user, whatever the umask and the permissions and times of the files."""
    umask = os.umask(0o007)
    try:
        prebuilt = wheel.copy_checkout(tmp_path / "a clone")
        shutil.copytree(checkout / "tvm_moe" / "prebuilt", prebuilt, copy_function=shutil.copy)
        again = wheel.pack(tmp_path / "a clone", wheel.platform(prebuilt, ARCH), tmp_path)
    finally:
        os.umask(umask)
    assert again.read_bytes() == made.read_bytes()


def test_a_wheel_without_modules_is_for_any_machine(tmp_path):
    """What pip builds from a clone: the first use compiles."""
    wheel.copy_checkout(tmp_path / "clone")
    made = wheel.pack(tmp_path / "clone", None, tmp_path)
    assert made.name.endswith("-py3-none-any.whl")
    names = ZipFile(made).namelist()
    assert [n for n in names if "prebuilt" in n] == []
    assert {"tvm_moe/compiler/build.py", "tvm_moe/schedules/skeleton.py", "tvm_moe/py.typed"} <= set(names)


def test_a_checkout_that_holds_modules_packs_none_of_them(monkeypatch, tmp_path):
    """They may be older than the sources."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "tvm_moe", root / "tvm_moe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in wheel.FILES:
        shutil.copy(ROOT / name, root)
    (root / "tvm_moe" / "prebuilt").mkdir(exist_ok=True)
    monkeypatch.setattr(wheel, "ROOT", root)
    assert not wheel.copy_checkout(tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"\0memset\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.3\0", (2, 34)),
        (b"\0GLIBC_2.17\0GLIBC_ABI_DT_RELR\0", (2, 36)),
        (b"memset@GLIBC_2.99 \0XGLIBC_2.98\0", (2, 0)),
    ],
)
def test_needed_glibc(content, version, tmp_path):
    (tmp_path / "a.so").write_bytes(content)
    assert wheel.glibc(tmp_path / "a.so") == version
    major, minor = max(version, wheel.GLIBC)
    assert wheel.platform(tmp_path, "aarch64") == f"manylinux_{major}_{minor}_aarch64"


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
def test_needed_glibc_is_what_objdump_says(checkout):
    for file in (checkout / "tvm_moe" / "prebuilt").glob("*.so"):
        shown = subprocess.run(["objdump", "-T", str(file)], capture_output=True, text=True, check=True).stdout
        names = {word.strip("()") for word in shown.split() if "GLIBC_" in word}
        assert wheel.glibc(file) == max(tuple(map(int, n.split("_")[1].split(".")[:2])) for n in names)


def test_what_cannot_be_built(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ModuleError, match=r"cannot build a wheel into .*file: File exists; name another folder"):
        wheel.build(tmp_path / "file")
    with pytest.raises(ModuleError, match=r"unknown architecture 'riscv64'; expected one of"):
        wheel.build(tmp_path / "out", "riscv64")
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(wheel, "LIMIT", 1000)
    wheel.copy_checkout(tmp_path / "clone")
    with pytest.raises(ModuleError, match=r"whl has [\d,]+ bytes, more than 1,000"):
        wheel.pack(tmp_path / "clone", None, tmp_path)
    (tmp_path / "clone" / "setup.py").write_text("raise SystemExit('no wheel today')")
    with pytest.raises(ModuleError, match=r"(?s)pip cannot build the wheel: .*no wheel today"):
        wheel.pack(tmp_path / "clone", None, tmp_path)
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    with pytest.raises(ModuleError, match=r"built from a checkout; .* has no pyproject.toml, setup.py.*: clone"):
        wheel.copy_checkout(tmp_path / "copy")


def test_the_tuners_work_stays_behind(tmp_path, monkeypatch):
    """MetaSchedule's whole database lies beside the logs of a checkout that has tuned: twice the rest of the wheel."""
    log = tmp_path / "root" / "tvm_moe" / "tune_logs" / "cpu"
    (log / "work").mkdir(parents=True)
    for file in (log / "work" / "database.json", log / "manifest.json", *(tmp_path / "root" / n for n in wheel.FILES)):
        file.write_text("{}")
    monkeypatch.setattr(wheel, "ROOT", tmp_path / "root")
    (tmp_path / "copy").mkdir()
    wheel.copy_checkout(tmp_path / "copy")
    copied = tmp_path / "copy" / "tvm_moe" / "tune_logs" / "cpu"
    assert [path.name for path in copied.iterdir()] == ["manifest.json"]
