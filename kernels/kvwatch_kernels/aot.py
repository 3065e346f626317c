"""The ahead-of-time gate: compiles every shipped kernel for every target, and judges the machine code, with no GPU.

    python -m kvwatch_kernels.aot            a table; exit status 1 when a gate fails
    python -m kvwatch_kernels.aot --json     the same for machines
    python -m kvwatch_kernels.aot --write    also refreshes the table in kernels/README.md

What is compiled is what run time launches: `triton/configurations.py` derives its list from the launch table. This
module knows targets and limits, and nothing of the kernels' insides; it says nothing about results or speed.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwatch_kernels.aot_inspect import Measured, ToolError, measure
from kvwatch_kernels.aot_table import as_table, write_table

if TYPE_CHECKING:
    from kvwatch_kernels.triton.configurations import Configuration


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU, and what a kernel may take of it."""

    name: str
    backend: str
    """`cuda` or `hip`"""
    arch: int | str
    warp_size: int
    max_registers: int
    """Below what the compiler may give one thread, so that reaching the ceiling shows before it spills."""
    max_shared_bytes: int
    """Shared memory that one program can have."""


TARGETS: Final = (
    Target("sm_80", "cuda", 80, 32, 248, 163 * 1024),
    Target("sm_89", "cuda", 89, 32, 248, 99 * 1024),
    Target("sm_90", "cuda", 90, 32, 248, 227 * 1024),
    Target("sm_100", "cuda", 100, 32, 248, 227 * 1024),
    Target("gfx942", "hip", "gfx942", 64, 256, 64 * 1024),  # with more than 256 one wave has the SIMD to itself
)

EXPECTED_FAILURES: Final = {
    ("sm_80", "fp8e4nv"): "type fp8e4nv not supported in this architecture",
}
"""(target, Triton's name of an element type) -> what the compiler says when a kernel has a pointer to it.

The conversion exists from sm_89 on. An entry that compiles all the same fails the gate: it is then out of date.
"""


CONVERTS_E4M3: Final = frozenset(target.name for target in TARGETS) - {name for name, _ in EXPECTED_FAILURES}
"""Targets on which run time leaves the conversion to the device, and never takes the kernels that shift bits for it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One configuration on one target."""

    configuration: str
    target: str
    measured: Measured | None
    """None: it does not compile."""
    problems: tuple[str, ...]
    """Why the gate fails; empty when it passes."""
    expected_failure: str | None = None
    """It does not compile, and need not: what the compiler says."""
    is_launched: bool = True
    """False: run time never launches it on this target, so it was not compiled."""


def examine(configuration: "Configuration", target: Target) -> Finding:
    """Compile one configuration for one target, and judge it."""
    name = configuration.name
    if configuration.constants.get("E4M3_BITS") and target.name in CONVERTS_E4M3:
        return Finding(name, target.name, None, (), is_launched=False)
    expected = _expected_failure(configuration, target)
    try:
        measured = _compile(configuration, target)
    except ToolError:
        raise
    except Exception as error:  # compilers raise every kind
        message = _whole_message(error)
        if expected is not None and expected in message:
            return Finding(name, target.name, None, (), expected)
        return Finding(name, target.name, None, (f"does not compile: {' '.join(message.split())}",))
    if expected is not None:
        return Finding(name, target.name, measured, (f"compiles, but was expected to fail with {expected!r}",))
    return Finding(name, target.name, measured, _problems(configuration, target, measured))


def _compile(configuration: "Configuration", target: Target) -> Measured:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(configuration.kernel, configuration.signature, configuration.constants, configuration.attributes)
    options: dict[str, Any] = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": True,  # as at run time; Triton warns where it is left open
    }
    compiled = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
    return measure(compiled.asm, compiled.metadata.shared)


def _problems(configuration: "Configuration", target: Target, measured: Measured) -> tuple[str, ...]:
    """Return every gate that a kernel fails."""
    problems = []
    if measured.spills:
        problems.append(f"spills ({measured.spills}): smaller tiles, fewer stages or more warps")
    if measured.registers > target.max_registers:
        problems.append(f"{measured.registers} registers, at most {target.max_registers}")
    if measured.shared_bytes > target.max_shared_bytes:
        problems.append(f"{measured.shared_bytes} bytes of shared memory, at most {target.max_shared_bytes}")
    if configuration.expects_mma and not measured.matrix_instructions:
        problems.append("no matrix instruction")
    if configuration.expects_async_copy and target.backend == "cuda" and not measured.async_copies:
        problems.append("no asynchronous copy")
    return tuple(problems)


def _expected_failure(configuration: "Configuration", target: Target) -> str | None:
    types = {str(type_).removeprefix("*") for type_ in configuration.signature.values()}
    return next(
        (EXPECTED_FAILURES[target.name, type_] for type_ in types if (target.name, type_) in EXPECTED_FAILURES), None
    )


def _whole_message(error: BaseException) -> str:
    """Return an error's message and those of its causes: the compiler wraps the one that says why."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause).strip() or type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    return "; ".join(messages)


def _examine_shipped(index: int, target: Target) -> Finding:
    from kvwatch_kernels.triton.configurations import shipped

    return examine(shipped()[index], target)


def run(matches: Sequence[str] = (), jobs: int | None = None) -> list[Finding]:
    """Examine all shipped configurations on all targets, in processes of their own.

    Args:
        matches: only those whose name contains one of these; none means all.
        jobs: processes; none: one for each core.

    Raises:
        ToolError: the compiler's tools cannot be used.
    """
    from kvwatch_kernels.triton.configurations import shipped

    pairs = [(i, target) for i, c in enumerate(shipped()) if _is_wanted(c.name, matches) for target in TARGETS]
    context = multiprocessing.get_context("spawn")  # forking a process with threads of torch in it may hang
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=context) as executor:
        return list(executor.map(_examine_shipped, *zip(*pairs, strict=True))) if pairs else []


def _is_wanted(name: str, matches: Sequence[str]) -> bool:
    return not matches or any(match in name for match in matches)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate and print what it found.

    Returns:
        0 when all gates pass, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m kvwatch_kernels.aot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="refresh the table in kernels/README.md")
    parser.add_argument(
        "--match", action="append", default=[], metavar="TEXT", help="only names that contain TEXT; may be repeated"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: one for each core")
    options = parser.parse_args(arguments)
    if options.write and options.match:
        parser.error("--write needs the whole gate: leave --match out")
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        parser.error("TRITON_INTERPRET is set: kernels are then interpreted, not compiled; unset it")
    findings = run(options.match, options.jobs)
    if not findings:
        parser.error(f"no configuration's name contains {' or '.join(map(repr, options.match))}")
    failed = [finding for finding in findings if finding.problems]
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))  # noqa: T201
    else:
        print(as_table(findings))  # noqa: T201
    for finding in failed:
        print(f"{finding.configuration} on {finding.target}: {'; '.join(finding.problems)}", file=sys.stderr)  # noqa: T201
    if options.write and not failed:
        write_table(findings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
