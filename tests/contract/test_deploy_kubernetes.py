"""deploy/helm and deploy/kustomize: what they render is legal, runs with real flags, and harms no model's pod."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_lines import COMMANDS, understood, watched
from deploy_tools import (
    DEPLOY,
    WITHOUT_SCHEMA,
    Charts,
    Document,
    binary,
    containers,
    copy_charts,
    kustomized,
    pod_specs,
    run,
    schema_errors,
)
from metric_names import wrong_selectors

from kvwatch.config import declared_settings
from kvwatch.derive.chart import OWN_SETTINGS
from kvwatch.errors import ConfigError
from kvwatch.sidecar import SidecarSettings
from kvwatch_dashboards.generated import FOLDER
from kvwatch_dashboards.settings import ENGINE_JOBS, SIDECAR_JOBS
from kvwatch_engine.serve.settings import ServeSettings

EXAMPLES = sorted(path.name for path in (DEPLOY / "kustomize" / "examples").iterdir())
EVERYTHING: dict[str, object] = {
    "settings": {"num_blocks": 1_000_000, "watermark": 0.05, "prefix_cache": False, "lora": ["a=/a", "b=/b"]},
    "replicas": 3,
    "apiKeys": {"secretName": "keys"},
    "admin": {"secretName": "tokens", "expose": True},
    "grpc": {"secretName": "tokens", "expose": True},
    "huggingFace": {"secretName": "hub"},
    "image": {"repository": "r/kvwatch", "digest": "sha256:" + "0" * 64},
    "podLabels": {"team": "llm"},
    "podAnnotations": {"note": "x"},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "extraVolumes": [{"name": "disk", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "disk", "mountPath": "/disk"}],
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}
ENGINE_VALUES: dict[str, dict[str, object]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "keda": {"autoscaling": {"kind": "keda"}, "cache": {"persistent": False}},
    "hpa": {"autoscaling": {"kind": "hpa"}},
}
SIDECAR_VALUES: dict[str, dict[str, object]] = {
    "one rank": {},
    "two ranks": {"ranks": 2, "kvwatch": {"engine": {"ranks": 2, "tokenSecret": {"name": "key"}}}},
    "tcp": {
        "kvwatch": {
            "engine": {"transport": "tcp"},
            "settings": {"record_dir": "/var/cache/kvwatch/r", "trace_ratio": 1},
        }
    },
    "sglang": {"kvwatch": {"engine": {"kind": "sglang"}}},
}


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Charts:
    return copy_charts(tmp_path_factory.mktemp("charts"))


@pytest.fixture(scope="module")
def rendered(charts: Charts) -> dict[str, list[Document]]:
    """Everything that Kubernetes would be given, by what makes it."""
    return {
        **{f"kvwatch, {name}": charts.render("kvwatch", values) for name, values in ENGINE_VALUES.items()},
        **{f"vllm, {name}": charts.render("examples/vllm", values, "chat") for name, values in SIDECAR_VALUES.items()},
        **{f"kustomize, {name}": kustomized(DEPLOY / "kustomize" / "examples" / name) for name in EXAMPLES},
    }


@pytest.fixture(scope="module")
def pods(rendered: dict[str, list[Document]]) -> list[tuple[str, Document]]:
    return [(name, spec) for name, found in rendered.items() for spec in pod_specs(found)]


def environment_of(container: Document) -> dict[str, str]:
    """Return a container's variables; what comes from the pod is made up."""
    return {each["name"]: each.get("value", "from-the-pod") for each in container.get("env", ())}


def own_containers(pods: list[tuple[str, Document]]) -> Iterator[tuple[str, Document, Document]]:
    """Yield the containers that run kvwatch."""
    for name, spec in pods:
        for container in containers(spec):
            if container.get("args", [""])[0] in COMMANDS:
                yield name, spec, container


def sidecars(pods: list[tuple[str, Document]]) -> Iterator[tuple[str, Document, Document]]:
    return (each for each in own_containers(pods) if each[2]["args"][0] == "sidecar")


@pytest.mark.parametrize("chart", ["kvwatch", "kvwatch-sidecar", "examples/vllm"])
def test_helm_has_nothing_against_a_chart(chart: str, charts: Charts) -> None:
    assert "0 chart(s) failed" in run(binary("helm"), "lint", "--strict", charts.folder / chart)


def test_the_schemas_of_kubernetes_and_of_its_extensions_take_every_object(rendered: dict[str, list[Document]]) -> None:
    everything = [(name, document) for name, found in rendered.items() for document in found]

    assert len(everything) > 60
    assert [f"{name}: {error}" for name, document in everything for error in schema_errors(document)] == []
    assert {document["kind"] for _, document in everything if document["kind"] in WITHOUT_SCHEMA} == WITHOUT_SCHEMA


def test_a_field_that_nobody_knows_is_found(rendered: dict[str, list[Document]]) -> None:
    broken = json.loads(json.dumps(rendered["kvwatch, everything"]))
    by_kind = {document["kind"]: document for document in broken}
    by_kind["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    by_kind["ServiceMonitor"]["spec"]["endpoints"][0]["intervals"] = "15s"

    assert schema_errors(by_kind["StatefulSet"])
    assert schema_errors(by_kind["ServiceMonitor"]) == ["ServiceMonitor: nobody knows .spec.endpoints[0].intervals"]


def test_every_command_line_is_one_that_the_command_understands(pods: list[tuple[str, Document]]) -> None:
    found = list(own_containers(pods))

    assert {container["args"][0] for _, _, container in found} == set(COMMANDS)
    for _, _, container in found:
        settings = understood(container["args"], environment_of(container))
        if container["args"][0] == "sidecar":
            assert len(watched(settings)) == 1


def test_settings_arrive_as_they_were_given(charts: Charts) -> None:
    (spec,) = pod_specs(charts.render("kvwatch", EVERYTHING))

    settings = understood(spec["containers"][0]["args"], {"POD_NAME": "kvwatch-0"})

    assert isinstance(settings, ServeSettings)
    assert (settings.num_blocks, settings.watermark, settings.prefix_cache) == (1_000_000, "0.05", False)
    assert settings.lora == ("a=/a", "b=/b")
    assert settings.engine_name == "kvwatch-0"


@pytest.mark.parametrize(("command", "declared"), [("serve", ServeSettings), ("sidecar", SidecarSettings)])
def test_a_chart_takes_every_setting_but_those_that_it_sets_itself(
    command: str, declared: type[ServeSettings] | type[SidecarSettings], pods: list[tuple[str, Document]]
) -> None:
    chart = {"serve": "kvwatch", "sidecar": "kvwatch-sidecar"}[command]
    schema = json.loads((DEPLOY / "helm" / chart / "values.schema.json").read_text(encoding="utf-8"))
    taken = set(schema["properties"]["settings"]["properties"])
    names = {each.name for each in declared_settings(declared)}
    flags = {
        match[1].replace("-", "_")
        for name, _, container in own_containers(pods)
        if container["args"][0] == command and name in {"kvwatch, everything", "vllm, two ranks", "kvwatch, defaults"}
        for word in container["args"]
        if (match := re.match(r"--([a-z0-9-]+)", word))
    }

    assert names - taken == OWN_SETTINGS[command]
    assert flags - taken - {"no_prefix_cache"} == OWN_SETTINGS[command]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"settings": {"num_blcks": 5}}, "num_blcks"),
        ({"settings": {"kv_dtype": "int4"}}, "kv_dtype"),
        ({"settings": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"settings": {"port": 9000}}, "port"),
        ({"replica": 2}, "replica"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"admin": {"expose": True}}, "admin.expose needs admin.secretName"),
        ({"grpc": {"expose": True}}, "grpc.expose needs grpc.secretName"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_values_that_would_not_work_are_refused(values: dict[str, object], complaint: str, charts: Charts) -> None:
    assert complaint in charts.complaint("kvwatch", values)


def test_ranks_cannot_share_a_socket(charts: Charts) -> None:
    values = {"kvwatch": {"engine": {"ranks": 2, "transport": "ipc"}}}

    assert "no port to tell ranks apart" in charts.complaint("examples/vllm", values)


def test_a_sidecar_is_one_and_cannot_take_its_pod_out_of_service(pods: list[tuple[str, Document]]) -> None:
    found = list(sidecars(pods))

    assert len(found) == len(SIDECAR_VALUES) + 3
    for name, spec, container in found:
        assert container in spec["initContainers"], name
        assert container["restartPolicy"] == "Always", name
        assert not {"readinessProbe", "livenessProbe", "startupProbe"} & container.keys(), name
        assert container["resources"]["requests"] == container["resources"]["limits"], name
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}, name
        assert spec["automountServiceAccountToken"] is False, name


def test_engine_and_sidecar_agree_on_where_events_pass_and_nobody_else_can_reach_them(
    rendered: dict[str, list[Document]], pods: list[tuple[str, Document]]
) -> None:
    for name, spec, container in sidecars(pods):
        (spec_of_engine,) = watched(understood(container["args"], environment_of(container)))
        (engine,) = spec["containers"]
        words = engine["args"]
        config = json.loads(words[words.index("--kv-events-config") + 1])
        assert (config["endpoint"], config["replay_endpoint"]) == (spec_of_engine.kv_events, spec_of_engine.replay), (
            name
        )
        assert config.get("enable_kv_cache_events") is (True if spec_of_engine.kind == "vllm" else None), name
        mounted = [{each["mountPath"] for each in one["volumeMounts"]} for one in (engine, container)]
        if config["endpoint"].startswith("ipc://"):
            assert all("/run/kvwatch" in paths for paths in mounted), name
            assert spec["securityContext"]["runAsUser"] == container["securityContext"]["runAsUser"], name
            assert (spec_of_engine.mode, spec_of_engine.dp_ranks) == ("auto", 1), name
        else:
            assert spec_of_engine.mode == "bind", name
            assert config["endpoint"].startswith("tcp://127.0.0.1:"), name
            assert config["replay_endpoint"].startswith("tcp://127.0.0.1:"), name
            (policy,) = [each for each in rendered[name] if each["kind"] == "NetworkPolicy"]
            open_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
            assert policy["spec"]["policyTypes"] == ["Ingress"], name
            assert open_ports == {8000, 9400}, name


def test_a_token_comes_from_a_secret(pods: list[tuple[str, Document]]) -> None:
    with_token = [
        (spec, container, engine)
        for _, spec, container in sidecars(pods)
        for engine in watched(understood(container["args"], environment_of(container)))
        if engine.token_file is not None
    ]

    assert len(with_token) == 2
    for spec, container, engine in with_token:
        assert engine.token_file is not None
        mount = next(each for each in container["volumeMounts"] if engine.token_file.startswith(each["mountPath"]))
        assert mount["readOnly"] is True
        assert next(each for each in spec["volumes"] if each["name"] == mount["name"])["secret"]


def test_our_containers_are_nobody_and_write_only_where_they_must(pods: list[tuple[str, Document]]) -> None:
    for name, spec, container in own_containers(pods):
        own = spec.get("securityContext", {}) | container["securityContext"]
        assert own["runAsNonRoot"] is True, name
        assert own["runAsUser"] > 0, name
        assert own["readOnlyRootFilesystem"] is True, name
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        writable = {each["name"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert writable <= {"cache", "tmp", "disk", "kvwatch-run", "kvwatch-cache"}, name


def test_every_image_has_a_version(pods: list[tuple[str, Document]]) -> None:
    for name, spec in pods:
        for container in containers(spec):
            assert re.search(r":v?\d+\.\d+\.\d+|@sha256:[0-9a-f]{64}", container["image"]), (name, container["image"])


def test_queries_of_autoscalers_and_pickers_name_metrics_that_exist(rendered: dict[str, list[Document]]) -> None:
    queries = [
        trigger["metadata"]["query"]
        for document in rendered["kvwatch, keda"]
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    (picker,) = pod_specs(rendered["kustomize, inference-gateway"])
    signals = [
        word.partition("=")[2]
        for word in picker["containers"][0]["args"]
        if re.match(r"--[a-z-]+-metric=kvwatch", word)
    ]

    assert len(queries) == 2
    assert len(signals) == 3
    assert [wrong for text in (*queries, *signals) for wrong in wrong_selectors(text, {"job", "namespace"})] == []


def test_what_the_hpa_asks_for_is_what_the_adapter_makes(rendered: dict[str, list[Document]]) -> None:
    (scaler,) = [each for each in rendered["kvwatch, hpa"] if each["kind"] == "HorizontalPodAutoscaler"]
    asked = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "adapter-rules.yaml").read_text(encoding="utf-8"))["rules"][
        "custom"
    ]

    assert {rule["name"]["as"] for rule in rules} == asked
    for rule in rules:
        assert list(wrong_selectors(rule["seriesQuery"], {"namespace", "pod"})) == []


def test_the_chart_carries_the_generated_rules_and_dashboards(rendered: dict[str, list[Document]]) -> None:
    found = rendered["kvwatch, everything"]
    rules = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "PrometheusRule"}
    boards: dict[str, str] = {}
    for each in found:
        if each["kind"] == "ConfigMap":
            assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
            boards |= each["data"]

    for kind in ("recording", "alerts"):
        text = (FOLDER / f"{kind}.rules.yaml").read_text(encoding="utf-8")
        assert rules[f"kvwatch-{kind}"] == yaml.safe_load(text)
    wanted = {path.name: path.read_text(encoding="utf-8").rstrip("\n") for path in FOLDER.glob("*.json")}
    assert boards == wanted


def test_scrape_jobs_are_those_that_dashboards_look_for(rendered: dict[str, list[Document]]) -> None:
    (monitor,) = [each for each in rendered["kvwatch, everything"] if each["kind"] == "ServiceMonitor"]
    (service,) = [
        each
        for each in rendered["kvwatch, everything"]
        if each["kind"] == "Service"
        and monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert re.fullmatch(ENGINE_JOBS, service["metadata"]["labels"][monitor["spec"]["jobLabel"]])

    found = rendered["kustomize, vllm"]
    (pod_monitor,) = [each for each in found if each["kind"] == "PodMonitor"]
    (deployment,) = [each for each in found if each["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert re.fullmatch(SIDECAR_JOBS, labels[pod_monitor["spec"]["jobLabel"]])
    assert pod_monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_wrong_flag_in_a_manifest_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        understood(["serve", "--num-blcks=5"])
    assert "--num-blcks" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"kv.dtype"):
        understood(["serve", "--kv-dtype=int4"])
    with pytest.raises(ConfigError, match="option"):
        watched(understood(["sidecar", "--engine=a=vllm+http://h:1?kv_event=tcp://h:2"]))


def test_components_are_all_used_by_an_example() -> None:
    used = " ".join(path.read_text(encoding="utf-8") for path in (DEPLOY / "kustomize").rglob("kustomization.yaml"))
    names = [path.name for path in Path(DEPLOY / "kustomize" / "components").iterdir()]

    assert [name for name in names if not re.search(rf"/{name}\b", used)] == []
