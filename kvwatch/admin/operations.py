"""Everything that the admin API answers."""

from kvwatch.admin import act, adapters, config, diagnosis, document, event_stream, inspect, pool
from kvwatch.admin.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *document.OPERATIONS,
    *pool.OPERATIONS,
    *inspect.OPERATIONS,
    *event_stream.OPERATIONS,
    *diagnosis.OPERATIONS,
    *config.OPERATIONS,
    *act.OPERATIONS,
    *adapters.OPERATIONS,
)
"""All operations; the OpenAPI document, the command line and docs/admin.md are derived from them."""
