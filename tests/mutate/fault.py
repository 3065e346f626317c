"""A deliberate fault: a small patch, what it stands for, and the tests that must notice it."""

from dataclasses import dataclass
from pathlib import Path


class PatchError(Exception):
    """A patch does not fit the tree: its text is not there exactly once, or it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `old` occurs exactly once in `file`, so that a patch cannot rot unseen."""

    name: str
    stands_for: str
    """The kind of mistake, in the words of somebody who made it; with the line of the list of known faults, if any."""
    file: str
    """Relative to the root of the tree."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Node ids of pytest: the few that are expected to notice, so that a trial takes seconds."""

    def patched(self, root: Path) -> str:
        """Return the file's text with the fault in it.

        Raises:
            PatchError: the patch does not fit.
        """
        path = root / self.file
        if not path.is_file():
            raise PatchError(f"fault {self.name!r}: there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise PatchError(
                f"fault {self.name!r}: its text is {count} times in {self.file}, must be there once; "
                f"write the patch anew for what the file says now:\n{self.old}"
            )
        if self.new == self.old:
            raise PatchError(f"fault {self.name!r} changes nothing")
        return text.replace(self.old, self.new)
