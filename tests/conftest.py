"""Settings for all tests."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from kvwatch_engine.threads import bound_spinning

# Before any test module imports torch: tests run beside servers of their own.
bound_spinning(2000)

# How long an example takes says how busy the machine is.
settings.register_profile("kvwatch", deadline=None)
settings.load_profile("kvwatch")


def pytest_configure() -> None:
    """Logs go to the standard library, which pytest captures and shows only for tests that fail."""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _logs_stay_as_they_were() -> Iterator[None]:
    """A test that runs a command in this process configures logs as the command does: the next one must not see it."""
    root, configuration = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    if structlog.get_config() != configuration:
        structlog.configure(**configuration)
        root.handlers[:] = handlers
        root.setLevel(level)
