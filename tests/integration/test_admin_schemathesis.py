"""Requests made up from the served OpenAPI document: no server error, no answer that the document does not tell of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from admin_stage import TOKENS, AdminStage, admin_stage

TESTS = Path(__file__).parents[1]


def run_schemathesis(stage: AdminStage, num_examples: int, folder: Path) -> None:
    """Run examples, coverage, fuzzing and stateful tests with every check; fail with what it found."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(TESTS / "schemathesis.toml"), "run",
        f"{stage.url}/openapi.json",
        "--phases", "examples,coverage,fuzzing,stateful", "--checks", "all", "--max-examples", str(num_examples),
        "--header", f"Authorization: Bearer {TOKENS['operate']}", "--request-timeout", "60", "--continue-on-failure",
        "--generation-database", "none", "--seed", "1", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, cwd=folder, env=environment, check=False
    )

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert "Stateful" in done.stdout


def test_made_up_requests_have_documented_answers(tmp_path: Path) -> None:
    with admin_stage(tmp_path) as stage:
        stage.submit("a")
        stage.submit("b")
        run_schemathesis(stage, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_many_made_up_requests_have_documented_answers(tmp_path: Path) -> None:
    with admin_stage(tmp_path) as stage:
        stage.submit("a")
        stage.submit("b")
        run_schemathesis(stage, 200, tmp_path)
