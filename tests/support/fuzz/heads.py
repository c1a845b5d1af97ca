"""Sound heads to damage: one of each format and kind of layer, with the config that loading must arrive at."""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.families import HIDDEN_SIZE, VOCAB_SIZE
from support.heads import new_head, published


IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MLA |= {"head_dim": None, "num_key_value_heads": None}
NARROW = {"hidden_size": 32, "head_dim": 8, "target_hidden_size": HIDDEN_SIZE, "own_embeddings": True}
# Fields that are compared with the loaded head's.
FIELDS = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("vocab_size", "draft_vocab_size", "target_layer_ids", "guessed_layer_ids", "use_aux_hidden_state"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "final_norm", "attention_bias"),
    *("attention_output_bias", "mlp_bias", "fc_bias", "qk_norm", "layer_types", "sliding_window", "kv_lora_rank"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "own_embeddings", "own_lm_head"),
)


@dataclass
class Published:
    """A folder before it is written. `wanted`: fields that a mutation has given another legal value."""

    config: dict[str, Any]
    tensors: dict[Any, Any]
    expected: dict[str, Any]
    file: str = "model.safetensors"
    generation: Any = None
    wanted: dict[str, Any] = field(default_factory=dict)
    raw_config: bytes | None = None
    raw_generation: bytes | None = None
    state: Any = None  # written to a .bin file instead of the tensors


def our_name(name: str) -> str | None:
    """The name of a file's tensor in our layout; `None` for those that carry nothing."""
    name = name.removeprefix("model.")
    if re.search(r"rotary_emb\.inv_freq$|^verifier_lm_head\.|^verifier_norm\.", name):
        return None
    if name.startswith("midlayer."):
        name = f"layers.{name[9:]}" if name[9:].split(".")[0].isdigit() else f"layers.0.{name[9:]}"
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 2 and parts[1] not in ("0", "00") and parts[2] == "hidden_norm":
        parts[2] = "input_layernorm"
    for number, word in enumerate(("low", "mid", "high")):
        if parts[0] == f"aux_norm_{word}":
            parts[:1] = ["fc_norm", str(number)]
    return ".".join(parts)


def _file_config(draft) -> dict[str, Any]:
    """The keys of an ordinary layer's config."""
    config, _ = published(draft)
    config |= {"head_dim": draft.config.head_dim, "num_hidden_layers": draft.config.num_hidden_layers}
    return config


def _named(draft, layer: str = "layers.{}", prefix: str = "", drop: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in draft.state_dict().items():
        if name in drop or (draft.config.draft_vocab_size == draft.config.vocab_size and name in ("d2t", "t2d")):
            continue
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"{prefix}{layer.format(number)}.{rest}"
        elif name not in ("d2t", "t2d", "lm_head.weight"):
            name = prefix + name
        tensors[name] = tensor.clone()
    return tensors


def _expect(draft, **changes) -> dict[str, Any]:
    return {name: getattr(draft.config, name) for name in FIELDS} | changes


def _safeai(file: str = "model.safetensors", dtype: torch.dtype | None = None, **fields) -> Published:
    draft = new_head(target_layer_ids=None, **fields)
    config, tensors = published(draft)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    return Published(config, tensors, _expect(draft), file)


def _specforge(layer: str = "midlayer", drop=(), keys: dict | None = None, nested=(1, 3, 4), **fields) -> Published:
    draft = new_head(target_layer_ids=[i + 1 for i in nested], **fields)
    eagle = {IDS: list(nested), "use_aux_hidden_state": True}
    config = _file_config(draft) | {"eagle_config": eagle, "architectures": ["LlamaForCausalLMEagle3"]} | (keys or {})
    return Published(config, _named(draft, layer, drop=drop), _expect(draft))


def _llama3() -> Published:
    rope = {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0}
    return _specforge(
        keys={"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "attention_bias": False},
        rope_parameters=rope,
    )


def _specforge31() -> Published:
    found = _specforge(keys={"fc_norm": True, "norm_output": True}, fc_norm=True, norm_output=True)
    found.generation = {"num_assistant_tokens": 12, "assistant_tree_depth": 3, "assistant_tree_top_k": 4}
    return found


def _legacy_norms() -> Published:
    found = _specforge(keys={"use_aux_norm": True}, fc_norm=True)
    for number, word in enumerate(("low", "mid", "high")):
        found.tensors[f"aux_norm_{word}.weight"] = found.tensors.pop(f"fc_norm.{number}.weight")
    return found


def _modelopt() -> Published:
    keys = {"rope_scaling": YARN, "torch_dtype": "bfloat16"}
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    flags |= {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    found = _specforge("layers.{}", ("t2d",), keys, rope_parameters={**YARN, "rope_theta": 10000.0})
    found.config["eagle_config"] |= flags
    return found


def _no_features() -> Published:
    draft = new_head(use_aux_hidden_state=False, target_layer_ids=None)
    config = _file_config(draft) | {"eagle_config": {"use_aux_hidden_state": False}}
    return Published(config, _named(draft, "midlayer", drop=("t2d",)), _expect(draft))


def _latent(file: str = "model.safetensors") -> Published:
    draft = new_head(**MLA, target_layer_ids=[2, 4, 5], rope_parameters={**YARN, "rope_theta": 50000.0, "mscale": 1.0})
    config = _file_config(draft) | {name: value for name, value in MLA.items() if value is not None}
    del config["head_dim"], config["num_key_value_heads"]
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", IDS: [2, 4, 5]}
    config |= {"rope_theta": 50000.0, "rope_scaling": {**YARN, "mscale": 1.0}}
    return Published(config, _named(draft), _expect(draft), file)


def _speculators(layer_keys: dict | None = None, keys: dict | None = None, **fields) -> Published:
    draft = new_head(target_layer_ids=[2, 4, 5], own_embeddings=True, **fields)
    layer = _file_config(draft) | (layer_keys or {})
    for name in ("draft_vocab_size", "architectures", "tie_word_embeddings", "torch_dtype"):
        del layer[name]
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft.config.draft_vocab_size,
        "transformer_layer_config": layer,
        "target_hidden_size": None,
        IDS: [2, 4, 5],
        "norm_before_residual": draft.config.norm_before_residual,
        "norm_before_fc": draft.config.norm_before_fc,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "/no/such/target", "architectures": ["LlamaForCausalLM"]},
        },
    } | (keys or {})
    return Published(config, _named(draft), _expect(draft))


def _speculators_layers() -> Published:
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    kinds = {"attention_bias": True, "mlp_bias": True}
    found = _speculators(
        {**slides, **kinds, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        num_hidden_layers=2,
        qk_norm=True,
        norm_output=True,
        keys={"norm_output": True},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **slides,
        **kinds,
    )
    found.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    return found


def _nemo() -> Published:
    draft = new_head(target_layer_ids=None, own_embeddings=True)
    config = _file_config(draft) | {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3}
    return Published(config, _named(draft, prefix="model."), _expect(draft))


def _five_layers() -> Published:
    found = _specforge(nested=(1, 2, 3, 5, 6), keys={"num_aux_hidden_states": 5})
    return found


def _ids_at(guessed: bool, ids: list[int], **places: list[int]) -> Published:
    """Ids under any keys, `eagle_config__KEY` for nested ones; `ids` is what they mean."""
    draft = new_head(target_layer_ids=ids, guessed_layer_ids=guessed)
    config: dict[str, Any] = _file_config(draft) | {"architectures": ["LlamaForCausalLMEagle3"]}
    for place, stored in places.items():
        *nested, key = place.split("__")
        (config.setdefault(nested[0], {}) if nested else config)[key] = stored
    return Published(config, _named(draft, "midlayer"), _expect(draft))


def _own(file: str = "model.safetensors", **fields) -> Published:
    draft = new_head(**fields)
    with tempfile.TemporaryDirectory() as folder:
        draft.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        generation = json.loads((Path(folder) / "generation_config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    return Published(config, tensors, _expect(draft), file, generation)


_KINDS: dict[str, Callable[[], Published]] = {
    "SafeAILab": _safeai,
    "SafeAILab .bin": lambda: _safeai("pytorch_model.bin"),
    "SafeAILab .bin of float16": lambda: _safeai("pytorch_model.bin", torch.float16),
    "SafeAILab old .bin": lambda: _safeai("old/pytorch_model.bin"),
    "SafeAILab wide target": lambda: _safeai(**NARROW),
    "SafeAILab whole vocabulary": lambda: _safeai(draft_vocab_size=VOCAB_SIZE),
    "SafeAILab borrowed head": lambda: _safeai(draft_vocab_size=VOCAB_SIZE, own_lm_head=False),
    "SafeAILab shards": lambda: _safeai("sharded/model.safetensors"),
    "SafeAILab .bin shards": lambda: _safeai("sharded/pytorch_model.bin"),
    "SpecForge llama3": _llama3,
    "SpecForge 3.1": _specforge31,
    "SpecForge one key head": lambda: _specforge(num_key_value_heads=1, own_embeddings=True),
    "legacy norms": _legacy_norms,
    "five layers": _five_layers,
    "ModelOpt": _modelopt,
    "ModelOpt deep": lambda: _specforge("midlayer.{}", ("t2d",), num_hidden_layers=2),
    "no features": _no_features,
    "MLA": _latent,
    "MLA .bin": lambda: _latent("pytorch_model.bin"),
    "speculators": lambda: _speculators(norm_before_residual=True, norm_before_fc=True),
    "speculators layers": _speculators_layers,
    "NeMo": _nemo,
    "equal ids": lambda: _ids_at(True, [2, 4, 5], **{IDS: [1, 3, 4], f"eagle_config__{IDS}": [1, 3, 4]}),
    "ids one apart": lambda: _ids_at(False, [2, 4, 5], aux_layer_ids=[1, 3, 4], layers_to_capture=[2, 4, 5]),
    "ids under another key": lambda: _ids_at(False, [2, 4, 5], eagle_config__target_hidden_layer_ids=[1, 3, 4]),
    "own": _own,
    "own .bin": lambda: _own("pytorch_model.bin"),
    "own shards": lambda: _own("sharded/model.safetensors", own_embeddings=True),
    "own MLA": lambda: _own(**MLA, final_norm=False),
    "own of all kinds": lambda: _own(
        num_hidden_layers=2, qk_norm=True, attention_bias=True, fc_norm=True, norm_output=True, fc_bias=True, **NARROW
    ),
}
HEADS = {name: cache(kind) for name, kind in _KINDS.items()}


# ----- writing -------------------------------------------------------------------------------------------------------


def write(folder: Path, head: Published) -> None:
    """A folder with these contents, however wrong they are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(head.config).encode() if head.raw_config is None else head.raw_config
    (folder / "config.json").write_bytes(config)
    if head.raw_generation is not None or head.generation is not None:
        raw = head.raw_generation
        (folder / "generation_config.json").write_bytes(json.dumps(head.generation).encode() if raw is None else raw)
    where, name = head.file.rsplit("/", 1) if "/" in head.file else ("", head.file)
    state = head.tensors if head.state is None else head.state
    if where != "sharded" or not isinstance(state, dict):
        _write_weights(folder / name, state, where == "old")
        return
    stem, ending = name.rsplit(".", 1)
    names, index = list(state), {}
    for number in range(3):
        shard = f"{stem}-{number + 1:05d}-of-00003.{ending}"
        part = {name: state[name] for name in names[number::3]}
        _write_weights(folder / shard, part, False)
        index.update(dict.fromkeys(map(str, part), shard))
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def _write_weights(file: Path, state: Any, old: bool) -> None:
    if file.suffix == ".safetensors":
        plain = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in state.items()}
        save_file(plain, file, metadata={"format": "pt"})
    else:
        torch.save(state, file, _use_new_zipfile_serialization=not old)
