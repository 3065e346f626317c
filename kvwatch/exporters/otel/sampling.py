"""Which traces are exported, and why. Knows a trace by what has become of its request.

The first decision follows the caller, or a ratio for traces that begin here. The second is taken when the request has
ended: what was preempted, failed or slow is exported all the same, since that is what somebody will look for.
"""

from typing import Literal

from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from kvwatch.telemetry.trace_context import TraceContext

Reason = Literal["parent", "ratio", "preempted", "failed", "slow"]

_RATIO_MASK = (1 << 64) - 1


class Sampler:
    """Decides. Any thread.

    Args:
        ratio: Part of the traces that begin here which is exported, 0 to 1.
        slow_seconds: Requests that take at least so long are exported whatever was decided first.
    """

    def __init__(self, ratio: float, slow_seconds: float) -> None:
        self.ratio = ratio
        self._slow_ns = round(slow_seconds * 1e9)

    @property
    def ratio(self) -> float:
        """Part of the traces that begin here which is exported; may be changed, from any thread."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self._ratio, self._bound = ratio, TraceIdRatioBased(ratio).bound

    def first(self, context: TraceContext) -> Reason | None:
        """Decide when a request is queued; None leaves it to `last`. The ratio's choice is that of other SDKs."""
        if context.parent_id:
            return "parent" if context.is_sampled else None
        return "ratio" if int(context.trace_id, 16) & _RATIO_MASK < self._bound else None

    def last(self, *, num_preemptions: int, is_failed: bool, duration_ns: int) -> Reason | None:
        """Decide when a request that was not chosen at first has ended."""
        if is_failed:
            return "failed"
        if num_preemptions:
            return "preempted"
        return "slow" if duration_ns >= self._slow_ns else None
