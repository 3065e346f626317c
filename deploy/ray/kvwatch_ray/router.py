"""Ray Serve's request router by prefix. What it decides is in `routing`."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvwatch_ray.routing import chosen


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray has no types here
    """Asks the owner of a request's prefix first; runs where the handle is, in the gateway."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order in which they are to be asked, one at a time."""
        by_name = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        kwargs: dict[str, Any] = {} if pending_request is None else pending_request.kwargs
        busy = {name: self._replica_queue_len_cache.get(each.replica_id) or 0 for name, each in by_name.items()}
        return [[by_name[name]] for name in chosen(str(kwargs.get("prefix", "")), busy)]
