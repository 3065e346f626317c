"""The application: which deployments there are and how they are set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvwatch_ray.fleet import Fleet
from kvwatch_ray.gateway import Gateway
from kvwatch_ray.replica import EngineReplica
from kvwatch_ray.router import PrefixRouter
from kvwatch_ray.scaling import kv_pressure

QUIET = {"enable_access_log": False}
"""Reports come every two seconds from each replica, and engines log their own requests."""

MAX_ONGOING = 2_048
"""Requests that Ray gives a replica at once. The engine's own queue knows priorities, and answers 429 when full."""


@dataclass(frozen=True, slots=True)
class AppSettings:
    """What can be chosen."""

    replicas: int = 1
    max_replicas: int | None = None
    """None for a fixed number."""
    gpus: float = 0
    """For each replica."""
    cpus: float = 1
    command: Sequence[str] = ("kvwatch",)
    """What starts kvwatch on the machines of the cluster."""
    flags: Sequence[str] = ()
    """Of `kvwatch serve`."""


def make_app(settings: AppSettings) -> Any:
    """Return the application, for `serve.run`."""
    fleet = (
        serve.deployment(Fleet)
        .options(name="fleet", num_replicas=1, ray_actor_options={"num_cpus": 0}, logging_config=QUIET)
        .bind()
    )
    scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=settings.max_replicas,
                upscale_delay_s=15,
                downscale_delay_s=600,  # a new replica has an empty prefix cache
                policy=AutoscalingPolicy(policy_function=kv_pressure),
            )
        }
    engine = serve.deployment(EngineReplica).options(
        name="engine",
        max_ongoing_requests=MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=60,
        logging_config=QUIET,
        **scaling,
    )
    gateway = serve.deployment(Gateway).options(
        name="gateway", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, logging_config=QUIET
    )
    return gateway.bind(engine.bind(fleet, list(settings.command), list(settings.flags)), fleet)
