"""The server's limits and time-outs, already validated."""

from dataclasses import dataclass, field, replace

from kvwatch_engine.contracts.tools import ToolParser
from kvwatch_engine.guidance import GuidanceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the OpenAI-compatible server.

    Every limit exists so that one request cannot take memory or time from the others; each refusal names its limit.
    """

    max_body_bytes: int = 4 * 1024 * 1024
    max_n: int = 16
    """Most choices for one prompt."""
    max_choices: int = 128
    """Most choices of one request: prompts x n."""
    max_logprobs: int = 20
    """Most alternatives at one position (`top_logprobs`, and `logprobs` of completions)."""
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    """Most entries of `logit_bias`."""
    prompt_threads: int = 2
    """Threads that render templates and tokenise."""
    max_pending_prompts: int = 1024
    """Most requests that wait for those threads; more are answered 429."""
    max_unread_tokens: int = 4096
    """A client that leaves more generated tokens than this unread is dropped: what waits for it is memory."""
    max_images: int = 8
    """Most images of one request, where the model takes images."""
    max_image_bytes: int = 10 * 1024 * 1024
    """Most bytes of all images of one request, as files; a chat's body may be longer by what they are in base64."""
    max_image_pixels: int = 16_777_216
    """Most pixels of one image: decoded it takes some bytes for each."""
    max_pending_image_bytes: int = 256 * 1024 * 1024
    """Most bytes of images that wait to be decoded; more are answered 429."""
    tool_parser: ToolParser = "auto"
    """How the model writes calls; `auto` finds that out by its chat template."""
    guidance: GuidanceLimits = field(default_factory=GuidanceLimits)
    """How large grammars may be that texts keep to, and what they may take."""
    body_seconds: float = 30.0
    """Time in which a body must have arrived."""
    write_seconds: float = 60.0
    """Time in which a client must take what it is sent."""
    keepalive_seconds: float = 15.0
    """A stream without a token for so long sends a comment, so that proxies keep it open and a dead peer is noticed."""
    drain_seconds: float = 30.0
    """Time that running requests get to finish when the server stops."""
    max_stored_responses: int = 1000
    """Most responses that are kept to be read or answered later; 0 keeps none."""
    max_stored_response_bytes: int = 64 * 1024 * 1024
    """Most bytes of kept responses, with the conversations that they answer."""
    log_prompts: bool = False
    """Write prompt texts to the log."""

    def with_room_for_images(self) -> "ServerSettings":
        """Return these settings with bodies that may hold images as well, which base64 makes longer by a third."""
        return replace(self, max_body_bytes=self.max_body_bytes + -(-self.max_image_bytes // 3) * 4)
