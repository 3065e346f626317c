"""`python tied.py COMMAND ...`: become that command, and end with whoever started it, however that ends."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    """Replace this process. The kernel keeps the tie over exec.

    Args:
        words: The command, found on the PATH, and its arguments.
    """
    parent = int(os.environ.pop("KVWATCH_RAY_PARENT", "0"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)
    os.execvp(words[0], words)  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main(sys.argv[1:])
