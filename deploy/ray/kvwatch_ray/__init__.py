"""The engine as a Ray Serve application: replicas, prefix-aware routing, scaling by KV pressure, one page of metrics.

    gateway ──(router: equal prefixes to the same replica)──► replica 0 ─► kvwatch serve, a child process
       │                                                 └──► replica 1 ─► kvwatch serve
       └──► fleet ◄── reports of all replicas

`python -m kvwatch_ray` starts it. Needs ray[serve] and kvwatch's base install; `--command` names the `kvwatch` that has
the engine, which may live in another environment.
"""
