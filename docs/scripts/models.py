"""Write docs/models.md: the families of models that the tests quantize and serve, read from the tests themselves.

python docs/scripts/models.py
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


@dataclass(frozen=True)
class Source:
    """A collection of families in a file of tests.

    Attributes:
        kind: what the families are; empty where another source says it.
        served: whether the tests serve the families with vLLM's engine; otherwise they quantize them.
    """

    file: str
    name: str
    kind: str
    served: bool = False


ARCHITECTURES = "quantize/model/test_architectures.py"
ENGINE = "integrations/test_plugin_engine_"
SOURCES = (
    Source(ARCHITECTURES, "LLAMA_LIKE", "decoder"),
    Source(ARCHITECTURES, "OTHERS", "decoder"),
    Source("quantize/model/test_stored_experts.py", "FAMILIES", "mixture of experts"),
    Source("quantize/model/test_clamped_experts.py", "FAMILIES", "mixture of experts"),
    Source("quantize/model/test_carried_state.py", "FAMILIES", "decoder whose blocks share state"),
    Source("quantize/model/test_multimodal.py", "FAMILIES", "images or sound"),
    Source("quantize/model/test_encoders.py", "LINEARS", "encoder"),
    Source(f"{ENGINE}families.py", "ENCODERS", "encoder", served=True),
    Source(f"{ENGINE}families.py", "DECODERS", "decoder", served=True),
    Source(f"{ENGINE}families.py", "ATTENTION", "linear or latent attention", served=True),
    Source(f"{ENGINE}moe.py", "CHANGES", "mixture of experts", served=True),
)
HEAD = """# Models
Blocks and linears are found by structure, not by name, so most models need no change here. A structure that is not
understood is refused with an error that names it. `docs/scripts/models.py` writes this page from the tests, and a test
compares the two.

## Rules
- **Mixtures of experts**: each expert, with or without a gate (Nemotron 3), is quantized with the tokens routed to it,
  by every method. If fewer tokens reach an expert than it has input channels, the expert borrows the layer's other
  tokens, and its record says so. Some models store all experts of a layer as one tensor (Llama 4, Qwen3.5-MoE,
  Qwen3-VL-MoE, Gemma 4, Granite-MoE); there each matrix is read, quantized and written by itself. Routers and indexers
  of sparse attention stay unquantized.
- **Clamped and biased experts** (DeepSeek-V4, GLM-5.3-Flash, Hy-V4, MiniMax-M3, Step-3.5, gpt-oss): the limit, alpha
  and beta of the activation come from config.json. vLLM has fixed ones for gpt-oss (7.0, 1.702 and 1.0) and Step-3.5
  (7.0), and other ones are refused there. gpt-oss's gate and up alternate in its tensors; the checkpoint holds gate, up
  and down of each expert, each with its bias.
- **Models of images or sound** (Gemma, Qwen-VL, Qwen3.5, Mistral 3, LLaVA, Voxtral): their language model is quantized,
  with text for calibration. Towers and projectors stay unquantized (`--dry-run` names them), and so do layers that
  predict further tokens, unless `--mtp-bits` is given.
- **Encoders** (BERT, RoBERTa, ModernBERT, below any head) are quantized by the methods that need no loss. Quantize with
  `latq quantize MODEL OUT --method ssqr --seq-len 512 --calibration wikitext2`, then serve with
  `vllm serve OUT --runner pooling`. Poolers and heads stay unquantized.
- **Published in 8 or 4 bits**: the weights are dequantized first, then quantized. See below.
- **Refused**, by name: GPT-2 (its layers are not linears), T5, models that need code of their own, and checkpoints that
  are already quantized otherwise.
- **Not served by vLLM**: BLOOM, whose fused q/k/v vLLM permutes; gpt-oss with some of its experts left unquantized.
  Load such a checkpoint with transformers.

Single tests cover further families: Falcon-H1, Nemotron-H, OLMo-Hybrid, Jamba, Qwen2-MoE, the experts and the grouped
projection of DeepSeek-V4, and latent attention in 8-bit floats. Kimi Linear and others of these kinds are not tested.

vLLM's CPU build cannot run the attention of DeepSeek-V4, GLM-5.3-Flash, Hy-V4 and MiniMax-M3, and the tests do not
start Step-3.5. For these models the tests serve the layer of routed experts, and compare the layer with plain floats.
The attention of GLM-5.3-Flash stays unquantized, because vLLM's model takes no quantized attention.

## Originals as they are published
Some makers publish a model in 8 or 4 bits only. `latq quantize` and `latq eval` read the forms of this table. The
numbers equal those of the maker's own conversion. `latq quantize` dequantizes one matrix at a time, `latq eval` the
whole model. The `config.json` of a quantized checkpoint loses the old `quantization_config` and `expert_dtype`.

| form | in `quantization_config` | stored tensors | published so |
|---|---|---|---|
| 8-bit floats | `quant_method: fp8` | `weight`, `weight_scale_inv` | DeepSeek-V3, MiniMax-M2, Ministral 3 |
| the same, scales are powers of two | `scale_fmt: ue8m0` | `weight`, `scale` | DeepSeek-V4 |
| experts in 4-bit floats beside it | `quant_method: fp8` | `weight` (int8), `scale` | DeepSeek-V4 |
| MXFP4 | `quant_method: mxfp4` | `*_blocks`, `*_scales` | gpt-oss |
| packed integers | `format: pack-quantized` | `weight_packed`, `weight_scale`, `weight_shape` | Kimi K2.5 |
| 8-bit floats of compressed-tensors | `format: float-quantized` | `weight`, `weight_scale` | |

- The last two are formats of `quant_method: compressed-tensors`. `format: mixed-precision` holds modules of both.
- Packed integers have 1 to 8 bits, and scales by group or by channel. Zero points and `weight_g_idx` are read too.
- The tests make small models of each form. Their oracles are the functions of transformers and compressed-tensors.
- Refused before a weight is read: any other form, a missing scale, and shapes that do not fit. A scale that is NaN or
  infinite is refused when its matrix is read. Quantize the 16-bit original instead.

## Families in the tests
A small random model of each family is quantized, loaded again, and compared with its dequantized weights. The families
with `engine` are also served by vLLM and compared with transformers. Names are those of transformers (`model_type`).

| family | kind | quantized | served in a test |
|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    kinds: dict[str, str] = {}
    served = set()
    for source in SOURCES:
        for family in families(source):
            kinds.setdefault(family, source.kind)
            if source.served:
                served.add(family)
    kinds |= {"idefics3": "images or sound", "qwen3": "decoder"}
    served |= {"idefics3", "qwen3"}  # test_plugin_engine_multimodal.py, and the bundled model everywhere
    rows = [
        f"| {family} | {kinds[family]} | yes | {'engine' if family in served else ''} |" for family in sorted(kinds)
    ]
    return HEAD + "\n".join(rows) + "\n"


def families(source: Source) -> list[str]:
    """Return the families of a collection."""
    for statement in ast.parse((ROOT / "tests" / source.file).read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == source.name:
            return list(_strings(statement.value))
    raise LookupError(f"tests/{source.file} defines no {source.name}")


def _strings(node: ast.expr) -> Iterator[str]:
    """Yield the keys of a dict, or the strings of a tuple, with those of whatever is unpacked into it."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from _strings(value if key is None else key)
    elif isinstance(node, ast.Tuple):
        for element in node.elts:
            yield from _strings(element)
    elif isinstance(node, ast.Starred | ast.Subscript):
        yield from _strings(node.value)
    elif isinstance(node, ast.Constant):
        yield str(node.value)


if __name__ == "__main__":
    PAGE.write_text(page())
