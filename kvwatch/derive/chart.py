"""The `settings` of a Helm chart's values.schema.json, made from the class that declares them.

Owns how a setting looks in JSON Schema. The rest of such a file is written by hand and stays as it is.
"""

import json
from collections.abc import Collection
from typing import Any

import msgspec

from kvwatch.config import Setting, declared_settings

OWN_SETTINGS: dict[str, frozenset[str]] = {
    "serve": frozenset(
        {
            "host", "port", "metrics_listen", "admin_listen", "grpc_listen", "engine_name", "cache_dir",
            "drain_seconds", "log_format", "api_key_file", "admin_token_file", "admin_hosts", "grpc_token_file",
        }
    ),
    "sidecar": frozenset({"engine", "metrics_listen", "cache_dir", "log_format"}),
}  # fmt: skip
"""For each command what its chart sets itself: probes, ports and volumes depend on it."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def with_settings(page: str, cls: type[msgspec.Struct], own: Collection[str]) -> str:
    """Return a values.schema.json with its `settings` as they are declared now.

    Args:
        page: What the file says now.
        cls: Class that declares the settings.
        own: Names of those that the chart sets itself, which nobody else may.
    """
    schema = json.loads(page)
    schema["properties"]["settings"] = settings_schema(cls, own)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def settings_schema(cls: type[msgspec.Struct], own: Collection[str]) -> dict[str, Any]:
    """Return the schema of a map from names to values."""
    return {
        "type": "object",
        "description": "Settings by their names with underscores; written by `make derive`.",
        "additionalProperties": False,
        "properties": {each.name: _schema(each) for each in declared_settings(cls) if each.name not in own},
    }


def _schema(each: Setting) -> dict[str, Any]:
    if each.is_repeated:
        return {"description": each.spec.brief, "type": "array", "items": {"type": "string"}}
    found: dict[str, Any] = {"description": each.spec.brief, "type": _TYPES[each.kind]}
    if each.choices:
        found["enum"] = list(each.choices)
    if each.spec.minimum is not None:
        found["minimum"] = each.spec.minimum
    if each.spec.maximum is not None:
        found["maximum"] = each.spec.maximum
    if each.kind is str and not each.choices:
        found["type"] = ["string", "number"]  # what looks like a number in YAML is one: watermark: 0.02
    return found
