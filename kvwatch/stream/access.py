"""Who may connect: address, tokens, certificates. Knows nothing of what is sent.

Without a token only loopback is listened on. Tokens and certificates are files, so that neither is on a command line.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
import msgspec
import structlog

from kvwatch.errors import ConfigError
from kvwatch.sockets import bind

LISTEN_SETTING = "--grpc-listen"
TOKEN_SETTING = "--grpc-token-file"  # noqa: S105 - a flag
OFF = "off"
BEARER = "Bearer "
AUTHORIZATION = "authorization"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Calls that need no token: an orchestrator's probes have none."""

logger = structlog.get_logger(__name__)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stream is offered, and to whom."""

    listen: str
    """`HOST:PORT`, port 0 for any free one."""
    token_file: str | None = None
    """File with a token on each line; a caller must send one of them."""
    certificate: str | None = None
    """PEM file with the server's certificate chain; with `key`, callers must use TLS."""
    key: str | None = None
    """PEM file with its private key."""


class Tokens:
    """The tokens of a file, read again when it changes. One thread at a time.

    Blank lines and lines that begin with # are left out. A file that vanishes or becomes empty lets nobody in.

    Raises:
        ConfigError: at first it cannot be read or holds no token.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()
        try:
            self._stamp = self._stat()
            self._tokens = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{TOKEN_SETTING}: {path} cannot be read ({error}); give a readable text file") from error
        if not self._tokens:
            raise ConfigError(f"{TOKEN_SETTING}: {path} holds no token; write one on a line of its own")

    def accepts(self, token: str) -> bool:
        """Whether this is one of the tokens; takes the same time whichever it is."""
        self._refresh()
        given = token.encode("utf-8", "surrogatepass")
        matches = [hmac.compare_digest(given, each) for each in self._tokens]
        return any(matches)

    def _refresh(self) -> None:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._tokens = self._read()
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            if self._stamp is not None:
                logger.warning("the token file cannot be read, nobody is let in", error=repr(error))
            self._tokens, self._stamp = (), None

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):  # to read a pipe could take for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        lines = [line.strip() for line in self._path.read_text(encoding="utf-8").splitlines()]
        return tuple(line.encode() for line in lines if line and not line.startswith("#"))


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Refuses calls without a token that is accepted.

    Args:
        tokens: Those that are accepted.
        others: How paths of services begin that decide by themselves.
    """

    def __init__(self, tokens: Tokens, others: tuple[str, ...] = ()) -> None:
        self._tokens = tokens
        self._open = (HEALTH_PREFIX, *others)
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: object, handler_call_details: object) -> object:
        """Let the call through, or answer it with a refusal."""
        details: grpc.HandlerCallDetails = handler_call_details
        if not details.method.startswith(self._open):
            token = _sent_token(details.invocation_metadata)
            if token is None or not self._tokens.accepts(token):
                return self._refusal
        return await continuation(details)  # type: ignore[operator]


class Permits:
    """The calls that run for long, by the token that let each in. The server's loop only.

    Args:
        tokens: Those that are accepted; none if everybody is let in.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens
        self._running: dict[asyncio.Timeout, str] = {}

    @contextlib.asynccontextmanager
    async def hold(self, metadata: Iterable[tuple[str, str | bytes]]) -> AsyncIterator[None]:
        """Run a call for as long as the token in its metadata is accepted.

        Raises:
            RevokedError: it no longer is; the call was cancelled wherever it waited.
        """
        try:
            async with asyncio.timeout(None) as permit:
                self._running[permit] = _sent_token(metadata) or ""
                try:
                    yield
                finally:
                    self._running.pop(permit, None)
        except TimeoutError:
            if not permit.expired():
                raise
            message = "the token that this call began with is no longer accepted; call again with one that is"
            raise RevokedError(message) from None

    def end_revoked(self) -> None:
        """End the calls whose token has been taken out of the file. Called now and then, not for each message."""
        if self._tokens is None:
            return
        for permit, token in list(self._running.items()):
            if not self._tokens.accepts(token):
                del self._running[permit]
                permit.reschedule(asyncio.get_running_loop().time())


class RevokedError(Exception):
    """The token that let a call in is accepted no more."""


def _sent_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the token in a call's metadata; none if there is not exactly one."""
    sent = [value for key, value in metadata if key == AUTHORIZATION]
    if len(sent) != 1 or not isinstance(sent[0], str) or not sent[0].startswith(BEARER):
        return None
    return sent[0].removeprefix(BEARER)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    message = (
        f"a token is needed here and none that is known was sent; send the metadata {AUTHORIZATION}: {BEARER}TOKEN "
        "(kvwatch tail: --token-file)"
    )
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def reserve(options: StreamOptions) -> socket.socket:
    """Bind the address on the caller's thread, so that a taken port is an error of the start.

    gRPC binds by itself: close the socket when it does.

    Raises:
        ConfigError: it is no address, or one that may not be offered without a token.
        ExporterError: it cannot be bound.
    """
    bound = bind(options.listen, LISTEN_SETTING)
    host = bound.getsockname()[0]
    if options.token_file is None and not ipaddress.ip_address(host).is_loopback:
        bound.close()
        raise ConfigError(
            f"{LISTEN_SETTING}: {options.listen} can be reached from other machines and anybody could follow all "
            f"requests; give {TOKEN_SETTING} FILE, or listen on 127.0.0.1"
        )
    return bound


def check_options(options: StreamOptions) -> None:
    """Find out now what would be refused at the start; nothing stays open.

    Raises:
        ConfigError: an option is wrong, or others could listen in without a token.
        ExporterError: the address cannot be bound.
    """
    if options.token_file is not None:
        Tokens(options.token_file)
    make_credentials(options)
    reserve(options).close()


def make_credentials(options: StreamOptions) -> grpc.ServerCredentials | None:
    """Return what the server proves itself with; none for a server without TLS.

    Raises:
        ConfigError: one of certificate and key is missing, cannot be read, or does not belong to the other.
    """
    if options.certificate is None and options.key is None:
        return None
    if options.certificate is None or options.key is None:
        raise ConfigError("--grpc-cert and --grpc-key belong together; give both, or neither for no TLS")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.certificate, options.key)
        chain, key = Path(options.certificate).read_bytes(), Path(options.key).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--grpc-cert {options.certificate} and --grpc-key: cannot be used ({error}); give a PEM certificate chain "
            "and its private key"
        ) from error
    return grpc.ssl_server_credentials([(key, chain)])
