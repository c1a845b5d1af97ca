"""Every family that the installed transformers maps to a causal language model or to images and text.

A config is as its library makes it, only smaller: sizes that the class itself defines are cut, lists of one entry a
layer are shortened, and nothing is added. So a field that a family lacks is missing here too.
"""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from support.families import HIDDEN_SIZE, VOCAB_SIZE, WINDOW, move_vectors


LAYERS, HEADS = 4, 4
TEXT = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VISION = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(TEXT))


def _sizes(most: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), most)


# What families call a size, and how large it may be here.
MOST: dict[str, int] = {
    **_sizes(VOCAB_SIZE, "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    **_sizes(HIDDEN_SIZE, "hidden_size d_model n_embd dim_model_base emb_dim embedding_dim word_embed_proj_dim"),
    **_sizes(32, "embedding_size input_embedding_size output_embedding_size"),
    **_sizes(HIDDEN_SIZE, "lru_width shared_intermediate_size mamba_d_ssm backbone_hidden_size"),
    **_sizes(LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers"),
    **_sizes(LAYERS, "num_decoder_layers num_blocks max_window_layers depth layers"),
    **_sizes(HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_sizes(HEADS, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    **_sizes(HEADS, "swa_num_attention_heads num_sliding_attention_heads linear_num_heads"),
    **_sizes(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads"),
    **_sizes(16, "head_dim swa_head_dim d_head dim_head kv_channels attention_head_size linear_head_dim"),
    **_sizes(16, "linear_key_head_dim linear_value_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_sizes(16, "mamba_d_state state_size"),
    **_sizes(8, "rotary_dim"),
    **_sizes(32, "kv_lora_rank q_lora_rank global_head_dim"),
    **_sizes(128, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_ff d_inner dim_ff dff"),
    **_sizes(128, "intermediate_size_mlp dense_intermediate_size n_inner block_multiple_of feed_forward_size"),
    **_sizes(32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_sizes(32, "expert_ffn_hidden_size moe_shared_expert_intermediate_size share_expert_dim mlp_dim"),
    **_sizes(4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    **_sizes(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    **_sizes(1, "n_group topk_group num_group num_expert_group num_kv_shared_layers num_nextn_predict_layers"),
    **_sizes(1, "first_k_dense_replace"),
    **_sizes(2, "index_n_heads linear_num_key_heads"),
    **_sizes(4, "linear_num_value_heads"),
    **_sizes(16, "index_head_dim index_topk"),
    **_sizes(512, "max_position_embeddings n_positions n_ctx max_seq_len context_length seq_len"),
    **_sizes(WINDOW, "sliding_window window_size attention_window_size sliding_window_size attention_chunk_size"),
    **_sizes(300, "encoder_hash_byte_group_vocab"),
    **_sizes(8, "hidden_size_per_layer_input chunk_size mamba_chunk_size conv_dim"),
}  # fmt: skip
# Where sizes must agree with each other in a way of the family's own.
SPECIFIC: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 32}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "opt": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 64]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


# Heads are made for them, or would be, but their library's own `generate` does not run on such a config alone.
EXCLUDED = {
    **dict.fromkeys(("blt", "dbrx"), "the default config misses a field that the library's own code reads"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "are assistants themselves, of another kind"),
    **dict.fromkeys(("musicgen", "musicgen_melody", "pi0"), "write no text"),
    **dict.fromkeys(("gemma3n", "fast_vlm", "perception_lm", "inkling_mm_model"), "their towers need other packages"),
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2", "idefics"), "need an image"),
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), "are encoder-decoder models"),
    **dict.fromkeys(("vision-encoder-decoder",), "are encoder-decoder models"),
    "janus": "its own `generate` passes arguments on that transformers calls deprecated",
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), "their own positions need ids of images"),
    **dict.fromkeys(
        (
            "apertus1p5", "chameleon", "cohere_compass", "deepseek_ocr2", "diffusion_gemma", "dots3_note",
            "ernie4_5_vl_moe", "evolla", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "granite4_vision",
            "granite_docling", "hunyuan_vl", "inkling2", "inkling2_loop", "mistral4", "molmo2", "muse_spark",
            "nemotron_h_omni", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen4_exp", "step3p7", "glm5_next",
        ),
        "the towers' sizes do not shrink by themselves; the text model is that of a family here, or nearly",
    ),
}  # fmt: skip
# No head can be made, or read, and what the error says.
REJECTED = {
    **dict.fromkeys(("deepseek_v4", "hy_v4", "hy_v4_vl", "qwen4_exp_text"), "several residual streams .hyper-conn"),
    "gemma3n_text": r"several residual streams \(AltUp, altup_num_inputs=4\)",
    "prophetnet": "several residual streams .future n-grams",
    "hrm_text": "has no list of 32 decoder blocks",
    "cpmant": r"features of shape \(1, 46, 64\) at hidden_states index 1, where \(1, 14, 64\) was expected",
    "xlnet": r"features of shape \(14, 1, 64\) at hidden_states index 1, where \(1, 14, 64\) was expected",
}
# Whose own cached steps do not give what one forward gives, in versions before 5.24.
WRONG_WHEN_OLD = {"cpmant", "git"}
# Their own code computes in float32 beside weights in half precision.
FLOAT32_ONLY = {"inkling2_text", "inkling2_loop_text", "xlnet"}


def config_of(model_type: str, **overrides) -> PreTrainedConfig:
    """The config of a family, shrunk."""
    fields = {**_shrunk(CONFIG_MAPPING[model_type]()), **SPECIFIC.get(model_type, {}), **overrides}
    return CONFIG_MAPPING[model_type](**fields)


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a default config that were cut."""
    own, cut = vars(config), {}
    layers = own.get("num_hidden_layers")
    for name, value in own.items():
        if isinstance(value, PreTrainedConfig):
            cut[name] = {**_shrunk(value), "model_type": value.model_type}
        elif name.endswith("key_value_heads") and value == own.get("num_attention_heads"):
            cut[name] = HEADS
        elif name in MOST and type(value) is int:
            cut[name] = min(value, MOST[name])
        elif name == "rope_parameters" and "mrope_section" in (value or {}):
            pairs = int(8 * value.get("partial_rotary_factor", 1.0))
            cut[name] = {**value, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
        elif name.endswith(("token_id", "token_index")) and type(value) is int:
            cut[name] = min(value, VOCAB_SIZE - 1)
        elif type(value) is list and len(value) == layers:
            kinds = list(dict.fromkeys(map(_hashable, value)))
            cut[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    return cut


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def build(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> PreTrainedModel:
    """A new target of the family; the generator's state is left as it was."""
    config = config_of(model_type, **overrides)
    auto = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        move_vectors(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()
