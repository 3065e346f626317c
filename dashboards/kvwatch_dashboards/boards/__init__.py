"""The dashboards, each in a module of its name: data only."""

from kvwatch_dashboards.boards.capacity import CAPACITY
from kvwatch_dashboards.boards.fleet import FLEET
from kvwatch_dashboards.boards.incident import INCIDENT
from kvwatch_dashboards.boards.itself import ITSELF
from kvwatch_dashboards.boards.latency import LATENCY
from kvwatch_dashboards.boards.prefix_cache import PREFIX_CACHE
from kvwatch_dashboards.boards.pressure import PRESSURE
from kvwatch_dashboards.panel import Board

BOARDS: tuple[Board, ...] = (INCIDENT, CAPACITY, PRESSURE, PREFIX_CACHE, LATENCY, FLEET, ITSELF)

__all__ = ["BOARDS"]
