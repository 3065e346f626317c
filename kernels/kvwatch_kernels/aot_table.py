"""Prints what the ahead-of-time gate found as a Markdown table, and keeps the one in kernels/README.md.

It knows the findings' fields and the file's markers; what passes and what fails was decided before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwatch_kernels.aot import Finding

README: Final = Path(__file__).parents[1] / "README.md"
BEGIN: Final = "<!-- aot: begin; written by `python -m kvwatch_kernels.aot --write` -->"
END: Final = "<!-- aot: end -->"

LEGEND: Final = (
    "registers of a thread / spills / matrix instructions / asynchronous copies from global to shared memory\n"
    "(gfx942 loads through registers); *refused*: the target lacks the type, as expected; -: never launched there"
)


def as_table(findings: Sequence["Finding"]) -> str:
    """Return a Markdown table: a row for each configuration, a column for each target."""
    targets = list(dict.fromkeys(finding.target for finding in findings))
    cells = {(finding.configuration, finding.target): _cell(finding) for finding in findings}
    lines = [f"| configuration | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    names = dict.fromkeys(finding.configuration for finding in findings)
    lines += [f"| {name} | {' | '.join(cells[name, target] for target in targets)} |" for name in names]
    return "\n".join(lines)


def section(findings: Sequence["Finding"]) -> str:
    """Return what stands between the markers of kernels/README.md: the compiler's version, the legend, the table."""
    import triton

    return f"{BEGIN}\nTriton {triton.__version__}. In each cell: {LEGEND}.\n\n{as_table(findings)}\n{END}"


def read_section(readme: Path = README) -> str:
    """Return the section as it stands in the file, markers included.

    Raises:
        ValueError: the markers are missing, or not there once.
    """
    _, found, _ = _split(readme)
    return found


def write_table(findings: Sequence["Finding"], readme: Path = README) -> None:
    """Replace the section in the file.

    Raises:
        ValueError: the markers are missing, or not there once.
        OSError: the file cannot be written; an installed package has none, work in a checkout.
    """
    before, _, after = _split(readme)
    readme.write_text(before + section(findings) + after, encoding="utf-8")


def _split(readme: Path) -> tuple[str, str, str]:
    text = readme.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or end < begin:
        raise ValueError(f"{readme.name} must have the lines {BEGIN!r} and {END!r} once each, in this order")
    end += len(END)
    return text[:begin], text[begin:end], text[end:]


def _cell(finding: "Finding") -> str:
    if not finding.is_launched:
        return "-"
    if finding.expected_failure is not None:
        return "*refused*"
    if finding.measured is None:
        return "**does not compile**"
    measured = finding.measured
    cell = f"{measured.registers} / {measured.spills} / {measured.matrix_instructions} / {measured.async_copies}"
    return f"**{cell}**" if finding.problems else cell
