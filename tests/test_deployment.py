"""The systemd unit and the Kubernetes manifest are valid and start the documented command."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[1] / "serving_examples"
SERVE = ["serve", "--quantization", "latq"]


def unit_settings() -> dict[str, str]:
    lines = (EXAMPLES / "latq.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith(("#", "Environment=")))


def test_unit_starts_the_documented_command() -> None:
    command = shlex.split(unit_settings()["ExecStart"])
    assert Path(command[0]).name == "vllm"
    assert set(SERVE) < set(command)


def test_unit_verifies_the_checkpoint_that_it_serves() -> None:
    settings = unit_settings()
    program, *arguments = shlex.split(settings["ExecStartPre"])
    model = shlex.split(settings["ExecStart"])[2]
    assert (Path(program).name, arguments) == ("latq", ["verify", model])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    unit = tmp_path / "latq.service"
    # systemd-analyze also checks that the program exists: any will do.
    text = (EXAMPLES / "latq.service").read_text()
    unit.write_text(re.sub("/opt/latq/venv/bin/(vllm|latq)", str(shutil.which("true")), text))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "latq.service" in line]
    assert (done.returncode, complaints) == (0, [])


def test_manifest_follows_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    pod = documents[0]["spec"]["template"]["spec"]
    (server,), (verifier,) = pod["containers"], pod["initContainers"]
    assert server["command"][0] == "vllm"
    assert set(SERVE) < set(server["command"])
    assert verifier["command"] == ["latq", "verify", server["command"][2]]
    assert verifier["volumeMounts"][0] == server["volumeMounts"][0]
    assert verifier["image"] == server["image"]
