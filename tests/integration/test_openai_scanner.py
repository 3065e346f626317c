"""A scanner that nobody here wrote finds no failure on a real `kvwatch serve`: compatcanary, from the npm registry."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from server_process import serve_process
from tiny_models import embedded_model_folder

PACKAGE = "compatcanary@0.2.2"
NAME = "model"


@pytest.fixture(scope="module")
def scanner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the scanner's program."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("scanner")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed, and the scanner is a package of npm's")
    fetched = subprocess.run(
        [npm, "pack", PACKAGE, "--json"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if fetched.returncode:
        pytest.skip(f"npm's registry does not give {PACKAGE}: {fetched.stderr[-300:]}")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / "package" / "src" / "cli.js"


def calm_model(folder: Path) -> Path:
    """Return the embedded model with other defaults: the scanner sets no temperature, and a small model may ramble."""
    for file in embedded_model_folder().iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    found = json.loads(config.read_text()) if config.exists() else {}
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({**found, "do_sample": True, "top_k": 1}))
    return folder


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_scanner_finds_no_failure(scanner: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with serve_process(calm_model(model), "--served-model-name", NAME) as server:
        done = subprocess.run(
            ["node", str(scanner), "scan", "--base-url", server.api, "--model", NAME, "--format", "json",
             "--timeout", "180", "--fail-on", "any"],
            capture_output=True, text=True, timeout=1000, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = {each["id"]: each["status"] for each in json.loads(done.stdout)["results"]}
    assert set(found.values()) == {"pass"}, found
    assert len(found) >= 7
