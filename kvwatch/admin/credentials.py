"""The token that a command sends to an admin listener: where it is found. Knows no HTTP, and no server."""

from pathlib import Path

from kvwatch.errors import ConfigError

TOKEN_VARIABLE = "KVWATCH_ADMIN_TOKEN_FILE"  # noqa: S105 - a variable; the server's setting of the same name


def find_token(path: str, name: str | None) -> str:
    """Return the token in a file that holds one, or one of those in a server's token file.

    Args:
        path: The file.
        name: Which of a server's tokens; none for the first that may operate, else the first.

    Raises:
        ConfigError: there is no such file or token, or only its digest.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {path} cannot be read ({error}); give a readable text file") from error
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if [len(line) for line in lines] == [1] and name is None:
        return lines[0][0]
    tokens = [line for line in lines if len(line) in {3, 4} and (name is None or line[0] == name)]
    tokens.sort(key=lambda line: "operate" not in line[1].split(","))
    usable = [line[2] for line in tokens if not line[2].startswith("sha256:")]
    if not usable:
        which = "token" if name is None else f"token of the name {name}"
        raise ConfigError(f"--token-file: {path} holds no {which}, or only its digest; give a file with the token")
    return usable[0]
