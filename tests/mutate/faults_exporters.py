"""Deliberate faults of the metrics page and of KV events out.

O numbers are those of the list of known faults of systems like this one.
"""

from mutate.fault import Fault

KV_EVENTS = "tests/unit/exporters/test_exporters_kv_events.py"
PUBLISHER = "tests/unit/exporters/test_exporters_kv_events_publisher.py"
STREAM = "tests/integration/test_kv_events_out.py"
WIRE = "tests/unit/wire/test_wire_kv_events.py"
SERIES = "tests/unit/exporters/test_exporters_series.py"
ALIASES = "tests/unit/exporters/test_exporters_aliases.py"
OPENMETRICS = "tests/unit/exporters/test_exporters_openmetrics.py"
WRITER = "tests/unit/exporters/test_exporters_writer.py"
LISTENER = "tests/unit/exporters/test_exporters_listener.py"
API_CLIENTS = "tests/integration/test_api_slow_clients.py"
ANSWERS = "tests/unit/exporters/test_exporters_otel_answers.py"
FLIGHT = "tests/unit/recorder/test_recorder_flight.py"

EXPORTERS = (
    Fault(
        name="half-a-request-for-ever",
        stands_for="Connections with half a request each keep their places, and every scraper and probe out.",
        file="kvwatch/listener.py",
        old="http=protocol,",
        new='http="h11",',
        tests=(LISTENER,),
    ),
    Fault(
        name="long-answers-are-cut",
        stands_for="The limit on the time of a request also cuts the answers that take longer to generate.",
        file="kvwatch/http_protocol.py",
        old="return is_answering or super()._is_idle()",
        new="return super()._is_idle()",
        tests=(API_CLIENTS,),
    ),
    Fault(
        name="headers-that-never-end",
        stands_for="A collector that sends its headers byte by byte holds its sender for hours.",
        file="kvwatch/exporters/otel/http_session.py",
        old='manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}',
        new="",
        tests=(ANSWERS,),
    ),
    Fault(
        name="dump-of-the-silence",
        stands_for="The flight recorder's dump of a stall shows the stall and nothing of what led to it.",
        file="kvwatch/recorder/flight.py",
        old="    silence_ns = reach_ns // SILENCE_PART\n",
        new="    silence_ns = 10 * reach_ns\n",
        tests=(FLIGHT,),
    ),
    Fault(
        name="salt-without-a-mark",
        stands_for="Routers are told the tokens of salted blocks and send everybody to them.",
        file="kvwatch/exporters/kv_events/translator.py",
        old='texts = filter(None, (self.adapter, self.salt if place == 0 else ""))',
        new="texts = filter(None, (self.adapter,))",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="removed-while-a-copy-is-there",
        stands_for="O44: every copy of a hash that is evicted is told as the end of the hash.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="            self._num_holders[key] = left\n            return None\n",
        new="            self._num_holders[key] = left\n            return key\n",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="parent-of-the-run-before",
        stands_for="O46: a run that begins in the middle of a chain is told with the parent of the chain's beginning.",
        file="kvwatch/exporters/kv_events/translator.py",
        old='            parents = [event.parent or b"", *event.hashes[:-1]]\n',
        new='            parents = [event.parent or b""] * len(event.hashes)\n',
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="offloaded-as-one-chain",
        stands_for="O46: blocks that were offloaded together are told as if each followed the one before it.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="        parents = event.parents\n",
        new="        parents = None\n",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="reset-that-nobody-hears",
        stands_for="O49: a reset of the cache is not told, and readers route to blocks that are gone.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="        self.residency.clear()\n        return [AllBlocksCleared()]\n\n    def _relocate",
        new="        self.residency.clear()\n        return []\n\n    def _relocate",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="clear-with-every-request",
        stands_for="O50: everything is cleared again and again.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="            RequestQueued: self._note_origin,",
        new="            RequestQueued: lambda _event: [AllBlocksCleared()],",
        tests=(STREAM,),
    ),
    Fault(
        name="gap-healed-without-a-clear",
        stands_for="After lost events what is resident is told again, but not that the rest is gone.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="return [AllBlocksCleared(), *self.residency.events(MAX_BLOCKS_PER_EVENT)]",
        new="return list(self.residency.events(MAX_BLOCKS_PER_EVENT))",
        tests=(STREAM,),
    ),
    Fault(
        name="replay-dropped-in-silence",
        stands_for="O41: the socket drops replies to a reader that is slow, and still sends the end marker.",
        file="kvwatch/exporters/kv_events/publisher.py",
        old="made.setsockopt(zmq.ROUTER_MANDATORY, 1)",
        new="made.setsockopt(zmq.ROUTER_MANDATORY, 0)",
        tests=(PUBLISHER,),
    ),
    Fault(
        name="replay-without-its-topic",
        stands_for="O40: a replayed batch lacks the topic.",
        file="kvwatch/wire/frames.py",
        old='    return [b"", topic, seq.to_bytes(8, "big"), payload]',
        new='    return [b"", seq.to_bytes(8, "big"), payload]',
        tests=(WIRE,),
    ),
    Fault(
        name="replay-that-begins-in-the-middle",
        stands_for="O56: a reader that comes after the buffer has overflowed can never know everything.",
        file="kvwatch/exporters/kv_events/history.py",
        old="        return [*self._base_batches(start), *self._kept]",
        new="        return list(self._kept)",
        tests=(STREAM,),
    ),
    Fault(
        name="port-past-the-last",
        stands_for="O55: the port is checked before the rank is added.",
        file="kvwatch/exporters/kv_events/endpoints.py",
        old="    if port > MAX_PORT:",
        new="    if base > MAX_PORT:",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="two-ranks-on-one-port",
        stands_for="O55: with two ranks the replay port of one is the live port of the other.",
        file="kvwatch/exporters/kv_events/endpoints.py",
        old="    if distance <= dp_rank:",
        new="    if distance < 0:",
        tests=(KV_EVENTS,),
    ),
    Fault(
        name="number-used-up-by-a-failure",
        stands_for="A batch that cannot be encoded takes a sequence number that no replay can ever fill.",
        file="kvwatch/exporters/kv_events/publisher.py",
        old=(
            "        payload = encode_batch(Batch(unix_seconds, list(events), self._dp_rank))\n"
            "        seq = self._history.append(payload)"
        ),
        new=(
            '        seq = self._history.append(b"")\n'
            "        payload = encode_batch(Batch(unix_seconds, list(events), self._dp_rank))"
        ),
        tests=(PUBLISHER,),
    ),
    Fault(
        name="series-for-every-tenant",
        stands_for="O70: what callers name becomes a label as it is.",
        file="kvwatch/ledger/feeds.py",
        old="    return value if value in known else OTHER",
        new="    return value",
        tests=(SERIES,),
    ),
    Fault(
        name="page-of-long-names",
        stands_for="A model's name of ten kilobytes stands on each of some hundred series.",
        file="kvwatch/exporters/prometheus/labels.py",
        old="    if len(text) <= MAX_CHARS:",
        new="    if len(text) >= 0:",
        tests=(SERIES,),
    ),
    Fault(
        name="usage-that-counts-the-cache",
        stands_for="O23: cached blocks count as used, and the prefix cache looks like a leak.",
        file="kvwatch/exporters/prometheus/aliases.py",
        old='Alias("kv_cache_usage_perc", m.KV_USAGE_RATIO, {"tier": TIER})',
        new='Alias("kv_cache_usage_perc", m.KV_BLOCKS, {"tier": TIER})',
        tests=(ALIASES,),
    ),
    Fault(
        name="first-series-of-several",
        stands_for="O37: a gateway's signal is read from the first series of a name, not from the one that is meant.",
        file="kvwatch/exporters/prometheus/gateway.py",
        old='view.value(m.REQUESTS, "waiting")',
        new='view.value(m.REQUESTS, "running")',
        tests=(SERIES,),
    ),
    Fault(
        name="exemplar-of-the-next-bucket",
        stands_for="The trace that a bucket names was faster than the bucket.",
        file="kvwatch/exporters/exemplars.py",
        old="bucket = bisect_left(bounds, value)",
        new="bucket = bisect_left(bounds, value) + 1",
        tests=(OPENMETRICS,),
    ),
    Fault(
        name="quotes-in-a-label",
        stands_for="A quote in a model's name ends the label, and what follows is a label of the caller's.",
        file="kvwatch/exporters/prometheus/writer.py",
        old='    return value.replace("\\\\", r"\\\\").replace("\\n", r"\\n").replace(\'"\', r"\\"")\n',
        new='    return value.replace("\\\\", r"\\\\").replace("\\n", r"\\n")\n',
        tests=(WRITER,),
    ),
)
