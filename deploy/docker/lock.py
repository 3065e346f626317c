"""Write the lock files of the images: every distribution that pip would install today, with its version.

    python deploy/docker/lock.py

Run by `make lock`, in an environment whose pip reaches a registry. torch is pinned by constraints.txt.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LOCKS = {"sidecar.lock.txt": ".", "engine.lock.txt": ".[engine]"}
HEAD = "# Written by `make lock`: what `pip install '{}'` brings, with the versions that the tests ran with.\n"


def lock(what: str) -> str:
    """Return the text of a lock file.

    Args:
        what: What would be installed, from the repository's root.

    Raises:
        subprocess.CalledProcessError: pip found no versions that go together.
    """
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
        "--constraint", "constraints.txt", what,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    chosen = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    found = {each["name"].lower(): each["version"] for each in chosen}
    found.pop("kvwatch")
    return HEAD.format(what) + "".join(f"{name}=={found[name].split('+')[0]}\n" for name in sorted(found))


if __name__ == "__main__":
    for name, what in LOCKS.items():
        (FOLDER / name).write_text(lock(what), encoding="utf-8")
        sys.stdout.write(f"wrote deploy/docker/{name}\n")
