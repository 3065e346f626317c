"""How threads share few cores: how long one waits actively for its next piece of work, and how long one may go on.

A step is thousands of short parallel loops. GNU OpenMP, which torch brings, lets idle threads spin for milliseconds
before they sleep: best while every core is free, and disastrous when one is not, since the loop then waits for a thread
that waits for a core that is spinning. Seen on two cores: with one core busy elsewhere, a step of 16 sequences took
252 ms instead of 68; with a bound of 10,000 turns 164 and 71, with 2,000 turns 122 and 76. The API and the observatory
run beside the engine, so some bound is right.
"""

import os
import sys

VARIABLE = "GOMP_SPINCOUNT"
SERVING_TURNS = 10_000


SWITCH_SECONDS = 0.0005
"""How long a thread of Python code may hold the interpreter's lock while another wants it. The engine's thread wants
it for a moment between two steps: by default (5 ms) it would wait as long as a short step takes."""


def bound_turns() -> None:
    """Let threads of Python code change places sooner than by default. Any time."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


def bound_spinning(turns: int = SERVING_TURNS) -> None:
    """Bound active waiting, unless the user has decided otherwise.

    Call it before torch is imported: libgomp reads the variable when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(VARIABLE, str(turns))
