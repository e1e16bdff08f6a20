"""Measure the time per token of vLLM: bf16, Marlin at 4 bits, and SSQR (1% outliers) and LATQ at 2, 3 and 4 bits.

The head stays in bf16, as is usual in vLLM, except in the scheme that names another. On a CPU, `llama.cpp Q4_0` is
llama.cpp with all matrices in its 4 bits, where llama-cpp-python and gguf are installed; it takes one sequence.

    python serving_examples/decode_latency.py                       # Qwen3-8B's shape, batch 1, 4, 8 and 16, on a GPU
    python serving_examples/decode_latency.py --json results.json
    python serving_examples/decode_latency.py --shape qwen3-30b-a3b  # a mixture of 128 experts
    python serving_examples/decode_latency.py --together \\
        --engine '{"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1000000000}'

Weights are random (`--load-format dummy`) and take as long as trained weights. Every scheme runs in its own process for
at most `--minutes`. Its times are printed and written as soon as they are measured. With `--together` all engines start
at once, within `--minutes`, and are measured one after the other; the GPU's memory must hold all of them.
The time of one token is the time of a long run minus the time of a run of one token, divided by `--new-tokens` - 1.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm_latq.console import print_table
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme

DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
ANY = {"max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
       "dtype": "bfloat16"}  # fmt: skip
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 256, "vocab_size": 512}  # fmt: skip
SHAPES = {
    "qwen3-8b": DENSE | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    },
    "qwen3-0.6b": DENSE | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": MIXTURE | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    },
    "tiny": DENSE | TINY,
    "tiny-mixture": MIXTURE | TINY | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
# The last entry names the quantized modules. Without it vLLM looks for integers in the checkpoint, which has no files.
MARLIN = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
          "modules_in_block_to_quantize": [[*LINEARS, "mlp.experts"]]}  # fmt: skip
# On some GPUs vLLM prefers other kernels for this scheme, for example Machete on Hopper.
ENVIRONMENT = {"marlin 4 bits": {"VLLM_DISABLED_KERNELS": "CutlassW4A8LinearKernel,MacheteLinearKernel"}}
HEAD = "ssqr 3 bits, 1%, head 4 bits"
LLAMA = "llama.cpp Q4_0"
# Name of the class that multiplies in vLLM. Only attention is read, because releases keep that of experts elsewhere.
METHOD = attrgetter("model.layers.0.self_attn.qkv_proj.quant_method.__class__.__name__")
PROMPT_TOKENS = 32
REPEATS = 5
LOG_CHARACTERS = 6000  # shown of the log of a failed scheme: the cause stands far above the last error


def schemes() -> dict[str, dict[str, Any] | None]:
    """Return name -> quantization_config of every scheme; None leaves the model in bf16."""
    recipe, head = {"outlier_rate": 0.01}, {"lm_head": LayerScheme("packed", 4, 128)}
    packed = {
        f"ssqr {bits} bits, 1%": CheckpointConfig(
            LayerScheme("packed", bits, 128, outliers=True), ("lm_head", "mlp.gate"), recipe=recipe
        )
        for bits in (2, 3, 4)
    }
    packed[HEAD] = CheckpointConfig(LayerScheme("packed", 3, 128, outliers=True), ("mlp.gate",), head, recipe=recipe)
    trellis = {
        f"latq {bits} bits": CheckpointConfig(LayerScheme("trellis"), ("lm_head", "mlp.gate"), recipe={"bits": bits})
        for bits in (2, 3, 4)
    }
    ours = {name: config.to_dict() for name, config in (packed | trellis).items()}
    return {"bf16": None, "marlin 4 bits": MARLIN} | ours


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the schemes of the command line and print a table; with --measure, measure one scheme in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--schemes", nargs="+", choices=(*schemes(), LLAMA), default=tuple(schemes()))
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default="qwen3-8b",
        help="model shape (default qwen3-8b); the tiny shapes only test that all schemes run",
    )
    parser.add_argument("--engine", default="{}", help="more arguments of vllm.LLM, as a JSON object")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--minutes", type=float, default=10, help="stop a scheme that takes longer (default 10)")
    parser.add_argument("--together", action="store_true", help="start all engines at once")
    # Name of one scheme: measure it in this process and write only its times.
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    # Id of the process that says when this process may measure. If that process ends, this process ends, too.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        peer = options.measure == LLAMA
        times = measure_llama(options) if peer else measure(schemes()[options.measure], options)
        found = {
            "seconds_per_token": {batch: statistics.median(repeats) for batch, repeats in times.items()},
            "spread": {batch: [min(repeats), max(repeats)] for batch, repeats in times.items()},
            "versions": versions(),
        }
        draft = options.json.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.replace(options.json)
        return
    # On SIGTERM, leave through sys.exit, so that `run` stops its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, list[float]]] = {}
    for name, measured in run(tuple(dict.fromkeys(options.schemes)), options):
        found = results[name] = measured["seconds_per_token"]
        spread[name] = measured["spread"]
        print(f"{name}: {', '.join(f'{1e3 * found[batch]:.3f} ms at batch {batch}' for batch in found)}", flush=True)
        if options.json:
            facts = {"shape": options.shape, "seconds_per_token": results, "spread": spread}
            options.json.write_text(json.dumps(facts | {"versions": measured["versions"]}, indent=1) + "\n")
    if not results:
        sys.exit("no scheme was measured")
    base = results.get("bf16")
    rows = [
        (
            name, batch, f"{1e3 * seconds:.3f}", " to ".join(f"{1e3 * end:.3f}" for end in spread[name][batch]),
            f"{base[batch] / seconds:.2f}" if base and batch in base else "-",
        )
        for name, times in results.items()
        for batch, seconds in times.items()
    ]  # fmt: skip
    print_table("decode latency", ("scheme", "batch", "ms per token", "fastest to slowest", "speedup over bf16"), rows)


class Engine:
    """A process that measures one scheme. It waits for its turn before it measures."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        folder.mkdir()
        self.name, self.minutes, self.stopped, self.late = name, options.minutes, False, False
        self.times, self.log = folder / "times.json", folder / "log"  # an engine may print anything to stdout
        command = [sys.executable, __file__, "--measure", name, "--engine", options.engine, "--json", str(self.times)]
        command += ["--batch", *map(str, options.batch), "--new-tokens", str(options.new_tokens)]
        command += ["--shape", options.shape, "--parent", str(os.getpid())]
        environment = os.environ | ENVIRONMENT.get(name, {})
        # A process group of its own: vLLM's engine is a child process, and `stop` must end it, too, to free the GPU's
        # memory.
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=0)

    def wait_for(self, mark: Path, deadline: float) -> bool:
        """Return whether the process writes a file before the deadline and before it ends."""
        while not mark.exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return mark.exists()

    def start(self, deadline: float) -> None:
        """Wait until the engine is ready to measure. Stop it if it is late, so that it disturbs no other engine."""
        if not self.wait_for(ready(self.times), deadline):
            self.stop()

    def measure(self) -> dict[str, Any] | None:
        """Return times and versions; print the reason and return None if the engine does not run."""
        turn(self.times).touch()
        self.wait_for(self.times, time.monotonic() + 60 * self.minutes)
        self.stop()
        if self.times.exists():  # the times count even if the engine fails or hangs afterwards
            return json.loads(self.times.read_text())
        cause = f"not finished after {self.minutes:g} minutes" if self.late else "not measured"
        print(f"{self.name}: {cause}:\n{self.log.read_text(errors='replace')[-LOG_CHARACTERS:]}", file=sys.stderr)
        return None

    def stop(self) -> None:
        """End the process and its children, once."""
        if self.stopped:
            return
        self.stopped, self.late = True, self.process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ready(times: Path) -> Path:
    """Return the path of the file that an engine writes when it is ready to measure."""
    return times.with_suffix(".ready")


def turn(times: Path) -> Path:
    """Return the path of the file that tells an engine to measure."""
    return times.with_suffix(".turn")


def run(names: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and times of each scheme that runs, one after the other. Print the reason if a scheme does not run."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start(name: str) -> Engine:
            engine = Engine(name, Path(folder) / name.replace(" ", "-"), options)
            stack.callback(engine.stop)
            return engine

        engines: Iterable[Engine] = map(start, names)  # starts each engine after the one before it is measured
        if options.together:
            engines, deadline = list(engines), time.monotonic() + 60 * options.minutes
            for engine in engines:
                engine.start(deadline)
        for engine in engines:
            found = engine.measure()
            if found is not None:
                yield engine.name, found


def measure(quantization: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return batch size -> seconds per token of each repetition."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # needed to send METHOD to the engine
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = ANY | SHAPES[options.shape]
        if quantization:
            config["quantization_config"] = quantization
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=PROMPT_TOKENS + options.new_tokens,
            max_num_seqs=max(options.batch),
            **json.loads(options.engine),
        )

        for name in llm.apply_model(METHOD):  # one name per worker
            if bool(quantization) == name.startswith("Unquantized"):
                sys.exit(f"vLLM chose {name} for quantization {quantization}; this would not measure the scheme")
        wait_for_turn(options)

        def seconds(batch: int, tokens: int) -> float:
            prompts = [{"prompt_token_ids": [1 + (i + j) % 400 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
            limits = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            llm.generate(prompts, limits, use_tqdm=False)
            return time.perf_counter() - started

        found = {}
        for batch in options.batch:
            seconds(batch, 2)
            short, long = ([seconds(batch, n) for _ in range(REPEATS)] for n in (1, options.new_tokens))
            found[str(batch)] = per_token(short, long, options.new_tokens - 1)
        return found


def wait_for_turn(options: argparse.Namespace) -> None:
    """Say that this process is ready, and wait until it may measure."""
    ready(options.json).touch()
    while options.parent and not turn(options.json).exists():
        if os.getppid() != options.parent:  # the parent has ended
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.05)


def measure_llama(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds per token of each repetition for llama.cpp, on as many threads as vLLM computes on."""
    from llama_cpp import Llama

    threads = max(1, len(os.sched_getaffinity(0)) - 1)  # vLLM leaves a core to its other processes
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.gguf")
        write_gguf(path, SHAPES[options.shape])
        context = PROMPT_TOKENS + options.new_tokens
        model = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
        wait_for_turn(options)

        def seconds(tokens: int) -> float:
            model.reset()
            model.eval(list(range(1, 1 + PROMPT_TOKENS)))
            started = time.perf_counter()
            for token in range(tokens):
                model.eval([1 + token % 400])
            return (time.perf_counter() - started) / tokens

        seconds(2)
        return {"1": [seconds(options.new_tokens - 1) for _ in range(REPEATS)]}


def write_gguf(path: str, shape: dict[str, Any]) -> None:
    """Write a Qwen3 model of random 4-bit blocks, 18 bytes for 32 weights, and no vocabulary."""
    import gguf
    import numpy as np

    hidden, width, rng = shape["hidden_size"], shape["head_dim"], np.random.default_rng(0)
    rows = {"attn_q": shape["num_attention_heads"] * width, "attn_output": hidden, "ffn_down": hidden}
    rows |= dict.fromkeys(("attn_k", "attn_v"), shape["num_key_value_heads"] * width)
    rows |= dict.fromkeys(("ffn_gate", "ffn_up"), shape["intermediate_size"])
    cols = {"attn_output": rows["attn_q"], "ffn_down": shape["intermediate_size"]}
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(ANY["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(ANY["rope_theta"])
    writer.add_layer_norm_rms_eps(ANY["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, cols: int) -> None:
        blocks = rng.integers(0, 256, (rows, cols // 32, 18), dtype=np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)  # the scale
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    for name in ("token_embd", "output"):
        matrix(name, shape["vocab_size"], hidden)
    norm("output_norm", hidden)
    for block in range(shape["num_hidden_layers"]):
        for name, count in rows.items():
            matrix(f"blk.{block}.{name}", count, cols.get(name, hidden))
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", width), ("attn_k_norm", width)):
            norm(f"blk.{block}.{name}", size)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def per_token(short: Sequence[float], long: Sequence[float], tokens: int) -> list[float]:
    """Return seconds per token of each long run, which generates `tokens` more tokens than a short run."""
    first = statistics.median(short)
    return [(each - first) / tokens for each in long]


def versions() -> dict[str, str]:
    """Return the versions of the libraries, and the GPU."""
    import torch
    import vllm

    import vllm_latq

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "vllm_latq": vllm_latq.__version__, "gpu": gpu}


if __name__ == "__main__":
    main()
