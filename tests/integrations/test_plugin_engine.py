"""The real engine: tokens and log-probabilities of a checkpoint equal those of its dequantized weights."""

import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import vllm_latq  # noqa: F401 - registers the quantizer
from helpers import engine_probe
from helpers.chat import with_template
from helpers.checkpoints import CheckpointPair, without_tensors
from helpers.engine_probe import OLD_VLLM, assert_plausible, probe
from helpers.logprobs import assert_agrees
from helpers.lora_adapter import RANK, write_adapter
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.export import export_checkpoint
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

# Both sides multiply by the same float32 numbers; vLLM packs the dense ones for another matmul.
LOGPROB_TOLERANCE = 2e-4
# bfloat16 has 8 bits of mantissa.
PROBABILITY_TOLERANCE = 0.02
# Both sides read the same 8-bit cache; they add in another order.
CACHE_TOLERANCE = 1e-4
# vLLM's CPU build reads 8-bit caches on CPUs with AVX512 alone, and 0.25 on none.
READS_FLOAT8 = torch.cpu._is_avx512_supported() and not OLD_VLLM
MISSING = "model.layers.2.mlp.gate_proj.outlier_col_idx"
MISSING_DENSE = ["model.embed_tokens.weight", "model.layers.2.input_layernorm.weight"]

pytestmark = pytest.mark.engine
# vLLM's own products for packed weights on a CPU are compiled for AVX512 only.
READS_EXPORTS = torch.cpu._is_avx512_supported() and not OLD_VLLM
EXPORTS = pytest.mark.skipif(not READS_EXPORTS, reason="vLLM 0.32 serves exports on a CPU with AVX512")
assert_same = partial(engine_probe.assert_same, tolerance=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def generations(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return all generations that one process can make, by name."""
    pairs = {
        name: request.getfixturevalue(f"{name}_pair") for name in ("ssqr", "hptq", "mixed", "biased", "other_ssqr")
    }
    jobs: dict[str, dict[str, Any]] = {}
    # First, because vLLM 0.25 answers nonsense from a dense float32 engine that follows some others in one process.
    jobs["bfloat16"] = {"model": request.getfixturevalue("ssqr_checkpoint"), "engine": {"dtype": "bfloat16"}}
    batch_invariant = {"environment": {"LATQ_BATCH_INVARIANT": "1"}, "engine": {"dtype": "bfloat16", "max_num_seqs": 8}}
    jobs["batch-invariant"] = {"model": pairs["ssqr"].latq, "alone": True, "layouts": True} | batch_invariant
    jobs["bfloat16-dense"] = {"model": request.getfixturevalue("ssqr_dense_twin")}
    for name, pair in pairs.items():
        jobs[f"{name}-dense"] = {"model": pair.dense}
    ssqr, other = pairs["ssqr"].latq, pairs["other_ssqr"].latq
    damaged = [without_tensors(other, MISSING), without_tensors(other, *MISSING_DENSE)]
    jobs["ssqr"] = {"model": ssqr, "reload": [other, ssqr, *damaged, other, ssqr]}
    jobs["hptq"] = {"model": pairs["hptq"].latq, "engine": {"quantization": "latq"}, "reload": [pairs["hptq"].latq]}
    jobs["mixed"] = {"model": pairs["mixed"].latq}
    jobs["biased"] = {"model": pairs["biased"].latq, "reload": [pairs["biased"].latq]}
    if READS_FLOAT8:
        cached = request.getfixturevalue("kv_scales_checkpoint")
        jobs["float8-cache"] = {"model": cached, "engine": {"kv_cache_dtype": "fp8"}, "reload": [cached]}
    jobs["dummy-hptq"] = {"model": pairs["hptq"].latq, "engine": {"load_format": "dummy"}}
    jobs["dummy-biased"] = {"model": pairs["biased"].latq, "engine": {"load_format": "dummy"}}
    exported = {"model": request.getfixturevalue("exported"), "engine": {"dtype": "bfloat16"}}
    jobs["exported"] = exported | {"fails": not READS_EXPORTS}
    jobs["exported-dense"] = {"model": request.getfixturevalue("unexported_pair").dense}
    jobs["two-models"] = {"model": with_other_weights(ssqr, pairs["other_ssqr"].latq), "fails": True}
    jobs["incomplete"] = {"model": without_tensors(ssqr, MISSING), "fails": True}
    jobs["incomplete-dense"] = {"model": without_tensors(ssqr, *MISSING_DENSE), "fails": True}
    folder, template = (
        request.getfixturevalue("tmp_path_factory").mktemp("trace"),
        request.getfixturevalue("mini_model"),
    )
    measured = {"original": with_template(template, folder / "original"), "output": folder / "trace.jsonl"}
    jobs["measured"] = {"model": with_template(pairs["mixed"].latq, folder / "mixed"), "measure": measured}
    jobs["sharded"] = {"model": ssqr, "engine": {"load_format": "sharded_state"}, "fails": True}
    return dict(zip(jobs, probe(list(jobs.values())), strict=True))


@pytest.fixture(scope="module")
def ssqr_dense_twin(ssqr_checkpoint: Path, make_dense_twin: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense_twin(ssqr_checkpoint, tmp_path_factory.mktemp("twin") / "dense")


@pytest.fixture(scope="module")
def unexported_pair(make_checkpoint: Any) -> CheckpointPair:
    return make_checkpoint("unexported", CheckpointConfig(LayerScheme("packed", 4, 64), ()))


@pytest.fixture(scope="module")
def exported(unexported_pair: CheckpointPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for vLLM's own compressed-tensors; of these the CPU build multiplies codes of 4 bits only."""
    target = tmp_path_factory.mktemp("exported") / "compressed-tensors"
    export_checkpoint(unexported_pair.latq, target)
    return target


@pytest.fixture(scope="module")
def kv_scales_checkpoint(two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks in 4 bits with scales for a KV cache in 8-bit floats."""
    destination = tmp_path_factory.mktemp("cached") / "checkpoint"
    recipe = Recipe("rtn", 4, num_samples=4, seq_len=64, kv_cache_scheme="fp8")
    quantize_checkpoint(recipe, two_blocks, destination, calibration=str(calibration_text))
    return destination


def cached_in_float8(checkpoint: Path) -> Any:
    """Return an attention function of transformers that rounds keys and values as vLLM's 8-bit cache on a CPU does."""
    reader, attend = CheckpointReader(checkpoint), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Round towards zero: vLLM's kernel cuts the last bits of the mantissa off."""
        exact = (values / scale).clamp(-448, 448)
        nearest = exact.to(torch.float8_e4m3fn)
        below = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn).float()
        return torch.where(nearest.float().abs() > exact.abs(), below, nearest.float()) * scale

    def function(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        scales = [reader.store.get(f"model.layers.{module.layer_idx}.self_attn.{leaf}_scale") for leaf in "kv"]
        return attend(module, query, rounded(key, scales[0]), rounded(value, scales[1]), *args, **options)

    return function


def with_other_weights(source: Path, other: Path) -> Path:
    """Return a copy of a checkpoint with other weights beside its own, in the file that vLLM prefers."""
    target = source.with_name("two-models")
    shutil.copytree(source, target)
    shutil.copy(other / "model.safetensors", target / "consolidated.safetensors")
    return target


@pytest.mark.parametrize("name", ["ssqr", "hptq", "mixed", "biased"])
def test_engine_equals_the_dequantized_model(name: str, generations: dict[str, Any]) -> None:
    assert_same(generations[name][0], generations[f"{name}-dense"][0])


@pytest.mark.parametrize("name", ["bfloat16", pytest.param("exported", marks=EXPORTS)])
def test_bfloat16_probabilities_match_the_dequantized_model(name: str, generations: dict[str, Any]) -> None:
    """Only the first tokens are compared: later ones depend on the tokens chosen before."""
    for ours, theirs in zip(generations[name][0], generations[f"{name}-dense"][0], strict=True):
        got, expected = ours["logprobs"][0], theirs["logprobs"][0]
        common = got.keys() & expected.keys()
        assert len(common) >= 3
        for token in common:
            assert math.exp(got[token]) == pytest.approx(math.exp(expected[token]), abs=PROBABILITY_TOLERANCE)


def test_answers_do_not_depend_on_the_batch(generations: dict[str, Any]) -> None:
    """With LATQ_BATCH_INVARIANT=1 tokens and log-probabilities of a prompt are the same alone and among others."""
    together, alone, crowded, layouts = generations["batch-invariant"]
    assert layouts == ["cpu"]
    assert together == alone
    assert crowded == alone * (len(crowded) // len(alone))
    assert len(crowded) > len(alone)


def test_reloading_other_weights_and_back(generations: dict[str, Any]) -> None:
    """The other weights give other answers."""
    first, other, back, *_ = generations["ssqr"]
    assert other != first
    assert_same(other, generations["other_ssqr-dense"][0])
    assert back == first


def test_failed_reloads_leave_the_old_weights(generations: dict[str, Any]) -> None:
    """The next reload is as good as the first one."""
    first, other, _, *errors_and_answers, other_again, back = generations["ssqr"]
    quantized, after_quantized, dense, after_dense = errors_and_answers
    assert f"CheckpointError: {MISSING}: expected a tensor" in quantized
    assert f"CheckpointError: {MISSING_DENSE[0]}: expected a tensor in the checkpoint" in dense
    assert after_quantized == after_dense == back == first
    assert other_again == other


@pytest.mark.parametrize("name", ["hptq", "biased"])
def test_reloading_the_same_weights(name: str, generations: dict[str, Any]) -> None:
    first, again = generations[name]
    assert again == first


@pytest.mark.skipif(not READS_FLOAT8, reason="this vLLM has no 8-bit KV cache on this CPU")
def test_float8_cache_has_the_scales_of_the_checkpoint(
    kv_scales_checkpoint: Path, generations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = generations["float8-cache"]
    assert again == first
    model = AutoModelForCausalLM.from_pretrained(kv_scales_checkpoint, dtype=torch.float32)
    with pytest.raises(AssertionError):
        assert_agrees(model, first[0]["prompt"], first[0], 10 * CACHE_TOLERANCE)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", cached_in_float8(kv_scales_checkpoint))
    for answer in first:
        assert_agrees(model, answer["prompt"], answer, CACHE_TOLERANCE)


@pytest.mark.parametrize("name", ["dummy-hptq", "dummy-biased"])
def test_dummy_weights_generate_plausible_tokens(name: str, generations: dict[str, Any]) -> None:
    assert_plausible(generations[name][0])


def test_missing_tensor_stops_the_engine(generations: dict[str, Any]) -> None:
    assert re.search(rf"Value error, \S+: {MISSING}: expected a tensor", generations["incomplete"])
    assert "no such tensor" in generations["incomplete"]


def test_weights_beside_the_index_stop_the_engine(generations: dict[str, Any]) -> None:
    expected = r"Value error, \S*two-models: expected only the tensors of the index, found consolidated.safetensors"
    assert re.search(expected, generations["two-models"])


def test_missing_unquantized_tensors_stop_the_engine(generations: dict[str, Any]) -> None:
    expected = "expected a tensor in the checkpoint, found none, and none for"
    assert f"CheckpointError: {MISSING_DENSE[0]}: {expected} {MISSING_DENSE[1]}." in generations["incomplete-dense"]


def test_sharded_states_are_refused(generations: dict[str, Any]) -> None:
    assert "ConfigError: --load-format: expected" in generations["sharded"]
    assert "found sharded_state" in generations["sharded"]


def test_a_trace_of_the_original_measures_what_is_served(generations: dict[str, Any]) -> None:
    """The engine gives the predictions that transformers gives; the baseline lists a part of the vocabulary."""
    found = generations["measured"]
    assert found["traced"][0] == len(found["records"]) > 0
    assert {record["split"] for record in found["records"]} == {"calibration", "evaluation"}
    exact, served = found["exact"], found["served"]
    assert (exact["through"], served["through"]) == ("transformers", "vllm")
    assert served["on_answers"]
    assert served["positions"] == exact["positions"] > 0
    assert served["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-4)
    assert served["top1_agreement"] == exact["top1_agreement"]
    assert 0.8 * exact["kl"] < served["kl"] < exact["kl"]


def test_tensor_parallel_equals_one_process(
    mixed_pair: tuple[Path, Path], biased_pair: tuple[Path, Path], generations: dict[str, Any]
) -> None:
    """Two ranks cut layers of every encoding, scales of whole rows, outliers and the head, and replicate a KV head."""
    split = {"tensor_parallel_size": 2}
    damaged = without_tensors(mixed_pair[0], "lm_head.rates")
    jobs = [{"model": pair[0], "engine": split} for pair in (mixed_pair, biased_pair)]
    two_nodes = [{"model": mixed_pair[0], "nodes": True}]
    mixed, biased, *nodes = probe([jobs[0] | {"reload": [damaged]}, jobs[1], *([] if OLD_VLLM else two_nodes)])
    assert_same(mixed[0], generations["mixed"][0])
    assert "lm_head.rates" in mixed[1]
    assert mixed[2] == mixed[0], "a failed reload leaves both ranks as they were"
    assert_same(biased[0], generations["biased"][0])
    for answers in nodes:  # `vllm serve --nnodes 2 --node-rank 1 --headless` is the other one
        assert_same(answers[0], generations["mixed"][0])


def test_pipeline_parallel_equals_one_process(mixed_pair: tuple[Path, Path], generations: dict[str, Any]) -> None:
    """Each process has half of the blocks, and the last one the head."""
    job = {"model": mixed_pair[0], "engine": {"pipeline_parallel_size": 2}}
    (split,) = probe([job], VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert_same(split[0], generations["mixed"][0])


def test_speculative_decoding_equals_one_token_at_a_time(
    ssqr_pair: tuple[Path, Path], hptq_pair: tuple[Path, Path], generations: dict[str, Any]
) -> None:
    """A quantized model drafts for another: several tokens at once are verified by the same layers."""
    speculation = {"model": str(hptq_pair[0]), "num_speculative_tokens": 3}
    ((drafted,),) = probe([{"model": ssqr_pair[0], "engine": {"speculative_config": speculation}}])
    assert_same(drafted, generations["ssqr"][0])


def test_lora_adapters(mini_model: Path, mixed_pair: Any, generations: dict[str, Any], tmp_path: Path) -> None:
    """Adapters work on merged and on coded layers, beside a quantized head; requests without them are unchanged."""
    adapter = write_adapter(tmp_path / "adapter", mini_model)
    engine = {"enable_lora": True, "max_lora_rank": RANK}
    jobs = [{"model": model, "engine": engine, "adapter": str(adapter)} for model in mixed_pair]
    # vLLM 0.25 does not find the layers below adapters when it reloads.
    reloads = [] if OLD_VLLM else [mixed_pair[0], without_tensors(mixed_pair[0], "model.norm.weight")]
    (adapted, plain, *reloaded), (expected, _) = probe([jobs[0] | {"reload": reloads}, jobs[1]])
    assert_same(plain, generations["mixed"][0])
    if reloads:
        again, error, still = reloaded
        assert again == still == plain
        assert "model.norm.weight: expected a tensor in the checkpoint" in error
    assert_same(adapted, expected)
    with pytest.raises(AssertionError):
        assert_same(adapted, plain, tolerance=10 * LOGPROB_TOLERANCE)


def test_compiled_equals_eager(biased_pair: tuple[Path, Path], generations: dict[str, Any], tmp_path: Path) -> None:
    """torch.compile traces the operator through its fake implementation."""
    jobs = [{"model": biased_pair[0], "engine": {"enforce_eager": False}}]
    assert_same(probe(jobs, VLLM_CACHE_ROOT=str(tmp_path))[0][0], generations["biased"][0])
    assert list((tmp_path / "torch_compile_cache").iterdir()), "nothing was compiled"
