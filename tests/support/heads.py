"""Draft heads with random weights, and folders of them as they are published."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_hf import Eagle3DraftConfig, Eagle3DraftModel
from support.families import HIDDEN_SIZE, VOCAB_SIZE, move_vectors


DRAFT_VOCAB = 128
FIELDS = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB,
    "target_layer_ids": [1, 2, 4],
}

LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
# Heads that are built otherwise: what `from_target` is told.
VARIANTS = {
    "latent": LATENT,
    "latent with a window": {**LATENT, "q_lora_rank": 20, "layer_types": ["sliding_attention"], "sliding_window": 5},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 6},
    "window in one of two layers": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    | {"num_hidden_layers": 2},
    "final output alone": {"use_aux_hidden_state": False},
    "half of the head rotated": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "no final norm": {"final_norm": False},
}


def new_head(seed: int = 0, **overrides) -> Eagle3DraftModel:
    """A random head in float32 whose norms and biases do something; the generator's state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3DraftModel(Eagle3DraftConfig(**{**FIELDS, **overrides}))
        move_vectors(draft)
        if not draft.has_draft_vocab:
            ids = torch.randperm(draft.config.vocab_size)[: draft.config.draft_vocab_size]
            draft.set_draft_vocab(ids)
    return draft.eval()


def published(draft: Eagle3DraftModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a one-layer head in the layout of the reference implementation."""
    config = draft.config
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",  # what published configs say whatever the file holds
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): t.clone() for name, t in draft.state_dict().items()}
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return fields, tensors


def write_folder(folder: Path, config: dict | None, tensors: dict | None, file: str = "model.safetensors") -> Path:
    """A folder with these contents; what is `None` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        if file.endswith(".bin"):
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder
