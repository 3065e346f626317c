"""What leaves the process. Exporters read views, never the engine, and know nothing of each other.

- identity.py   the labels that every series of an engine carries
- exemplars.py  traces that belong to buckets, from whoever exports traces to whoever renders histograms
- prometheus/   text and OpenMetrics on a read-only listener
- kv_events/    what the prefix cache holds, in vLLM's wire format
"""
