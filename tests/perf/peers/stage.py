"""All sides up at once, of which at most one is not frozen."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peers.servers import Server, free_port
from peers.sides import Side


class RunningSide:
    """A side whose server is up. Frozen, except within `thawed`."""

    def __init__(self, side: Side, log: Path) -> None:
        port = free_port()
        self.side = side
        self.url = f"http://127.0.0.1:{port}"
        self._server = Server(side.at(port), side.environment, log, is_ours=side.is_ours)
        self.start_seconds = 0.0

    @property
    def name(self) -> str:
        return self.side.name

    def wait_ready(self) -> None:
        """Wait until it serves, then freeze it.

        Raises:
            ServerFailed: it does not.
        """
        self.start_seconds = self._server.wait_ready(self.url + self.side.ready_path)
        self._server.freeze()

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Let it run for as long as the block lasts."""
        self._server.thaw()
        try:
            yield
        finally:
            self._server.freeze()

    def end(self) -> None:
        """End the server."""
        self._server.end()

    def cpu_seconds(self) -> float:
        """Return the processor time that its processes have taken."""
        return self._server.cpu_seconds()

    def log_tail(self) -> str:
        """Return the end of what it said."""
        return self._server.tail()


@contextmanager
def running(sides: Sequence[Side], log_dir: Path) -> Iterator[list[RunningSide]]:
    """Start the sides one after the other; they end with the block, whatever happens.

    Raises:
        ServerFailed: one does not start.
    """
    with ExitStack() as stack:
        found = []
        for side in sides:
            running_side = RunningSide(side, log_dir / f"{side.name}.log")
            stack.callback(running_side.end)
            running_side.wait_ready()
            found.append(running_side)
        yield found
