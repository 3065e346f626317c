"""The ahead-of-time gate: what ships passes it, and it finds what it is there to find. Needs compilers, but no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import aot_kernels
import pytest
import triton

from kvwatch_kernels import aot, aot_table
from kvwatch_kernels.aot import TARGETS, Finding, Target, examine
from kvwatch_kernels.aot_inspect import Measured, ToolError, measure
from kvwatch_kernels.triton.configurations import Configuration, shipped

pytestmark = [
    pytest.mark.timeout(1800),  # compilers share the machine with other tests
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 is set: nothing is compiled, unset it"
    ),
]

SM_80, SM_89, SM_90, SM_100, GFX942 = TARGETS
COVERING = (
    "attention decode bf16 d128",
    "attention prefill int8 d128",
    "attention decode e4m3 d64",
    "reduce bf16 d128",
    "rotate and store e4m3 d128",
    "copy",
)
"""Names that the ordinary suite compiles: each kernel, a plain and a quantised cache, what sm_80 refuses."""


def configuration(
    kernel: object,
    *,
    keys: str = "bf16",
    tile: int = 32,
    head_dim: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Configuration:
    """Return a configuration of one of the flawed kernels that has to have matrix products and asynchronous copies."""
    types = {"query": "*bf16", "keys": f"*{keys}", "out": "*fp32", "num_keys": "i32"}
    return Configuration(
        "flawed",
        kernel,
        types | {"TILE": "constexpr", "D": "constexpr"},
        {"TILE": tile, "D": head_dim},
        {(place,): [["tt.divisibility", 16]] for place in range(len(types))},
        num_warps,
        num_stages,
        expects_mma=True,
        expects_async_copy=True,
    )


def only(findings: list[Finding]) -> dict[tuple[str, str], Finding]:
    return {(finding.configuration, finding.target): finding for finding in findings}


@pytest.fixture(scope="module")
def covering() -> list[Finding]:
    """What the gate finds for part of what ships, on every target."""
    wanted = [each for each in shipped() if each.name in COVERING]
    assert [each.name for each in wanted] == sorted(COVERING, key=[each.name for each in shipped()].index)
    return [examine(each, target) for each in wanted for target in TARGETS]


def test_every_kernel_passes_on_every_target(covering: list[Finding]) -> None:
    assert {(f.configuration, f.target): f.problems for f in covering if f.problems} == {}
    assert len(covering) == len(COVERING) * len(TARGETS)


def test_only_e4m3_on_sm_80_is_refused(covering: list[Finding]) -> None:
    refused = {(f.configuration, f.target) for f in covering if f.measured is None}

    assert refused == {("attention decode e4m3 d64", "sm_80")}


def test_attention_uses_matrix_units_everywhere_and_asynchronous_copies_on_nvidia(covering: list[Finding]) -> None:
    attention = [f for f in covering if f.configuration.startswith("attention")]

    for finding in attention:
        if finding.measured is not None:
            assert finding.measured.matrix_instructions > 0, finding
            assert finding.measured.async_copies > 0 or finding.target == "gfx942", finding


def test_the_table_in_the_readme_has_what_the_compilers_say(covering: list[Finding]) -> None:
    section = aot_table.read_section()
    if f"Triton {triton.__version__}." not in section:
        pytest.skip(f"the table is of another version than Triton {triton.__version__}; numbers differ")

    rows = [line for line in aot_table.as_table(covering).splitlines() if line.startswith("| ")]

    assert [row for row in rows if row not in section] == [], "run `python -m kvwatch_kernels.aot --write`"


def test_the_table_in_the_readme_has_a_row_for_everything_that_ships() -> None:
    section = aot_table.read_section()

    assert [each.name for each in shipped() if f"\n| {each.name} |" not in section] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_that_ships_passes_the_gate(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kvwatch_kernels.aot", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert len(found["findings"]) == len(shipped()) * len(TARGETS)


def test_names_are_unique_and_narrow_attention_must_use_the_matrix_units() -> None:
    configurations = shipped()

    assert len({each.name for each in configurations}) == len(configurations)
    narrow = [c for c in configurations if c.kernel.__name__ == "attention_kernel" and c.signature["query"] != "*fp32"]
    assert narrow
    assert all(each.expects_mma and each.expects_async_copy for each in narrow)


# ---------------------------------------------------------------- it finds what it is there to find


def test_a_sound_kernel_has_no_problems() -> None:
    finding = examine(configuration(aot_kernels.products_kernel), SM_90)

    assert finding.problems == ()
    assert finding.measured is not None
    assert finding.measured.spills == 0
    assert 0 < finding.measured.registers < 100
    assert finding.measured.shared_bytes > 0


@pytest.mark.parametrize("target", [SM_80, GFX942], ids=lambda target: target.name)
def test_sums_instead_of_products_are_found(target: Target) -> None:
    problems = examine(configuration(aot_kernels.sums_kernel), target).problems

    assert "no matrix instruction" in problems
    assert ("no asynchronous copy" in problems) is (target.backend == "cuda")


def test_a_loop_that_waits_for_its_loads_is_found() -> None:
    finding = examine(configuration(aot_kernels.products_kernel, num_stages=1), SM_90)

    assert finding.problems == ("no asynchronous copy",)


@pytest.mark.parametrize("target", [SM_90, GFX942], ids=lambda target: target.name)
def test_tiles_that_do_not_fit_are_found(target: Target) -> None:
    large = configuration(aot_kernels.products_kernel, tile=256, head_dim=256, num_warps=1)

    problems = " | ".join(examine(large, target).problems)

    assert "spills (" in problems
    assert f"registers, at most {target.max_registers}" in problems
    assert f"bytes of shared memory, at most {target.max_shared_bytes}" in problems


def test_shared_memory_is_held_against_each_targets_own_limit() -> None:
    wide = configuration(aot_kernels.products_kernel, tile=128, head_dim=256)

    assert examine(wide, SM_80).problems == ()
    assert len(examine(wide, SM_89).problems) == 1


def test_a_kernel_that_does_not_compile_says_why() -> None:
    (problem,) = examine(configuration(aot_kernels.broken_kernel), SM_90).problems

    assert problem.startswith("does not compile: ")
    assert "incompatible dimensions" in problem


def test_an_expected_failure_is_none_on_other_targets() -> None:
    refused = examine(configuration(aot_kernels.products_kernel, keys="fp8e4nv"), SM_80)

    assert refused.expected_failure is not None
    assert refused.problems == ()
    assert examine(configuration(aot_kernels.products_kernel, keys="fp8e4nv"), SM_89).measured is not None


def test_an_expected_failure_that_compiles_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aot.EXPECTED_FAILURES, ("sm_90", "bf16"), "no bf16 here")

    (problem,) = examine(configuration(aot_kernels.products_kernel), SM_90).problems

    assert problem == "compiles, but was expected to fail with 'no bf16 here'"


def test_an_expected_failure_of_another_kind_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aot.EXPECTED_FAILURES, ("sm_90", "bf16"), "no bf16 here")

    (problem,) = examine(configuration(aot_kernels.broken_kernel), SM_90).problems

    assert "incompatible dimensions" in problem


def test_what_is_no_machine_code_is_an_error() -> None:
    with pytest.raises(ToolError, match="neither cubin nor amdgcn"):
        measure({"ttir": "module {}"}, 0)
    with pytest.raises(ToolError, match=r"cannot be used|not understood"):
        measure({"cubin": b"no cubin"}, 0)
    with pytest.raises(ToolError, match="does not say"):
        measure({"amdgcn": "s_endpgm"}, 0)


# ---------------------------------------------------------------- what it prints

FOUND = [
    Finding("one", "sm_80", Measured(72, 0, 4096, 32, 20), ()),
    Finding("one", "gfx942", Measured(120, 4, 4096, 32, 0), ("spills (4)",)),
    Finding("two", "sm_80", None, (), "type fp8e4nv not supported"),
    Finding("two", "gfx942", None, ("does not compile: x",)),
    Finding("three", "sm_80", Measured(10, 0, 0, 0, 0), ()),
    Finding("three", "gfx942", None, (), is_launched=False),
]


def test_the_table_shows_numbers_failures_and_what_is_not_compiled() -> None:
    assert aot_table.as_table(FOUND).splitlines() == [
        "| configuration | sm_80 | gfx942 |",
        "|---|---|---|",
        "| one | 72 / 0 / 32 / 20 | **120 / 4 / 32 / 0** |",
        "| two | *refused* | **does not compile** |",
        "| three | 10 / 0 / 0 / 0 | - |",
    ]


def test_writing_replaces_what_is_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{aot_table.BEGIN}\nold\n{aot_table.END}\n\nafter\n")

    aot_table.write_table(FOUND, readme)

    text = readme.read_text()
    assert text.startswith(f"before\n\n{aot_table.BEGIN}\nTriton {triton.__version__}. ")
    assert text.endswith(f"| three | 10 / 0 / 0 / 0 | - |\n{aot_table.END}\n\nafter\n")
    assert "old" not in text
    assert aot_table.read_section(readme) == aot_table.section(FOUND)


@pytest.mark.parametrize(
    "text", ["", aot_table.BEGIN, aot_table.END + aot_table.BEGIN, aot_table.BEGIN * 2 + aot_table.END]
)
def test_a_file_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)

    with pytest.raises(ValueError, match="must have the lines"):
        aot_table.write_table(FOUND, readme)
    assert readme.read_text() == text


def run_gate(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvwatch_kernels.aot", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_command_prints_what_it_found_for_machines() -> None:
    done = run_gate("--json", "--match", "copy", "--jobs", "1")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert [(f["configuration"], f["target"]) for f in found["findings"]] == [("copy", t.name) for t in TARGETS]
    assert all(f["measured"]["registers"] > 0 for f in found["findings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--match", "no such kernel"), "no configuration's name contains 'no such kernel'"),
        (("--write", "--match", "copy"), "--write needs the whole gate"),
    ],
)
def test_a_command_that_makes_no_sense_says_so(arguments: tuple[str, ...], message: str) -> None:
    done = run_gate(*arguments)

    assert done.returncode == 2
    assert message in done.stderr


def test_the_interpreter_is_refused() -> None:
    done = run_gate(TRITON_INTERPRET="1")

    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def test_a_failed_gate_is_told_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "run", lambda *_: FOUND)

    status = aot.main([])

    out, err = capsys.readouterr()
    assert status == 1
    assert "| one | 72 / 0 / 32 / 20 |" in out
    assert err.splitlines() == ["one on gfx942: spills (4)", "two on gfx942: does not compile: x"]
