"""The HTTP session of the SDK's exporters, for collectors that answer anything.

Owns that an answer costs neither memory nor time: its status decides, its body is thrown away and no longer than the
export's time is spent on it. A redirect is an error: nobody has taken what was sent. Does not know what is sent.
"""

import io
import time

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

MAX_BODY_BYTES = 64 * 1024
"""A longer answer is not read to its end; its connection is closed instead of being used again."""

DEFAULT_SECONDS = 5.0
_READ_BYTES = 4096


class BoundedAdapter(HTTPAdapter):
    """Sends requests; gives answers without their bodies. Sender's thread only."""

    def send(self, request: requests.PreparedRequest, *args: object, **kwargs: object) -> requests.Response:
        """Send one request.

        Raises:
            requests.RequestException: no answer came, or the answer sends us elsewhere.
        """
        timeout = kwargs.get("timeout")
        seconds = float(timeout) if isinstance(timeout, int | float) else DEFAULT_SECONDS
        deadline = time.monotonic() + seconds
        response = super().send(request, *args, **kwargs | {"stream": True})  # type: ignore[arg-type]  # passed on
        _throw_away(response.raw, deadline)
        response.raw = io.BytesIO()  # requests reads the body anyway
        if 300 <= response.status_code < 400:
            raise requests.RequestException(
                f"the collector answers {response.status_code}, a redirect, which is not followed: give the address "
                "that it leads to"
            )
        return response


def bounded_session() -> requests.Session:
    """Return a session that sends everything through a `BoundedAdapter`."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    return session


def _throw_away(body: BaseHTTPResponse, deadline: float) -> None:
    """Read a body to its end, so that the connection can be used again, or close the connection."""
    num_bytes = 0
    try:
        while chunk := body.read1(_READ_BYTES, decode_content=False):
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES or time.monotonic() > deadline:
                break
        else:
            return
    except (HTTPError, OSError):
        pass  # the status has come, and says all that there is to know
    body.close()
