"""Checkpoints of other quantizers, made here bit by bit: what is read is what was packed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.quantize.studies.peers import (
    PEERS,
    Job,
    PeerWeight,
    autoround_weights,
    check_witness,
    compressed_tensors_weights,
    gptq_weights,
    run,
)

NAME = "model.layers.0.mlp.up_proj"


def words(codes: list[int], bits: int) -> list[int]:
    """Codes as one little-endian bit string, cut into signed 32-bit words."""
    stream = sum(code << (bits * index) for index, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    unsigned = [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, k] packed along k: int32 [n, words]."""
    return torch.tensor([words(row, bits) for row in codes.tolist()], dtype=torch.int32)


def random_codes(*shape: int, bits: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits: int, symmetric: bool, tmp_path: Path) -> None:
    rows, cols, groups = 5, 66, 3
    codes = random_codes(rows, cols, bits=bits, seed=0)
    zeros = random_codes(rows, groups, bits=bits, seed=1)
    scales = torch.rand(rows, groups).add(0.5).to(torch.bfloat16)
    stored = {
        f"{NAME}.weight_packed": packed(codes, bits),
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_shape": torch.tensor([rows, cols]),
        "model.norm.weight": torch.ones(cols),
    }
    if not symmetric:
        stored[f"{NAME}.weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    config = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = compressed_tensors_weights(tmp_path)
    middle = torch.full((rows, groups), 1 << (bits - 1)) if symmetric else zeros
    expected = (codes - middle.repeat_interleave(cols // groups, 1)) * scales.float().repeat_interleave(22, 1)
    assert list(found) == [NAME]
    assert torch.equal(found[NAME].dense, expected)
    packed_words = rows * -(-cols * bits // 32) + (0 if symmetric else groups * -(-rows * bits // 32))
    assert found[NAME].bits == 32 * packed_words + 16 * rows * groups + 2 * 64


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_with_groups_in_any_order(bits: int, version: str, tmp_path: Path) -> None:
    rows, cols, groups = 64, 96, 3
    codes = random_codes(rows, cols, bits=bits, seed=2)
    zeros = random_codes(groups, rows, bits=bits, seed=3)
    scales = torch.rand(groups, rows).add(0.5).to(torch.float16)
    group = torch.arange(cols)[torch.randperm(cols, generator=torch.Generator().manual_seed(4))] % groups
    less = 1 if version == "gptq" else 0
    stored = {
        f"{NAME}.qweight": packed(codes, bits).T.contiguous(),
        f"{NAME}.qzeros": packed((zeros - less) % (1 << bits), bits),
        f"{NAME}.scales": scales,
        f"{NAME}.g_idx": group.to(torch.int32),
        f"{NAME}.bias": torch.zeros(rows),
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": bits, "checkpoint_format": version}))
    found = gptq_weights(tmp_path)
    expected = torch.empty(rows, cols)
    for column in range(cols):
        of = int(group[column])
        expected[:, column] = (codes[:, column] - zeros[of]) * scales[of].float()
    assert torch.equal(found[NAME].dense, expected)
    assert found[NAME].bits == bits * rows * cols + groups * rows * (bits + 16) + 32 * cols


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_autoround(bits: int, tmp_path: Path) -> None:
    rows, cols, groups = 32, 96, 3
    codes = random_codes(rows, cols, bits=bits, seed=5)
    scales = torch.rand(groups, rows).sub(0.5).to(torch.float16)
    middle = 1 << (bits - 1)
    stored = {
        f"{NAME}.qweight": packed(codes, bits).T.contiguous(),
        f"{NAME}.qzeros": packed(torch.full((groups, rows), middle - 1), bits),
        f"{NAME}.scales": scales,
        "model.norm.weight": torch.ones(cols),
    }
    save_file(stored, tmp_path / "model.safetensors")
    config = {"packing_format": "auto_round:auto_gptq", "bits": bits, "group_size": cols // groups, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = autoround_weights(tmp_path)
    assert list(found) == [NAME]
    assert torch.equal(found[NAME].dense, (codes - middle) * scales.float().T.repeat_interleave(cols // groups, 1))
    assert found[NAME].bits == bits * rows * cols + groups * rows * (bits + 16)


@pytest.mark.parametrize("read", [compressed_tensors_weights, gptq_weights, autoround_weights])
def test_other_formats_are_refused(read, tmp_path: Path) -> None:
    config = {"format": "marlin-24", "packing_format": "marlin"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "checkpoint_format": "marlin"}))
    with pytest.raises(ConfigError, match="marlin"):
        read(tmp_path)


def test_witness() -> None:
    dense = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    weights = {NAME: PeerWeight(dense, 1)}
    check_witness(weights, {NAME: dense.to(torch.bfloat16)}, "peer")
    with pytest.raises(CheckpointError, match="up_proj: expected the peer's own weights"):
        check_witness(weights, {NAME: dense.roll(1, 1)}, "peer")
    with pytest.raises(CheckpointError, match="a difference at"):
        check_witness(weights, {}, "peer")


def test_failing_run_says_why(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "nothing"), "", 4, 128, str(tmp_path / "out"), 1, 1, {"recipe": {"method": "rtn"}})
    with pytest.raises(CheckpointError, match=r"(?s)exit code 1 after:.*KeyError"):
        run(sys.executable, "peer_latq.py", job, {})


def test_every_peer_has_a_script_and_pinned_versions() -> None:
    folder = Path(__file__).parents[3] / "quantize" / "studies"
    for name, peer in PEERS.items():
        assert (folder / f"peer_{name}.py").is_file()
        assert peer.requirements
        assert all("==" in requirement for requirement in peer.requirements)
        assert "default" in peer.settings
