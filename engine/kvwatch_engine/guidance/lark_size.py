"""How much a terminal of a Lark grammar stands for when each terminal in it is written out.

A few lines can name a terminal of astronomic size, each twice the one before: `A: B B`, `B: C C`, ... The library's own
bounds do not count that. Rules may refer to each other at will: they are followed step by step.
"""

import re
from functools import reduce

_DEFINITION = re.compile(r"^[ \t]*[?!]?(?P<name>[A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*|[A-Za-z_]\w*')


def largest_terminal(lark: str, limit: int) -> int:
    """Return the size of the largest terminal, in characters; above `limit` some number above it.

    Args:
        lark: the grammar. What is no grammar has no terminals.
        limit: where counting ends.
    """
    begins = list(_DEFINITION.finditer(lark))
    ends = [begin.start() for begin in begins[1:]] + [len(lark)]
    bodies = {
        begin["name"]: lark[begin.end() : end]
        for begin, end in zip(begins, ends, strict=False)
        if begin["name"].lstrip("_")[:1].isupper()
    }
    pieces = {name: _PIECE.findall(body) for name, body in bodies.items()}
    sizes: dict[str, int] = {}
    # Each round writes out one more level; what still grows after as many rounds as there are terminals is a cycle,
    # which the library refuses by itself.
    for _ in range(len(pieces) + 1):
        before = dict(sizes)
        for name, parts in pieces.items():
            sizes[name] = reduce(
                lambda total, part: min(total + (sizes.get(part, 1) if part in pieces else len(part)), limit + 1),
                parts,
                0,
            )
        if sizes == before or max(sizes.values()) > limit:
            break
    return max(sizes.values(), default=0)
