"""Small models of images and text with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoTokenizer,
)

# Tokens after the 2048 of the bundled tokenizer, and what they stand for.
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<image>", "<|video_pad|>", "<audio>")
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 2052, 2053, 2054
# vLLM's attention on a CPU takes heads of 32 channels and more.
TEXT = {
    **{"vocab_size": 2080, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
# Sizes of a tower, by the names that the families use; it sees images of 2 x 2 patches and more.
VISION = {
    **{"hidden_size": 64, "embed_dim": 64, "intermediate_size": 96, "out_hidden_size": 128, "image_size": 28},
    **{"num_hidden_layers": 2, "depth": 2, "num_attention_heads": 2, "num_heads": 2, "patch_size": 14},
    **{"fullatt_block_indexes": [1], "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
}


def random_multimodal(directory: Path, model_type: str, tokenizer: Path, **changes: Any) -> Any:
    """Save a model with random weights, biases and norms (float32), and the bundled tokenizer with tokens of images.

    Args:
        directory: where they go.
        model_type: of transformers.
        tokenizer: folder with tokenizer files for 2048 tokens.
        changes: to the configuration of the language model.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    if model_type.startswith("qwen"):  # which count positions in time, height and width
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        changes = {"rope_parameters": rope} | changes
    whole: Any = AutoConfig.for_model(model_type)
    text = AutoConfig.for_model(whole.text_config.model_type, **TEXT | changes)
    tower = whole.vision_config or AutoConfig.for_model(f"{model_type}_vision")
    sizes = {name: size for name, size in VISION.items() if hasattr(tower, name)}
    make: Any = CONFIG_MAPPING[tower.model_type] if tower.model_type in CONFIG_MAPPING else type(tower)
    tokens: dict[str, Any] = dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN)
    tokens |= {"video_token_id": VIDEO_TOKEN, "vision_start_token_id": 2050, "vision_end_token_id": 2051}
    tokens["tie_word_embeddings"] = text.tie_word_embeddings
    if model_type == "gemma4":  # of sound, too
        audio = AutoConfig.for_model("gemma4_audio", hidden_size=64, num_hidden_layers=1, output_proj_dims=64)
        tokens |= {"audio_config": audio.to_dict(), "audio_token_id": AUDIO_TOKEN}
    config = type(whole)(text_config=text.to_dict(), vision_config=make(**sizes).to_dict(), **tokens)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    words = AutoTokenizer.from_pretrained(tokenizer)
    words.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    words.save_pretrained(directory)
    return model


def save_image_processor(directory: Path) -> Any:
    """Save the processor of an Idefics3 beside it, which makes one token of an image of 28 x 28.

    Returns:
        The processor.
    """
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edge = {"longest_edge": VISION["image_size"]}
    pixels = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(pixels, AutoTokenizer.from_pretrained(directory), image_seq_len=1)
    processor.save_pretrained(directory)
    return processor
