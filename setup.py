"""Builds the native kernels where a C++ compiler is present; the package installs without, too."""

import sysconfig
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/fenchel/_kernels/native")
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
SETS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"],
}


class build_native(build_ext):
    """The kernels once for each instruction set, then one shared library without Python's ABI."""

    def get_ext_filename(self, name: str) -> str:
        return f"{name.replace('.', '/')}.so"  # no tag of a Python: it holds no symbol of one

    def build_extension(self, extension: Extension) -> None:
        x86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))  # of what is compiled for
        sets = SETS if x86 else {"plain": []}  # on aarch64, plain is NEON with fused products
        objects = []
        for name, flags in sets.items():
            objects += self.compiler.compile(
                [str(NATIVE / "variant.cpp")],
                output_dir=f"{self.build_temp}/{name}",
                macros=[("FENCHEL_VARIANT", name)],
                extra_postargs=[*FLAGS, *flags],
                depends=extension.depends,
            )
        layout = zlib.crc32((NATIVE / "problem.h").read_bytes())  # as in structures.py
        objects += self.compiler.compile(
            [str(NATIVE / "entry.cpp")],
            output_dir=self.build_temp,
            macros=[("FENCHEL_LAYOUT", f"{layout}u")],
            extra_postargs=FLAGS,
            depends=extension.depends,
        )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            libraries=["dl", "pthread"],
            target_lang="c++",
        )


class platform_wheel(bdist_wheel):
    """Any Python 3, one platform: the library is loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "fenchel._kernels._native",
            sources=[str(NATIVE / "entry.cpp"), str(NATIVE / "variant.cpp")],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": build_native, "bdist_wheel": platform_wheel},
)
