"""Tiny random targets that see images, and prompts with one image in each row.

A prompt is some text, the image's tokens, and text behind it; rows of a batch are left padded.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from support.families import COMMON, HIDDEN_SIZE, VOCAB_SIZE, WINDOW, move_vectors


LAYERS = 4
IMAGE_TOKEN, VIDEO_TOKEN, START, END = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
PATCH, SIDE = 4, 16  # pixels
TEXT = {**COMMON, "num_hidden_layers": LAYERS}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
ENCODER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_heads": 2,
    "image_size": SIDE, "patch_size": PATCH, "num_channels": 3, "depth": 2,
}  # fmt: skip
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
QWEN_PIXELS = 3 * 2 * PATCH * PATCH  # of a patch: channels, frames, height, width

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_vl": {
        "model_type": "gemma3", "text_config": {**TEXT, **WINDOWS, "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16}, "vision_config": {**ENCODER, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN, "image_token_id": IMAGE_TOKEN,
        "boi_token_index": START, "eoi_token_index": END,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl", "text_config": {**TEXT, "rope_parameters": THREE_AXES}, **QWEN_IDS,
        "vision_config": {**ENCODER, "embed_dim": 32, "hidden_size": HIDDEN_SIZE, "mlp_ratio": 2, "in_channels": 3},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "text_config": {**TEXT, "rope_parameters": THREE_AXES}, **QWEN_IDS,
        "vision_config": {**ENCODER, "out_hidden_size": HIDDEN_SIZE, "window_size": 16, "fullatt_block_indexes": [1],
        "in_channels": 3},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl", **QWEN_IDS,
        "text_config": {**TEXT, "rope_parameters": {**THREE_AXES, "mrope_interleaved": True}},
        "vision_config": {**ENCODER, "out_hidden_size": HIDDEN_SIZE, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16, "in_channels": 3},
    },
    "llava": {
        "model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}, "image_token_index": IMAGE_TOKEN,
        "vision_config": {**ENCODER, "model_type": "clip_vision_model"}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default", "image_token_id": IMAGE_TOKEN,
    },
    "mistral3": {
        "model_type": "mistral3", "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**ENCODER, "model_type": "pixtral", "head_dim": 16}, "image_token_index": IMAGE_TOKEN,
        "image_token_id": IMAGE_TOKEN, "spatial_merge_size": 2, "vision_feature_layer": -1,
    },
    "idefics3": {
        "model_type": "idefics3", "text_config": {**TEXT, "model_type": "llama"}, "image_token_id": IMAGE_TOKEN,
        "vision_config": {**ENCODER, "model_type": "idefics3_vision"}, "scale_factor": 2, "pad_token_id": 0,
    },
    "paligemma2": {
        "model_type": "paligemma", "text_config": {**TEXT, **WINDOWS, "model_type": "gemma2",
        "query_pre_attn_scalar": 16}, "vision_config": {**ENCODER, "model_type": "siglip_vision_model",
        "projection_dim": HIDDEN_SIZE, "vision_use_head": False}, "image_token_index": IMAGE_TOKEN,
        "image_token_id": IMAGE_TOKEN, "projection_dim": HIDDEN_SIZE,
    },
}  # fmt: skip
# Tokens that an image of 4 x 4 patches becomes.
IMAGE_TOKENS = {"llava": 16, "paligemma2": 16}


def tiny_vision(name: str, seed: int = 0) -> PreTrainedModel:
    """A new target of a family of `CONFIGS`; the generator's state is left as it was."""
    config = AutoConfig.for_model(**CONFIGS[name], tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        move_vectors(model)
        fill_zeros(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


@torch.no_grad()
def fill_zeros(model: PreTrainedModel) -> None:
    """Some projections start at zero, and no image would be seen."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.15)


def image_prompt(name: str, rows: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """The inputs of `generate`: ids, masks and pixels."""
    generator = torch.Generator().manual_seed(seed)
    image = [IMAGE_TOKEN] * IMAGE_TOKENS.get(name, 4)
    if name.startswith("qwen"):
        image = [START, *image, END]
    texts = []
    for row in range(rows):
        before, after = 2 + (seed + row) % 3, 4 + 5 * row
        words = torch.randint(1, END, (before + after,), generator=generator).tolist()
        texts.append(words[:before] + image + words[before:])
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, **_pixels(name, ids, generator)}


def _pixels(name: str, ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    rows = len(ids)
    if name.startswith("qwen"):
        pixels = torch.randn(rows * 16, QWEN_PIXELS, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * rows)
        return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE_TOKEN).long()}
    pixels = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
    if name == "idefics3":
        return {"pixel_values": pixels[:, None]}
    if name == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[SIDE, SIDE]] * rows)}
    if name == "gemma3_vl":
        return {"pixel_values": pixels, "token_type_ids": (ids == IMAGE_TOKEN).long()}
    if name == "paligemma2":
        return {"pixel_values": pixels, "token_type_ids": torch.zeros_like(ids)}
    return {"pixel_values": pixels}
