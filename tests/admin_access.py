"""Who may do what with the admin API, by the rules of its documentation and without looking at its code."""

from admin_stage import TOKENS

from kvwatch.admin.operations import OPERATIONS

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE", "TRACE")
READING = {"GET", "HEAD"}
PATHS = sorted({operation.path for operation in OPERATIONS})
SENT = {
    "nobody": None,
    "unknown": "Bearer who-is-this-0123456789",
    "empty": "Bearer ",
    "basic": "Basic b3BlcmF0b3I6b3BlcmF0b3I=",
    "expired": f"Bearer {TOKENS['expired']}",
    "read": f"Bearer {TOKENS['read']}",
    "prompts": f"Bearer {TOKENS['prompts']}",
    "operate": f"Bearer {TOKENS['operate']}",
    "spelled": f"bEARER {TOKENS['read']}",
}
ROLES = {"read": {"read"}, "spelled": {"read"}, "prompts": {"read", "prompts"}, "operate": {"read", "operate"}}


ODD = [
    "/admin/v1/poo%6c", "/admin/v1/%70ool", "/admin%2fv1%2fpool", "/admin/v1//pool", "//admin/v1/pool",
    "/admin/v1/pool/", "/admin/v1/./pool", "/admin/v1/x/../pool", "/admin/v1/%2e%2e/v1/pool", "/admin/v1/pool%00",
    "/admin/v1/pool%20", "/ADMIN/v1/pool", "/admin/v2/pool", "/admin/v1/pool;x=1", "/admin\\v1\\pool",
    "/admin/v1/requests/%2e%2e", "/admin/v1/requests%2Fnothing", "/admin/v1/requests/a/b",
    "/admin/v1/requests/%ff", "/admin/v1/requests/%zz", "/admin/v1/requests/", "/", "",
    "/admin/v1", "/metrics", "/docs", "/health", "http://127.0.0.1/admin/v1/pool", "/admin/v1/requests/%0a",
]  # fmt: skip


def odd_spellings(path: str) -> list[str]:
    """Return other ways to write a path, none of which is listed."""
    fixed = path.split("{", maxsplit=1)[0]
    plain = filled(path).split("?")[0]
    letter = plain[len(fixed) - 2]
    return [
        plain[: len(fixed) - 2] + f"%{ord(letter):02x}" + plain[len(fixed) - 1 :],
        plain.replace("/", "//", 1) if plain.count("/") > 1 else "/" + plain,
        plain + "/",
        plain[: len(fixed) - 2] + letter.upper() + plain[len(fixed) - 1 :],
        plain + "%00",
        plain + ";x=1/",
        "/." + plain,
        "/x/.." + plain,
    ]


def filled(path: str) -> str:
    """Return a path with something in the place of its parameters, and such that it ends soon."""
    for name in ("request", "id", "pin", "name"):
        path = path.replace("{" + name + "}", "nothing")
    return path + "?seconds=0" if path.endswith("/events") else path


def expected(path: str, method: str, who: str, *, is_reading_open: bool) -> set[int]:
    """Say what must come, by the rules of the issue and without looking at the code."""
    declared = {operation.method: operation for operation in OPERATIONS if operation.path == path}
    if who not in ROLES and not (who == "nobody" and is_reading_open and method in READING | {"OPTIONS"}):
        return {401}
    operation = declared.get("GET" if method == "HEAD" else method)
    if operation is None:
        return {405}
    if str(operation.role) not in ROLES.get(who, {"read"}):
        return {401} if who == "nobody" else {403}
    if method in READING:
        return {200, 404} if "{" in path else {200, 409}
    return {404, 409, 415, 428}  # it got through, and had no body
