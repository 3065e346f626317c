"""Certificates for servers on this machine's loopback. Needs the command `openssl`."""

import ssl
import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "server", *, days: int = 2) -> tuple[str, str]:
    """Make a certificate that signs itself, for so many days from now; return its file and that of its key."""
    certificate, key, wanted, names = (folder / f"{name}.{kind}" for kind in ("crt", "key", "csr", "names"))
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", encoding="utf-8")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key)
    for command in (
        ("req", "-new", *new_key, "-subj", "/CN=localhost", "-out", wanted),
        ("x509", "-req", "-in", wanted, "-signkey", key, "-days", days, "-extfile", names, "-out", certificate),
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=60)
    return str(certificate), str(key)


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return what a server needs to speak TLS with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
