"""Kernels compiled for devices that are not here, and what the compilers say of them.

`compiled_for` runs host code as it is, on tensors of the device `meta`: the launches that it makes
are compiled with the types, constants and options that a device would get, but not run. So there is
no list of kernels to keep, and host code that reads a value fails.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fenchel._kernels.gpu import configurations, shapes

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Device:
    """A kind of device. shared: bytes of shared memory that one program may have."""

    name: str
    target: GPUTarget
    shared: int
    has_bfloat16: bool = True

    @property
    def architecture(self) -> str:
        """As the table of configurations calls it."""
        return configurations.HIP if self.target.backend == "hip" else self.name


def _nvidia(capability: int, kilobytes: int, has_bfloat16: bool = True) -> Device:
    target = GPUTarget("cuda", capability, 32)
    return Device(f"sm_{capability}", target, kilobytes * 1024, has_bfloat16)


# Shared memory: CUDA C++ Programming Guide, table of technical specifications per capability; AMD:
# 64 kB of LDS for a work group.
DEVICES = {
    device.name: device
    for device in (
        _nvidia(75, 64, has_bfloat16=False),
        _nvidia(80, 163),
        _nvidia(90, 227),
        _nvidia(100, 227),
        Device("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
        Device("gfx1100", GPUTarget("hip", "gfx1100", 32), 64 * 1024),
    )
}


@dataclass(frozen=True)
class Compiled:
    """A compiled launch. code: Triton's object."""

    kernel: str
    device: Device
    code: Any

    @property
    def shared(self) -> int:
        return int(self.code.metadata.shared)

    @cached_property
    def spilled(self) -> int:
        """Bytes, or on AMD registers, of what did not fit into the registers of a thread.

        AMD's scalar registers are not counted: what does not fit goes to lanes of vector registers,
        not to memory.
        """
        if self.device.target.backend == "hip":
            kinds = ("vgpr_spill_count", "private_segment_fixed_size")
            return sum(self._read(rf"\.{kind}:\s+(\d+)") for kind in kinds)
        return self._usage("STACK") + self._usage("LOCAL")

    @property
    def registers(self) -> int:
        hip = self.device.target.backend == "hip"
        return self._read(r"\.vgpr_count:\s+(\d+)") if hip else self._usage("REG")

    def _read(self, pattern: str) -> int:
        found = re.search(pattern, self.code.asm["amdgcn"])
        assert found is not None, f"no {pattern} in the code of {self.kernel}"
        return int(found.group(1))

    def _usage(self, name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", self._resources)
        assert found is not None, f"no {name} in {self._resources}"
        return int(found.group(1))

    @cached_property
    def _resources(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code.asm["cubin"])
            file.flush()
            command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
        return result.stdout

    def check(self) -> None:
        """Nothing spilled, and shared memory within the device's."""
        said = f"{self.kernel} on {self.device.name}"
        assert self.spilled == 0, f"{said} spills {self.spilled}"
        limit = self.device.shared
        assert self.shared <= limit, f"{said} takes {self.shared} bytes of shared memory > {limit}"


class _Absent:
    """What Triton asks of a device, answered for one that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        return self._target  # kernels are kept by device

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def compiled_for(name: str) -> Iterator[list[Compiled]]:
    """Inside the block launches are compiled for this device. Yields them, each kernel once."""
    device, launches, run = DEVICES[name], {}, JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        code = run(self, *arguments, grid=grid, warmup=True, **options)
        launches[code.hash] = Compiled(self.fn.__name__, device, code)

    collected: list[Compiled] = []
    driver.set_active(_Absent(device.target))
    JITFunction.run, asked = compile_only, shapes.architecture
    shapes.architecture = lambda _: device.architecture
    try:
        yield collected
    finally:
        JITFunction.run, shapes.architecture = run, asked
        collected.extend(launches.values())
