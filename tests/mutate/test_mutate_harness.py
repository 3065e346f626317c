"""The harness of `make mutate` on a tree of three lines, and its faults on this one."""

import textwrap
from pathlib import Path

import pytest
from mutate import run, trial
from mutate.fault import Fault, PatchError
from mutate.run import AREAS, ROOT, run_all
from mutate.trial import Verdict, copy_tree, run_tests

FAULTS = [fault for faults in AREAS.values() for fault in faults]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the packages' names: a function, a test that looks at it, and one that does not."""
    root = tmp_path / "tree"
    for package, folder in trial.PACKAGES.items():
        (root / folder / package).mkdir(parents=True)
        (root / folder / package / "__init__.py").write_text("")
    (root / "kvwatch" / "sums.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_sums.py").write_text(
        textwrap.dedent("""
            import time

            from kvwatch.sums import add

            def test_sums_are_right():
                assert add(2, 3) == 5

            def test_nothing():
                pass

            def test_it_ends():
                while add(1, 1) != 2:
                    time.sleep(0.1)
        """)
    )
    return root


def fault(new: str, *tests: str, old: str = "a + b", file: str = "kvwatch/sums.py") -> Fault:
    nodes = tuple(f"tests/test_sums.py::{name}" for name in tests)
    return Fault(name="x", stands_for="a slip", file=file, old=old, new=new, tests=nodes)


def test_a_fault_that_a_test_notices_is_killed_by_it(tree: Path) -> None:
    (outcome,) = run_all(tree, [fault("a - b", "test_nothing", "test_sums_are_right")], 1)

    assert outcome.verdict is Verdict.KILLED
    assert outcome.by == "tests/test_sums.py::test_sums_are_right"
    assert "-1 == 5" in outcome.reason


def test_a_fault_that_no_test_notices_survives(tree: Path) -> None:
    (outcome,) = run_all(tree, [fault("a - b", "test_nothing")], 1)

    assert outcome.verdict is Verdict.SURVIVED


def test_each_fault_is_taken_out_before_the_next_one_and_the_tree_itself_is_never_touched(tree: Path) -> None:
    before = (tree / "kvwatch" / "sums.py").read_text()
    faults = [fault(new, "test_sums_are_right") for new in ("a - b", "b + a", "a * b")]

    outcomes = run_all(tree, faults, 2)

    assert [outcome.verdict for outcome in outcomes] == [Verdict.KILLED, Verdict.SURVIVED, Verdict.KILLED]
    assert (tree / "kvwatch" / "sums.py").read_text() == before


def test_code_that_cannot_be_imported_shows_nothing(tree: Path) -> None:
    (outcome,) = run_all(tree, [fault("a +", "test_sums_are_right")], 1)

    assert outcome.verdict is Verdict.BROKEN
    assert outcome.reason == "SyntaxError: invalid syntax"


def test_a_trial_that_does_not_end_shows_nothing(tree: Path) -> None:
    (tree / "kvwatch" / "sums.py").write_text("def add(a: int, b: int) -> int:\n    return a - b\n")

    outcome = run_tests(tree, ["tests/test_sums.py::test_it_ends"], seconds=3)

    assert (outcome.verdict, outcome.by) == (Verdict.BROKEN, "not done after 3 s")


def test_tests_that_fail_without_any_fault_stop_everything(tree: Path) -> None:
    (tree / "tests" / "test_sums.py").write_text("def test_sums_are_right():\n    assert False\n")

    with pytest.raises(RuntimeError, match="without any fault the tests do not pass"):
        run_all(tree, [fault("a - b", "test_sums_are_right")], 1)


def test_a_test_that_does_not_exist_stops_everything(tree: Path) -> None:
    with pytest.raises(RuntimeError, match="without any fault the tests do not pass"):
        run_all(tree, [fault("a - b", "test_that_was_renamed")], 1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (fault("a - b", "test_nothing", old="a * b"), "is 0 times in kvwatch/sums.py"),
        (fault("x", "test_nothing", old="a"), "times in kvwatch/sums.py, must be there once"),
        (fault("a + b", "test_nothing"), "changes nothing"),
        (fault("a - b", "test_nothing", file="kvwatch/gone.py"), "there is no file kvwatch/gone.py"),
    ],
)
def test_a_patch_that_does_not_fit_is_an_error_before_anything_runs(tree: Path, broken: Fault, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        run_all(tree, [broken], 1)


def test_a_copy_has_neither_caches_nor_links_out_of_the_tree(tree: Path, tmp_path: Path) -> None:
    (tree / ".git").mkdir()
    (tree / "shared").symlink_to(tmp_path)

    copy_tree(tree, tmp_path / "copy")

    copied = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert copied == ["dashboards", "engine", "kernels", "kvwatch", "tests"]


@pytest.mark.parametrize(("new", "status"), [("a - b", 0), ("b + a", 1), ("a +", 1)])
def test_the_exit_status_says_whether_every_fault_was_noticed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], new: str, status: int
) -> None:
    monkeypatch.setattr(run, "ROOT", tree)
    monkeypatch.setitem(AREAS, "telemetry", (fault(new, "test_sums_are_right"),))

    assert run.main(["--area", "telemetry"]) == status

    out, err = capsys.readouterr()
    assert f"{1 - status} of 1 faults were noticed" in out
    assert bool(err) is bool(status)


def test_a_patch_that_rotted_is_told_by_the_exit_status(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ROOT", tree)
    monkeypatch.setitem(AREAS, "telemetry", (fault("a - b", "test_nothing", old="gone"),))

    assert run.main(["--area", "telemetry"]) == 1
    assert "must be there once" in capsys.readouterr().err


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_every_fault_fits_this_tree_and_names_tests_that_exist(each: Fault) -> None:
    each.patched(ROOT)

    assert each.tests
    for node in each.tests:
        file, _, name = node.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name.partition('[')[0]}(" in text, node


def test_names_are_unique_and_say_what_they_stand_for() -> None:
    assert len({each.name for each in FAULTS}) == len(FAULTS)
    assert all(each.stands_for.endswith(".") for each in FAULTS)
