"""deploy/docker, compose, prometheus, alertmanager, systemd: legal, pinned, real flags, and what is generated."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from command_lines import COMMANDS, understood, watched
from deploy_tools import DEPLOY, ROOT, Document, run, tool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvwatch.admin.tokens import Role, TokenFile
from kvwatch.config import declared_settings
from kvwatch.sidecar import SidecarSettings
from kvwatch.telemetry.clock import SystemClock
from kvwatch_dashboards.alerts import ALERTS
from kvwatch_dashboards.generated import FOLDER
from kvwatch_dashboards.settings import ENGINE_JOBS, SIDECAR_JOBS
from kvwatch_engine.serve.settings import ServeSettings

COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DROP_INS = sorted((DEPLOY / "systemd").glob("*.service.d/*.conf"))


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip, and say so, where a program of Debian is missing."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not here: install '{package}'")


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """compose.yaml as Docker Compose understands it."""
    copied = tmp_path_factory.mktemp("checkout") / "deploy"
    shutil.copytree(DEPLOY / "compose", copied / "compose", ignore=shutil.ignore_patterns("secrets"))
    text = run(
        tool("docker-compose"), "--file", copied / "compose" / "compose.yaml", "--profile", "sidecar",
        "config", "--format", "json",
    )  # fmt: skip
    found: Document = json.loads(text)
    return found


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile without comments, continued lines joined."""
    text = path.read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    lines = "\n".join(written).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_against_a_dockerfile(path: Path) -> None:
    run(tool("hadolint"), path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_from_pinned_versions(path: Path) -> None:
    found = instructions(path)
    users = [value for name, value in found if name == "USER"]
    (base,) = [value for name, value in found if name == "ARG" and value.startswith("PYTHON=")]
    words = json.loads(next(value for name, value in found if name == "CMD"))

    assert users == ["10001:10001"]
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-bookworm", base)
    assert json.loads(next(value for name, value in found if name == "ENTRYPOINT")) == ["kvwatch"]
    if "--help" not in words:
        understood(words)
    sources = {word for name, value in found if name == "COPY" and "--from" not in value for word in value.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    ignored = path.with_name(path.name + ".dockerignore").read_text(encoding="utf-8").split()
    assert all(
        "!" + source.replace("engine.lock", "*.lock").replace("sidecar.lock", "*.lock") in ignored for source in sources
    )


@pytest.mark.parametrize(("lock", "extras"), [("sidecar.lock.txt", {""}), ("engine.lock.txt", {"", "engine"})])
def test_a_lock_has_a_version_of_every_requirement_that_the_package_takes(lock: str, extras: set[str]) -> None:
    lines = (DEPLOY / "docker" / lock).read_text(encoding="utf-8").splitlines()[1:]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    wanted = [
        requirement
        for requirement in map(Requirement, requires("kvwatch") or ())
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]

    assert len(wanted) > 15
    assert all(pinned.values())
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is not in {lock}: `make lock`"
        assert requirement.specifier.contains(pinned[name]), f"{name}=={pinned[name]}, {requirement}: `make lock`"
    assert ("torch" in pinned) == ("engine" in extras)


def test_composed_commands_are_understood(compose: Document) -> None:
    ours = {name: each for name, each in compose["services"].items() if (each.get("command") or [""])[0] in COMMANDS}

    assert ours.keys() == {"engine", "sidecar"}
    understood(ours["engine"]["command"])
    (engine,) = watched(understood(ours["sidecar"]["command"]))
    secrets = {f"/run/secrets/{each['target'].rpartition('/')[2]}" for each in ours["sidecar"]["secrets"]}
    assert engine.token_file in secrets
    assert ours["engine"]["build"]["dockerfile"] == "deploy/docker/engine.Dockerfile"


def test_composed_services_are_pinned_hardened_and_on_the_loopback(compose: Document) -> None:
    assert len(compose["services"]) == 7
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name


def test_composed_files_exist_and_dashboards_and_rules_are_the_generated_ones() -> None:
    declared = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    mounted = {
        name: {target: (COMPOSE.parent / source).resolve() for source, target in pairs}
        for name, service in declared.items()
        if (pairs := [each.split(":")[:2] for each in service.get("volumes", ()) if each.startswith(".")])
    }

    assert all(path.exists() for paths in mounted.values() for path in paths.values())
    assert mounted["prometheus"]["/etc/prometheus/rules"] == FOLDER.resolve()
    providers = yaml.safe_load((COMPOSE.parent / "grafana/dashboards/kvwatch.yaml").read_text(encoding="utf-8"))
    assert mounted["grafana"][providers["providers"][0]["options"]["path"]] == FOLDER.resolve()
    home = declared["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / Path(home).name).is_file()


def test_grafana_leads_from_exemplars_to_the_traces_that_the_collector_sends_on() -> None:
    sources = {
        each["uid"]: each
        for each in yaml.safe_load((COMPOSE.parent / "grafana/datasources/kvwatch.yaml").read_text(encoding="utf-8"))[
            "datasources"
        ]
    }
    collector = yaml.safe_load((COMPOSE.parent / "collector.yaml").read_text(encoding="utf-8"))
    (destination,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]

    assert sources[destination["datasourceUid"]]["type"] == "tempo"
    assert destination["name"] == "trace_id"
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= collector[kind].keys()


@needs("promtool", "prometheus")
def test_promtool_takes_the_configuration_with_the_generated_rules(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yaml", tmp_path)
    shutil.copytree(FOLDER, tmp_path / "rules")

    said = run("promtool", "check", "config", tmp_path / "prometheus.yaml")

    assert "2 rule files found" in said
    config = yaml.safe_load((tmp_path / "prometheus.yaml").read_text(encoding="utf-8"))
    jobs = [each["job_name"] for each in config["scrape_configs"]]
    assert [job for job in jobs if re.fullmatch(ENGINE_JOBS, job)] == ["kvwatch"]
    assert [job for job in jobs if re.fullmatch(SIDECAR_JOBS, job)] == ["kvwatch-sidecar"]


@needs("amtool", "prometheus-alertmanager")
def test_amtool_takes_the_configuration() -> None:
    assert "SUCCESS" in run("amtool", "check-config", DEPLOY / "alertmanager" / "alertmanager.yaml")


def test_alertmanager_names_alerts_and_severities_that_exist() -> None:
    config = (DEPLOY / "alertmanager" / "alertmanager.yaml").read_text(encoding="utf-8")

    assert set(re.findall(r"KVWatch\w+", config)) <= {alert.name for alert in ALERTS}
    assert set(re.findall(r'severity="(\w+)"', config)) == {alert.severity for alert in ALERTS}


def verify(unit: Path) -> None:
    """Have systemd read a unit and its drop-ins; of what it does not know it complains and ends well."""
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    complaints = [line for line in done.stderr.splitlines() if str(unit.parent) in line]
    assert (done.returncode, complaints) == (0, [])


@needs("systemd-analyze", "systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_a_unit_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    copied = tmp_path / unit.name
    copied.write_text(
        unit.read_text(encoding="utf-8").replace("/opt/kvwatch/bin/kvwatch", "/bin/true"), encoding="utf-8"
    )

    verify(copied)
    shutil.copytree(unit.parent, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.service", "*.toml"))
    verify(copied)
    run("systemd-analyze", "security", "--offline=true", "--threshold=25", copied)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_line_and_a_file_that_are_understood(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=/opt/kvwatch/bin/kvwatch (.+)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
    words = shlex.split(line)
    (config,) = [word for word in words if word.startswith("--config=")]
    example = DEPLOY / "systemd" / Path(config.partition("=")[2]).name

    settings = understood([f"--config={example}" if word == config else word for word in words])

    assert tomllib.loads(example.read_text(encoding="utf-8"))
    if isinstance(settings, SidecarSettings):
        assert [each.name for each in watched(settings)] == ["chat"]
    else:
        assert isinstance(settings, ServeSettings)
        assert settings.kv_memory == "2GiB"


@pytest.mark.parametrize("path", [*UNITS, *DROP_INS], ids=lambda path: path.name)
def test_a_unit_needs_no_file_that_its_head_does_not_say_how_to_make(path: Path) -> None:
    """A credential that is not there ends a unit before its program begins."""
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    made = {word for command in commands if command.startswith("install ") for word in command.split()}
    needed = {file for line in lines if not line.startswith("#") for file in re.findall(r"/etc/[\w./-]+", line)}

    assert needed
    assert needed <= made
    installed = [command.split() for command in commands if command.startswith("install ")]
    sources = [words[words.index("-m") + 2] for words in installed]
    assert all(source == "/dev/null" or list(path.parent.glob(f"**/{source}")) for source in sources)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_by_itself_loads_no_credential(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")

    assert "Credential" not in text
    assert "%d" not in text


def test_the_drop_in_for_admin_tokens_names_a_setting_and_its_example_is_a_token(tmp_path: Path) -> None:
    (path,) = DROP_INS
    text = path.read_text(encoding="utf-8")
    ((credential, source),) = re.findall(r"^LoadCredential=([\w-]+):(\S+)$", text, re.MULTILINE)
    ((variable, name),) = re.findall(r"^Environment=(\w+)=%d/([\w-]+)$", text, re.MULTILINE)
    ((line, file),) = re.findall(r'^#   echo "(.+)" >> (\S+)$', text, re.MULTILINE)

    assert (name, file) == (credential, source)
    assert variable in {each.variable for each in declared_settings(ServeSettings)}
    (tmp_path / "tokens").write_text(line.replace("$(openssl rand -hex 32)", "0f" * 32) + "\n", encoding="utf-8")
    found = TokenFile(str(tmp_path / "tokens"), SystemClock()).find("0f" * 32)
    assert found is not None
    assert Role.OPERATE in found.token.roles
