"""Small encoders with random weights."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

VOCABULARY = 2048
# vLLM's attention on a CPU takes heads of 32 channels and more.
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 130},
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}


def random_encoder(directory: Path, model_type: str, text: Path, auto: Any = AutoModel, **changes: Any) -> Any:
    """Save an encoder with random weights, biases and norms (float32), and a WordPiece tokenizer made from a text.

    Args:
        directory: where they go.
        model_type: of transformers.
        text: file with what the tokenizer learns its words from.
        auto: transformers' class that adds a head, or none.
        changes: to the configuration.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(model_type, **SIZES | changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    _tokenizer(text.read_text()[:50_000]).save_pretrained(directory)
    return model


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(tokens.values()))
    tokenizer.train_from_iterator([text], trainer)
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
