"""How an event is declared: once, as a decorated class; everything else is derived from the registry.

    @event(10, "block.allocated", "Blocks were taken from the pool for a sequence.",
           feeds=(KV_BLOCK_ALLOCATIONS.count(size_of("block_ids")),))
    class BlocksAllocated(Event):
        request: Annotated[str, identity(1, "Request that owns the blocks.")]
        block_ids: Annotated[list[int], identity(2, "Blocks taken, in table order.")]
        reason: Annotated[Literal["prefill", "decode"], label(3, "What the blocks are for.")]

Rules, checked at import: numbers of events and of fields are unique and never change their meaning (the lock file of
`kvwatch.derive` guards that across versions); labels of a fed metric are label fields of the event; `identity` fields
can never become labels, since they would make one series per request or block.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvwatch.errors import SchemaError


class Cardinality(StrEnum):
    """What a field may be used for."""

    LABEL = "label"
    """Few values, known in advance or bounded by an allow-list: may become a metric label."""
    VALUE = "value"
    """A measured quantity: may be summed or observed."""
    ID = "id"
    """Names one request, block or hash: never a label."""


class FieldSpec(msgspec.Struct, frozen=True):
    """One field of an event."""

    number: int
    brief: str
    unit: str
    cardinality: Cardinality
    is_instant: bool = False
    """Whether it is a monotonic time, not a duration."""
    foreign_values: tuple[str, ...] = ()
    """Values that only events of a foreign engine have."""


def label(number: int, brief: str, foreign_values: tuple[str, ...] = ()) -> FieldSpec:
    """Declare a field that may become a metric label; no series of `foreign_values` begins in an engine of ours."""
    return FieldSpec(number, brief, "", Cardinality.LABEL, foreign_values=foreign_values)


def value(number: int, brief: str, unit: str) -> FieldSpec:
    """Declare a measured quantity; `unit` is one of the units in docs/events.md (`ns`, `tokens`, `blocks`, ...)."""
    return FieldSpec(number, brief, unit, Cardinality.VALUE)


def instant(number: int, brief: str) -> FieldSpec:
    """Declare a monotonic time in ns."""
    return FieldSpec(number, brief, "ns", Cardinality.VALUE, is_instant=True)


def identity(number: int, brief: str) -> FieldSpec:
    """Declare a field that names single things and never becomes a label."""
    return FieldSpec(number, brief, "", Cardinality.ID)


class MetricKind(StrEnum):
    """Kinds of Prometheus metric that are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One metric: the single place where its name, meaning and use are written.

    `name` has no prefix and, for counters, no `_total`: exporters add both. `labels` leaves out the common labels
    (engine, dp_rank, model_name). `label_values` gives every value of a label that is known in advance, so that a
    counter starts at 0 instead of being absent.
    """

    kind: MetricKind
    name: str
    brief: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    label_values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    moves: str = ""
    aggregate: str = "sum"
    action: str = ""

    def count(self, amount: "Amount | None" = None, **constants: str) -> "Feed":
        """Feed this counter with `amount` (default: 1 for each event); `constants` are labels that no field gives."""
        return Feed(self, amount or one(), tuple(constants.items()))

    def observe(self, amount: "Amount", **constants: str) -> "Feed":
        """Feed this histogram with one or more observations; `constants` are labels that no field gives."""
        return Feed(self, amount, tuple(constants.items()))


class Amount(msgspec.Struct, frozen=True):
    """How many, or how much, one event adds to a metric.

    `form` is one of: `one`, `field` (the field's value), `size` (length of an array field), `sum` (of an array field),
    `each` (one observation per element), `weighted` (element i of `field` observed `weights[i]` times).
    A field whose value is None adds nothing: what was never measured is observed nowhere.
    """

    form: Literal["one", "field", "size", "sum", "each", "weighted"]
    field: str = ""
    scale: float = 1
    weights: str = ""


def one() -> Amount:
    """Add 1 for each event."""
    return Amount("one")


def amount_of(field: str, scale: float = 1) -> Amount:
    """Add the value of `field` times `scale`."""
    return Amount("field", field, scale)


def size_of(field: str) -> Amount:
    """Add the number of elements of the array `field`."""
    return Amount("size", field)


def sum_of(field: str, scale: float = 1) -> Amount:
    """Add the sum of the array `field` times `scale`."""
    return Amount("sum", field, scale)


def each_of(field: str, scale: float = 1) -> Amount:
    """Observe each element of the array `field` times `scale`."""
    return Amount("each", field, scale)


def weighted(field: str, weights: str, scale: float = 1) -> Amount:
    """Observe element i of `field` times `scale`, `weights[i]` times."""
    return Amount("weighted", field, scale, weights)


class Feed(msgspec.Struct, frozen=True):
    """An event's contribution to a metric; labels are constant or read from the event's field of the same name."""

    metric: Metric
    amount: Amount
    constants: tuple[tuple[str, str], ...] = ()


class Event(msgspec.Struct, gc=False, kw_only=True):
    """Base of all events.

    The three fields below are set by the log when the event is appended, never by the emitter. Events are values:
    nobody changes one after it was appended. Subclasses hold no reference cycles (gc=False).
    """

    is_settled_late: ClassVar[bool] = False
    """Whether an emitter may leave work to whoever reads the event first: the log has `settle` called then."""

    seq: Annotated[int, identity(101, "Position in the log, from 0, without holes.")] = -1
    step: Annotated[int, identity(102, "Engine step during which it happened.")] = -1
    time_ns: Annotated[int, instant(103, "Monotonic time; clocks are read twice a step.")] = 0

    def settle(self) -> None:
        """Finish what the emitter left undone. Any thread, also several at once; again does nothing."""


class EventSpec(msgspec.Struct, frozen=True):
    """What the registry knows of one event."""

    number: int
    name: str
    brief: str
    cls: type[Event]
    fields: dict[str, FieldSpec]
    types: dict[str, Any]
    feeds: tuple[Feed, ...]

    @property
    def family(self) -> str:
        """The part of the name before the dot: block, request, step, ..."""
        return self.name.split(".", 1)[0]


class Registry:
    """All declared events. Filled at import of `kvwatch.telemetry.events`, read-only afterwards."""

    def __init__(self) -> None:
        self._by_number: dict[int, EventSpec] = {}
        self._by_class: dict[type[Event], EventSpec] = {}

    def add(self, spec: EventSpec) -> None:
        """Register one event.

        Raises:
            SchemaError: its number or name is taken, or a declaration is inconsistent.
        """
        if spec.number in self._by_number:
            other = self._by_number[spec.number].name
            raise SchemaError(f"event number {spec.number} of {spec.name} is taken by {other}; take the next free one")
        if any(spec.name == other.name for other in self._by_number.values()):
            raise SchemaError(f"event name {spec.name} is declared twice")
        _check(spec)
        self._by_number[spec.number] = spec
        self._by_class[spec.cls] = spec

    def __iter__(self) -> "Any":
        """Iterate over specs by number."""
        return iter(sorted(self._by_number.values(), key=lambda spec: spec.number))

    def of(self, event_class: type[Event]) -> EventSpec:
        """Return the spec of an event class."""
        return self._by_class[event_class]


REGISTRY = Registry()

E = TypeVar("E", bound=Event)


def event(number: int, name: str, brief: str, *, feeds: Sequence[Feed] = ()) -> Callable[[type[E]], type[E]]:
    """Register the decorated class as event `number`, called `family.happening`."""

    def register(cls: type[E]) -> type[E]:
        hints = get_type_hints(cls, include_extras=True)
        fields: dict[str, FieldSpec] = {}
        types: dict[str, Any] = {}
        for field_name in cls.__struct_fields__:
            hint = hints[field_name]
            if get_origin(hint) is not Annotated:
                raise SchemaError(f"{name}.{field_name} lacks its declaration: Annotated[type, label|value|identity]")
            types[field_name], spec = get_args(hint)[:2]
            fields[field_name] = spec
        REGISTRY.add(EventSpec(number, name, brief, cls, fields, types, tuple(feeds)))
        return cls

    return register


def label_values(spec: EventSpec, field: str) -> tuple[str, ...]:
    """Return the values of a label field that are known in advance, or () when they are open."""
    hint = spec.types[field]
    return tuple(str(choice) for choice in get_args(hint)) if get_origin(hint) is Literal else ()


def _check(spec: EventSpec) -> None:
    numbers = [field.number for field in spec.fields.values()]
    if len(set(numbers)) != len(numbers):
        raise SchemaError(f"event {spec.name}: field numbers {sorted(numbers)} are not unique")
    for feed in spec.feeds:
        for name in set(feed.metric.labels) - {name for name, _ in feed.constants}:
            field = spec.fields.get(name)
            if field is None or field.cardinality is not Cardinality.LABEL:
                raise SchemaError(
                    f"event {spec.name} feeds {feed.metric.name}, whose label {name} is no label field of it"
                )
        for name in (feed.amount.field, feed.amount.weights):
            if name and name not in spec.fields:
                raise SchemaError(f"event {spec.name} feeds {feed.metric.name} from {name}, which it does not have")
