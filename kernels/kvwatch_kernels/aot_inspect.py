"""Reads from compiled machine code what the ahead-of-time gate judges: registers, spills, matrix instructions, copies.

It knows the compilers' outputs (cubin, amdgcn text) and the tools in Triton's wheel, but no kernel and no limit.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_TOOL_SECONDS: Final = 60

_RESOURCES: Final = re.compile(r"REG:(\d+) STACK:(\d+)")
_SASS_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
# mma (HMMA, IMMA, ...), wgmma (HGMMA, ...), tcgen05 (UTCHMMA, ...): the letter is the type of the operands.
_SASS_MATRIX: Final = re.compile(r"(UTC)?[BDHIOQ]G?MMA")
# cp.async, a TMA load of a tensor, a TMA load of plain bytes
_SASS_COPIES: Final = frozenset({"LDGSTS", "UTMALDG", "UBLKCP"})
_SASS_SPILLS: Final = frozenset({"LDL", "STL"})
_AMD_FACT: Final = re.compile(r"\.(\w+):\s*(\d+)")
_AMD_MATRIX: Final = re.compile(r"^\s+v_s?mfma\w*", re.MULTILINE)
_AMD_COPY: Final = re.compile(r"^\s+(?:global_load_lds\w*|buffer_load\w*[^\n]*\blds\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one kernel became on one target."""

    registers: int
    """32-bit registers of one thread; on AMD vector and accumulation registers together."""
    spills: int
    """Bytes of stack of one thread, plus instructions (NVIDIA) or registers (AMD) that go there."""
    shared_bytes: int
    """Shared memory of one program."""
    matrix_instructions: int
    async_copies: int
    """Instructions that copy from global to shared memory without a detour through registers."""


class ToolError(RuntimeError):
    """A tool of the compiler is missing, failed, or printed what is not understood."""


def measure(asm: Mapping[str, str | bytes], shared_bytes: int) -> Measured:
    """Read what a compiled kernel became.

    Args:
        asm: `CompiledKernel.asm`: stages of the compilation by name.
        shared_bytes: `CompiledKernel.metadata.shared`.

    Raises:
        ToolError: the machine code cannot be read.
    """
    cubin, amdgcn = asm.get("cubin"), asm.get("amdgcn")
    if isinstance(cubin, bytes):
        return _measure_nvidia(cubin, shared_bytes)
    if isinstance(amdgcn, str):
        return _measure_amd(amdgcn, shared_bytes)
    raise ToolError(f"the compiler made {', '.join(asm)}: neither cubin nor amdgcn is among them")


def _measure_nvidia(cubin: bytes, shared_bytes: int) -> Measured:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        code = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
    resources = _RESOURCES.search(usage)
    instructions = Counter(_SASS_INSTRUCTION.findall(code))
    if resources is None or not instructions:
        raise ToolError(f"cuobjdump and nvdisasm print what is not understood: {usage[:200]!r}, {code[:200]!r}")
    return Measured(
        registers=int(resources[1]),
        spills=int(resources[2]) + sum(instructions[name] for name in _SASS_SPILLS),
        shared_bytes=shared_bytes,
        matrix_instructions=sum(count for name, count in instructions.items() if _SASS_MATRIX.fullmatch(name)),
        async_copies=sum(instructions[name] for name in _SASS_COPIES),
    )


def _measure_amd(text: str, shared_bytes: int) -> Measured:
    facts = {name: int(value) for name, value in _AMD_FACT.findall(text)}
    # Scalar registers that are short go to lanes of vector registers. Where those are short too, the segment shows it.
    spill_facts = ("private_segment_fixed_size", "vgpr_spill_count")
    if missing := {"vgpr_count", *spill_facts} - facts.keys():
        raise ToolError(f"the amdgcn text does not say {', '.join(sorted(missing))}")
    return Measured(
        # On gfx90a and later vgpr_count is the sum of both kinds.
        registers=facts["vgpr_count"],
        spills=sum(facts[name] for name in spill_facts),
        shared_bytes=shared_bytes,
        matrix_instructions=len(_AMD_MATRIX.findall(text)),
        async_copies=len(_AMD_COPY.findall(text)),
    )


def _output(*command: str) -> str:
    """Return what a tool prints.

    Raises:
        ToolError: it is missing, fails or hangs.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)  # noqa: S603  # the compiler's own tools
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolError(
            f"{command[0]} cannot be used ({error}); it comes with triton: install the extra `gpu`"
        ) from error
    return done.stdout
