"""The configuration file, changed where a setting stands and nowhere else. Knows no engine and no HTTP.

A new content is parsed before it replaces the old one, which it does in one step: a crash leaves either of them.
"""

import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvwatch.admin.live_config import toml_value
from kvwatch.control import SettingValue
from kvwatch.errors import ConfigError


class DeclaredFile:
    """A TOML file of settings. One caller at a time."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def prepare(self, values: Mapping[str, SettingValue]) -> "PreparedFile":
        """Write what the file would be into a file beside it.

        Raises:
            ConfigError: the file or its folder cannot be used, or it is written in a way that this cannot change.
        """
        try:
            path = self.path.resolve()  # of a link what it leads to is changed, not the link
            old = path.read_text(encoding="utf-8")
            new = changed_text(old, values)
            mode = stat.S_IMODE(path.stat().st_mode)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration file {self.path.name} cannot be written ({error})") from error
        return PreparedFile(path, Path(name))


class PreparedFile:
    """A file that waits to take another's place."""

    def __init__(self, path: Path, prepared: Path) -> None:
        self._path = path
        self._prepared = prepared

    def commit(self) -> None:
        """Put it in place.

        Raises:
            OSError: that did not work; the old one is still there.
        """
        os.replace(self._prepared, self._path)

    def drop(self) -> None:
        """Remove it if it was not put in place."""
        self._prepared.unlink(missing_ok=True)


def changed_text(text: str, values: Mapping[str, SettingValue]) -> str:
    """Return the file's text with these settings; everything else, comments too, stays as it is.

    Raises:
        ConfigError: the result would not say what it should.
    """
    lines = text.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    head, rest = lines[:end], lines[end:]
    if head and not head[-1].endswith("\n"):
        head[-1] += "\n"
    for key, value in values.items():
        line = f"{key} = {toml_value(value)}\n"
        place = next((at for at, old in enumerate(head) if _names(old, key)), None)
        if place is None:
            head.append(line)
        else:
            comment = re.search(r"\s+#[^\"']*$", head[place].rstrip("\n"))
            head[place] = line.rstrip("\n") + (comment[0] if comment else "") + "\n"
    new = "".join(head + rest)
    try:
        wanted = {_plain(key): value for key, value in tomllib.loads(text).items()}
        wanted |= {key: "none" if value is None else value for key, value in values.items()}
        is_right = {_plain(key): value for key, value in tomllib.loads(new).items()} == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise ConfigError("the configuration file is written in a way that cannot be changed by line; edit it by hand")
    return new


def _names(line: str, key: str) -> bool:
    name, has_value, _ = line.partition("=")
    return bool(has_value) and _plain(name.strip().strip("\"'")) == key


def _plain(key: str) -> str:
    return key.replace("-", "_")
