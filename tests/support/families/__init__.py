"""Tiny random target models, one of each family that the tests promise something about.

Float32 on the CPU, the same weights for the same seed, no end-of-text token. The weights are chosen between two evils:
at transformers' default scale greedy text repeats one token for ever, and at twice this scale float32 rounding alone
moves the logits by more than the margin that counts as a near-tie. Windows are short enough to be crossed by a test.
"""

from typing import Any

import torch
import transformers
from packaging import version
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel


LAYERS = 8
HIDDEN_SIZE = 64
VOCAB_SIZE = 320
WINDOW = 12

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Gemma's pattern in small: windows, and every third layer sees everything.
MIXED = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(LAYERS)]
ALTERNATING = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(LAYERS)]

SPECIFIC = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral_sw": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "query_pre_attn_scalar": 16,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}
# The config of OLMo 2 in transformers 5.4 refuses its own default under today's huggingface-hub 1.
_BROKEN = {"olmo2"} if version.parse(transformers.__version__) < version.parse("5.5") else set()
FAMILIES = [name for name in SPECIFIC if name not in _BROKEN]


def common(model_type: str) -> dict[str, Any]:
    """Those of the common fields that a family's config has: a target must not know more than its library's own."""
    config = AutoConfig.for_model(model_type)
    return {name: value for name, value in COMMON.items() if name in vars(config) or name in config.attribute_map}


def tiny(name: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A new target of the family `name`; the generator's state is left as it was.

    Args:
        name: one of `FAMILIES`.
        seed: of the weights.
        overrides: fields of the family's config, such as `num_hidden_layers=2`.
    """
    fields = {**common(SPECIFIC[name]["model_type"]), **SPECIFIC[name]}
    if "num_hidden_layers" in overrides and "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: overrides["num_hidden_layers"]]
    config = AutoConfig.for_model(**{**fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        move_vectors(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


@torch.no_grad()
def move_vectors(model: PreTrainedModel) -> None:
    """Norm weights start at one and biases at zero, where a test could not tell whether they are used at all.

    Norms of queries and keys are raised besides: at one, attention is so even that the text soon repeats a token.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(0.5)


def prompt(length: int, seed: int = 0, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Random ids `(rows, length)`, without the pad token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (rows, length), generator=generator)


def deepseek(**overrides) -> PreTrainedModel:
    """A target with latent attention."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        q_lora_rank=20,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        **overrides,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
