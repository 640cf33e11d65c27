"""What pyproject.toml cannot say: with prebuilt modules a wheel is for one platform, and for every Python 3 there."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

PREBUILT = any((Path(__file__).parent / "tvm_moe" / "prebuilt").glob("*.so"))


class Package(Distribution):
    """Makes the wheel a binary one; there is no extension module to build."""

    def has_ext_modules(self) -> bool:
        return PREBUILT


class Wheel(bdist_wheel):
    """Modules are loaded with tvm_ffi: they do not know Python, let alone its version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=Package, cmdclass={"bdist_wheel": Wheel})
