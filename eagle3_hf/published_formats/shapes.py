"""Draft layers that compute something else than EAGLE-3's, recognised by a tensor that only they have."""

import re
from collections.abc import Iterable


# Pattern of a tensor's name -> what the layer is. The first pattern that matches is reported.
_SHAPES = {
    r"\.(experts|block_sparse_moe|shared_experts?|shared_expert_gate)\.|\.(mlp|feed_forward)\.(gate|router)\.": (
        "its draft layer is a mixture of experts"
    ),
    r"\.lora_[AB]\.|\.lora_magnitude_vector": "it holds adapters that are not merged into the weights",
    r"\.(qkv_proj|query_key_value|Wqkv|c_attn|in_proj|gate_up_proj|fused_qkv_a_proj_with_mqa|qkv_a_proj)\.": (
        "its projections are fused, as engines fuse them in memory"
    ),
    r"\.self_attn\.sinks$": "its attention has sinks",
    r"\.self_attn\.indexer\.": "its attention is sparse, with an indexer",
    r"\.self_attn\.(g_proj|gate_proj|attn_gate|output_gate|o_gate)\.": "its attention has an output gate",
    r"\.(linear_attn|mamba|mixer|ssm|conv1d|short_conv)\.": "its draft layer is recurrent or convolutional",
    r"\.(pre|post)_feedforward_layernorm\.": "its draft layer has norms before and after each part, as Gemma's",
    r"(layernorm|_norm|\bnorm)\.bias$": "its norms are LayerNorms with biases",
    r"\.mlp\.(fc1|fc2|c_fc|c_proj|dense_h_to_4h|dense_4h_to_h|w1|w2|w3)\.": "its MLP is not a gated one",
    r"^fc(\d|\.\d)": "it fuses the target's features with several layers",
    r"^lm_head\.bias$": "its output layer has a bias",
    r"^medusa|\.medusa|^hydra": "it is a Medusa or Hydra head",
}


def other_shape(names: Iterable[str]) -> str | None:
    """Return what is unsupported about a head with these tensors; `None` where nothing is recognised.

    A tensor that no pattern matches and no head has is reported later, when the head is compared with an empty one.

    Args:
        names: The tensor names in the file.
    """
    names = sorted(names)
    for pattern, shape in _SHAPES.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found is not None:
            return f"{shape} (tensor {found}), which is not supported"
    return None
