"""One recorded launch, compiled for an architecture: shared memory, registers, spills."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .launches import OPTIONS, Launch

KIB = 1024
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int16: "i16",
    torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    name: str
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    serialized: bool  # whether ptxas gave up the asynchrony of matrix products
    unset: tuple[str, ...]  # instructions that read an unwritten uniform register: a miscompilation
    code: str = field(default="", repr=False)  # machine code in words, where it was asked for


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def compile_launch(launch: Launch, arch: str, *, read: bool = False) -> Compiled:
    """Compile a launch; `read` its machine code, too. Hopper's is always read."""
    given = {name: x for name, x in launch.arguments.items() if name not in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for n, parameter in enumerate(launch.kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(n,)] = value
        else:
            signature[parameter.name] = type_of(value)
            if isinstance(value, torch.Tensor):  # a GPU's allocations are aligned
                attributes[(n,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = language(launch.kernel, signature, constants, attributes)
    options = {name: launch.arguments[name] for name in OPTIONS if name in launch.arguments}
    kernel = triton.compile(source, target=target_of(arch), options=options)
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        counts = [int(n) for n in re.findall(r"\.vgpr_(?:spill_)?count:\s+(\d+)", kernel.asm["amdgcn"])]
        assert len(counts) == 2, counts
        return Compiled(launch.name, shared, counts[0], 4 * counts[1], False, (), kernel.asm["amdgcn"])
    log = assembled(kernel.asm["ptx"], arch)
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    # Only Hopper's warpgroup products take their operands' descriptors from uniform registers, as this reads them.
    code = disassembled(kernel.asm["cubin"]) if read or arch == "sm_90" else ""
    unset = unset_registers(code) if arch == "sm_90" else ()
    return Compiled(
        launch.name, shared, int(registers[1]), int(spilled[1]), "are serialized" in log, unset, code
    )  # fmt: skip


def assembled(ptx: str, arch: str) -> str:
    """The log of ptxas for a kernel."""
    named = re.search(r"\.target\s+(\w+)", ptx)
    assert named is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(int(arch[3:])).path, "-v", f"--gpu-name={named[1]}", str(source), "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        command = [str(TOOLS / "nvdisasm"), "-c", str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z0-9_.]+)\s*(?P<operands>.*?);")
WRITES_UNIFORM = ("U", "R2UR", "S2UR", "S2R", "REDUX", "VOTEU", "LDCU", "CS2UR")


def unset_registers(sass: str) -> tuple[str, ...]:
    """Instructions that read a uniform register before any instruction above them writes it.

    ptxas 12.8 compiles some wgmma whose second operand is 16 columns wide like that: the operand's descriptor is then
    garbage, and the kernel reads outside its shared memory.
    """
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        if (match := INSTRUCTION.search(line)) is None:
            continue
        name, operands = match["name"], match["operands"]
        registers = [int(n) for n in re.findall(r"\bUR(\d+)\b", operands)]
        writes = re.match(r"UR(\d+)\b", operands) if name.startswith(WRITES_UNIFORM) else None
        for register in registers[1:] if writes else registers:
            first = register + 2 if f"gdesc[UR{register}]" in operands else register  # the upper half is operand B
            needed = {first, first + 1} if f"desc[UR{register}]" in operands else {first}
            if not needed <= written:
                found.append(f"{name} {operands}")
                written |= needed
        if writes:
            register = int(writes[1])
            written |= {register, register + 1} if ".64" in name or ".WIDE" in name else {register}
    return tuple(found)
