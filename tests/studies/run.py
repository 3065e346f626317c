"""Runs studies: their tables go into the pages under docs/studies, their plots beside them.

make study                                        all of them
make study ARGS="watermark swap.mode --rounds 3"  one, and a part of another, with fewer rounds

Each takes less than five minutes. Those parts whose clock is the machine's want it for themselves.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

from rounds import Limits

STUDIES = ("watermark", "victims", "swap", "block-size")

Part = Callable[[Limits], None]


def parts_of(study: str) -> Mapping[str, Part]:
    """Return a study's parts by name. Its module is imported only now: simulations' processes need no torch."""
    parts: Mapping[str, Part] = import_module(study.replace("-", "_")).PARTS
    return parts


def chosen(names: list[str]) -> Iterator[tuple[str, Part]]:
    """Return the parts that are meant by `study` or `study.part`.

    Raises:
        ValueError: a name means none; it says which there are.
    """
    for name in names:
        study, _, part = name.partition(".")
        if study not in STUDIES:
            raise ValueError(f"{name}: no such study; choose from {', '.join(STUDIES)}")
        parts = parts_of(study)
        if part and part not in parts:
            raise ValueError(f"{name}: no such part; choose from {', '.join(f'{study}.{each}' for each in parts)}")
        yield from ((f"{study}.{each}", run) for each, run in parts.items() if part in ("", each))


def main() -> None:
    """Run what is asked for, each part once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STUDY[.PART]", help=f"any of {', '.join(STUDIES)}")
    parser.add_argument("--rounds", type=int, help="most rounds of what is measured; default: each part's own")
    parser.add_argument("--seconds", type=float, default=Limits.seconds, help="most time of a part's rounds")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    try:
        todo = dict(chosen(arguments.names or list(STUDIES)))
    except ValueError as error:
        parser.error(str(error))
    for name, part in todo.items():
        begin = time.monotonic()
        part(Limits(arguments.rounds, arguments.seconds))
        print(f"{name}: {time.monotonic() - begin:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
