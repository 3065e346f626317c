"""Runs of schemathesis: requests made up from a served OpenAPI document."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

TESTS = Path(__file__).parent


def run_schemathesis(
    about: Literal["admin", "api"], url: str, num_examples: int, folder: Path, headers: tuple[str, ...] = ()
) -> str:
    """Run examples, coverage, fuzzing and stateful tests with every check; fail with what it found.

    Args:
        about: which configuration and hooks it takes.
        url: of the server.
        num_examples: most examples of each operation.
        folder: where it runs.
        headers: sent with every request.

    Returns:
        What it printed.
    """
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(TESTS / f"schemathesis_{about}.toml"), "run",
        f"{url}/openapi.json",
        "--phases", "examples,coverage,fuzzing,stateful", "--checks", "all", "--max-examples", str(num_examples),
        *[part for header in headers for part in ("--header", header)],
        # How long an answer takes says nothing on a busy machine.
        "--max-response-time", "600", "--request-timeout", "300", "--continue-on-failure",
        "--generation-database", "none", "--seed", "1", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": f"schemathesis_{about}_hooks",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, cwd=folder, env=environment, check=False
    )

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert "Stateful" in done.stdout
    return done.stdout
