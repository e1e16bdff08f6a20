"""The systemd unit, the Kubernetes manifest and its image are valid and start the documented command."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import vllm_latq
from helpers.documentation import environment, runnable, words
from helpers.modules import ROOT

EXAMPLES = ROOT / "serving_examples"
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


# The fields of a LeaderWorkerSet that the manifest may have, as its resource definition types them; pods are checked by
# the schema of Kubernetes.
LEADER_WORKER_SET: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer"},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_manifest_of_several_nodes_follows_its_schemas() -> None:
    """Leader and workers run one command, with the ranks that the controller gives them."""
    jsonschema, kubernetes_validate = (pytest.importorskip(name) for name in ("jsonschema", "kubernetes_validate"))
    group, service = yaml.safe_load_all((EXAMPLES / "leaderworkerset.yaml").read_text())
    jsonschema.validate(group, LEADER_WORKER_SET)
    kubernetes_validate.validate(service, "1.31", strict=True)
    template = group["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template[name]}
        kubernetes_validate.validate(pod, "1.31", strict=True)
    leader, worker = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    (first,), (second,) = leader["containers"], worker["containers"]
    started, joined = first["command"], second["command"]
    assert set(SERVE) < set(started) & set(joined)
    assert (option(started, "--node-rank"), option(joined, "--node-rank")) == ("0", "$(LWS_WORKER_INDEX)")
    for name in ("--nnodes", "--master-addr", "--tensor-parallel-size", "--pipeline-parallel-size"):
        assert option(started, name) == option(joined, name)
    ranks = int(option(started, "--tensor-parallel-size")) * int(option(started, "--pipeline-parallel-size"))
    assert ranks == template["size"] * first["resources"]["limits"]["nvidia.com/gpu"]
    assert joined[-1] == "--headless"
    assert leader["initContainers"][0]["command"] == ["latq", "verify", started[2]]
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()


def dockerfile() -> list[str]:
    """Return the instructions of the Dockerfile."""
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_image_has_no_complaint_of_hadolint() -> None:
    done = subprocess.run(["hadolint", EXAMPLES / "Dockerfile"], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_image_is_built_as_documented_and_run_by_the_manifest() -> None:
    built = words(runnable("serve.md", "image"), {})
    tag, file = built[built.index("--tag") + 1], ROOT / built[built.index("--file") + 1]
    assert file == EXAMPLES / "Dockerfile"
    assert " ".join(built) in (ROOT / "Makefile").read_text()
    assert tag == f"vllm-latq:{vllm_latq.__version__}"
    assert set(re.findall(r"image: .*/(\S+)", (EXAMPLES / "kubernetes.yaml").read_text())) == {tag}
    assert set(re.findall(r"image: .*/(\S+)", (EXAMPLES / "leaderworkerset.yaml").read_text())) == {tag}


def test_image_starts_the_documented_command_with_a_supported_vllm() -> None:
    entry = next(line for line in dockerfile() if line.startswith("ENTRYPOINT"))
    assert set(SERVE) < set(json.loads(entry.removeprefix("ENTRYPOINT")))
    base = next(line for line in dockerfile() if line.startswith("FROM")).rpartition(":v")[2]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Version(base) in Requirement(extras["vllm"][0]).specifier


def test_image_holds_all_that_the_wheel_is_made_from() -> None:
    """And .dockerignore lets it through to the builder."""
    copied = {word for line in dockerfile() if line.startswith("COPY") for word in line.split()[1:-1]}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_through
    assert {"pyproject.toml", "vllm_latq", *(link.readlink().name for link in links_of_the_package())} <= copied


def links_of_the_package() -> list[Path]:
    """Return the links of the package to top-level folders."""
    return [path for path in (ROOT / "vllm_latq").iterdir() if path.is_symlink()]
