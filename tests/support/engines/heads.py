"""Heads that serving engines can run, and heads that they cannot: one row for each difference between the engines."""

from support.families import VOCAB_SIZE


OWN = {"own_embeddings": True}
MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

VLLM, SGLANG, SPECULATORS = "vllm", "sglang", "speculators"
# A head by its config, and the engines that can run it, with embeddings and target as each needs them.
HEADS = {
    "plain": ({}, {VLLM, SGLANG, SPECULATORS}),
    "own_embeddings": (OWN, {VLLM, SPECULATORS}),
    "two_layers": ({"num_hidden_layers": 2}, {VLLM, SGLANG, SPECULATORS}),
    "whole_vocabulary": ({"draft_vocab_size": VOCAB_SIZE}, {VLLM, SGLANG, SPECULATORS}),
    "borrowed_lm_head": ({"draft_vocab_size": VOCAB_SIZE, "own_lm_head": False}, {VLLM, SGLANG, SPECULATORS}),
    "wide_target": ({"target_hidden_size": 96, **OWN}, {VLLM, SGLANG}),
    "norm_before_residual": ({"norm_before_residual": True, "norm_before_fc": True}, {VLLM, SPECULATORS}),
    "norm_before_fc": ({"norm_before_fc": True}, {VLLM, SGLANG, SPECULATORS}),
    "eagle31": ({"fc_norm": True, "norm_output": True}, {VLLM, SGLANG, SPECULATORS}),
    "qk_norm": ({"qk_norm": True}, {VLLM, SPECULATORS}),
    "attention_bias": ({"attention_bias": True}, {VLLM, SPECULATORS}),
    "qkv_bias": ({"attention_bias": True, "attention_output_bias": False}, set()),
    "qkv_bias_qk_norm": ({"attention_bias": True, "attention_output_bias": False, "qk_norm": True}, {VLLM}),
    "mlp_bias": ({"mlp_bias": True}, {VLLM, SPECULATORS}),
    "mlp_bias_qk_norm": ({"mlp_bias": True, "qk_norm": True}, set()),
    "fc_bias": ({"fc_bias": True}, set()),
    "no_final_norm": ({"final_norm": False}, set()),
    "gelu": ({"hidden_act": "gelu"}, {SPECULATORS}),
    "windows": (
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {VLLM, SPECULATORS},
    ),
    "window_qk_norm": (
        {"layer_types": ["sliding_attention"], "sliding_window": 4, "qk_norm": True},
        {VLLM, SPECULATORS},
    ),
    "four_layers_read": ({"target_layer_ids": [1, 2, 4, 6]}, {VLLM, SGLANG, SPECULATORS}),
    "one_layer_read": ({"target_layer_ids": [4]}, {VLLM, SPECULATORS}),
    "embedding_read": ({"target_layer_ids": [0, 2, 4]}, {VLLM, SPECULATORS}),
    "last_block_read": ({"target_layer_ids": [2, 4, 8], "target_num_hidden_layers": 8}, {VLLM, SPECULATORS}),
    "no_aux": ({"use_aux_hidden_state": False, "target_layer_ids": [-1]}, {VLLM, SGLANG}),
    "mla": (MLA, {VLLM, SGLANG}),
    "mla_yarn": ({**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, {VLLM, SGLANG}),
    "mla_yarn_without_mscale": ({**MLA, "rope_parameters": YARN}, {VLLM, SGLANG}),
    "mla_halves": ({**MLA, "rope_interleave": False}, {SGLANG}),
    "mla_full_rank_queries": ({**MLA, "q_lora_rank": None}, set()),
    "mla_two_layers": ({**MLA, "num_hidden_layers": 2}, {VLLM}),
    "yarn": ({"rope_parameters": YARN}, {VLLM, SGLANG, SPECULATORS}),
    "llama3": ({"rope_parameters": LLAMA3}, {VLLM, SGLANG, SPECULATORS}),
    "linear": ({"rope_parameters": LINEAR}, {VLLM, SGLANG, SPECULATORS}),
    "yarn_attention_factor": ({"rope_parameters": {**YARN, "attention_factor": 1.5}}, {VLLM, SPECULATORS}),
    "dynamic": ({"rope_parameters": DYNAMIC}, {SPECULATORS}),
    "partial": ({"rope_parameters": PARTIAL}, {VLLM}),
}
