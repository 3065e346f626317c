"""Calls `kvwatch.v1.Control` of a remote kvwatch engine, for the sidecar's admin API. Any thread."""

import threading

import grpc

from kvwatch.errors import ConfigError, ControlError
from kvwatch.sources.engines import EngineSpec
from kvwatch.wire.control import METHOD_PATH, CallReply, CallRequest, decode_reply, encode_request

TIMEOUT_SECONDS = 65.0
"""A change may wait a minute for what stands against it to pass."""

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: "it does not know the token in admin_token_file",
    grpc.StatusCode.PERMISSION_DENIED: "the token in admin_token_file lacks the role for this",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the sidecar has asked for too much; try again in a minute",
    grpc.StatusCode.UNIMPLEMENTED: "it offers no admin API over gRPC; does it run with --admin-listen off?",
    grpc.StatusCode.UNAVAILABLE: "it is not reached",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it did not answer in time; whether it was changed, its audit says",
}


class RemoteControl:
    """The Control service of one engine. A channel is kept; the token is read anew for each call.

    Args:
        spec: Where the engine is, and where the token for changing it lies.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def call(self, request: CallRequest) -> CallReply:
        """Have the engine answer one request of the admin API.

        Raises:
            ControlError: it does not answer, or does not let the sidecar.
        """
        try:
            token = self._spec.admin_token()
            send = self._open().unary_unary(METHOD_PATH, encode_request, decode_reply)
            reply: CallReply = send(request, timeout=TIMEOUT_SECONDS, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as error:
            why = _REFUSED.get(error.code(), str(error.code()))
            raise ControlError(f"engine {self._spec.name} cannot be asked: {why}") from error
        except ConfigError as error:
            raise ControlError(str(error)) from error
        return reply

    def close(self) -> None:
        """Close the channel."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None:
                target = self._spec.url.partition("://")[2]
                if self._spec.url.startswith("grpcs://"):
                    credentials = grpc.ssl_channel_credentials(self._spec.ca())
                    self._channel = grpc.secure_channel(target, credentials)
                else:
                    self._channel = grpc.insecure_channel(target)
            return self._channel
