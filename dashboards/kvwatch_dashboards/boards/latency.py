"""*Latency and requests*: what users wait for, and what they send."""

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import Board, Panel, Query, Row

_QUANTILES = (0.5, 0.9, 0.99)


def _times(title: str, metric: Metric, *, has_exemplars: bool = False) -> Panel:
    queries = tuple(Query(q.quantile(p, metric), f"p{round(100 * p)}") for p in _QUANTILES)
    return Panel(title=title, unit="s", queries=queries, has_exemplars=has_exemplars)


def _sizes(title: str, metric: Metric) -> Panel:
    queries = tuple(Query(q.quantile(p, metric), f"p{round(100 * p)}") for p in _QUANTILES)
    return Panel(title=title, unit="short", queries=queries)


_STEP = Panel(
    title="Duration of steps by phase",
    unit="s",
    queries=(
        Query(q.quantile(0.99, m.STEP_DURATION, "phase"), "p99 {{phase}}"),
        Query(
            f"sum({q.rate(m.STEP_BUILD_SECONDS)})"
            f" / sum({q.observations(m.STEP_DURATION, part='_count', phase='forward')})",
            "mean batch building",
        ),
    ),
)
_OPERATIONS = Panel(
    title="Time of the forward pass by operation",
    unit="percentunit",
    kind="stack",
    queries=(
        Query(
            f"sum by (operation) ({q.rate(m.FORWARD_OPERATION_SECONDS, 'operation')}) / ignoring (operation) group_left ()"
            f" sum({q.observations(m.STEP_DURATION, part='_sum', phase='forward')})",
            "{{operation}}",
        ),
    ),
    about="Parts of the time that the model's layers and logits take; what is missing of 100 % is between them, or in steps"
    " that are computed layer by layer. linear and logits read the weights, attention reads the KV cache.",
)
_FINISHED = Panel(
    title="Requests that ended, by reason",
    unit="reqps",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.REQUESTS_FINISHED, 'reason')})", "{{reason}}"),),
)
_TENANTS = Panel(
    title="Requests by tenant",
    unit="reqps",
    kind="stack",
    queries=(Query(q.or_none(f"sum by (tenant) ({q.rate(m.REQUESTS_FINISHED, 'tenant')})", "tenant"), "{{tenant}}"),),
    about="Who sends. Tenants beyond the allow-list (--metrics-tenants) are `other`. One that grew alone is whom to ask.",
)
_ADAPTERS = Panel(
    title="Requests by LoRA adapter",
    unit="reqps",
    kind="stack",
    queries=(Query(q.or_none(f"sum by (lora) ({q.rate(m.REQUESTS_FINISHED, 'lora')})", "lora"), "{{lora}}"),),
    about="Which adapters are asked for. Each has prefixes of its own: many adapters with few hits need a larger cache.",
)
_REJECTED = Panel(
    title="Requests refused, by reason",
    unit="reqps",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.REQUESTS_REJECTED, 'reason')})", "{{reason}}"),),
)
_TOKENS = Panel(
    title="Tokens",
    unit="short",
    queries=(
        Query(f"sum({q.rate(m.PROMPT_TOKENS)})", "prompt tokens/s"),
        Query(f"sum({q.rate(m.GENERATED_TOKENS)})", "generated tokens/s"),
        Query(f"sum({q.rate(m.COMPUTED_TOKENS)})", "computed tokens/s"),
    ),
)
_ERRORS = Panel(
    title="Steps that failed",
    unit="short",
    queries=(Query(q.increase(m.STEP_ERRORS)),),
    about="Steps that raised in the model: their requests ended with an error. The engine's log has the exception.",
)
_DRAFTS = Panel(
    title="Draft tokens, by outcome",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (outcome) ({q.rate(m.SPEC_DECODE_DRAFT_TOKENS, 'outcome')})", "{{outcome}} tokens/s"),),
    about="What speculation guesses (--num-speculative-tokens). Accepted tokens saved a step each; rejected ones were "
    "computed for nothing.",
)
_PER_DRAFT = Panel(
    title="Tokens in a step of a sequence with a draft",
    unit="short",
    queries=(
        Query(f"1 + {q.ratio(q.rate(m.SPEC_DECODE_DRAFT_TOKENS, outcome='accepted'), q.rate(m.SPEC_DECODE_DRAFTS))}"),
    ),
    about="1 means that drafts bring nothing. Sequences without a draft in a step get one token, as ever.",
)

LATENCY = Board(
    uid="kvwatch-latency",
    title="kvwatch / Latency and requests",
    about="What users wait for, where the time goes, and what they send. Dots lead to traces where those are exported.",
    rows=(
        Row("What users wait for", (shared.TTFT, shared.ITL, _times("End to end", m.END_TO_END, has_exemplars=True))),
        Row("Where the time goes", (_times("In the queue", m.QUEUE_SECONDS), _times("Prefill", m.PREFILL_SECONDS), _times("Decode", m.DECODE_SECONDS))),
        Row("Steps", (_STEP, _OPERATIONS, _sizes("Tokens of a step", m.STEP_TOKENS), _sizes("Sequences of a step", m.BATCH_SIZE), _ERRORS)),
        Row("Speculation", (_DRAFTS, _PER_DRAFT)),
        Row("Requests", (shared.STATES, _FINISHED, _REJECTED, _TENANTS, _ADAPTERS)),
        Row("What they send", (_TOKENS, _sizes("Prompt length", m.REQUEST_PROMPT_TOKENS), _sizes("Answer length", m.REQUEST_GENERATED_TOKENS))),
    ),
)  # fmt: skip
