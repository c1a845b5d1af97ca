"""Ways to damage a head's `config.json` and `generation_config.json`, and the odd values that go into them."""

import copy
import json
import math
import random
from typing import Any

from support.fuzz.heads import FIELDS, IDS


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor", "partial_rotary_factor")
_ROPE += ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim")
_LAYER_IDS = {"target_layer_ids", "guessed_layer_ids", "target_hidden_size"}
# Keys for layer ids of trainers and engines besides `IDS`.
ID_KEYS = ("layer_ids", "target_layer_ids", "target_hidden_layer_ids", "aux_hidden_state_layer_ids", "aux_layer_ids")
ID_KEYS += ("aux_hidden_state_layers", "eagle3_layers_to_capture", "layers_to_capture", "draft_feature_layer_ids")
_BIAS = {"attention_bias", "attention_output_bias"}
# Key of a file -> the canonical fields that it decides, where those are not the one of the same name.
_DECIDES: dict[str, set[str]] = {
    **dict.fromkeys(_ROPE, {"rope_parameters"}),
    **dict.fromkeys((IDS, "num_aux_hidden_states", *ID_KEYS), _LAYER_IDS),
    **dict.fromkeys(("attention_bias", "qkv_bias", "bias"), _BIAS),
    "num_attention_heads": {"num_attention_heads", "num_key_value_heads", "head_dim"},
    "vocab_size": {"vocab_size", "draft_vocab_size"},
    "use_aux_norm": {"fc_norm"},
    "return_hidden_post_norm": {"norm_output"},
    "use_sliding_window": {"sliding_window", "layer_types"},
    "sliding_window": {"sliding_window", "layer_types"},
    "layer_types": {"sliding_window", "layer_types"},
    "use_aux_hidden_state": {"use_aux_hidden_state", *_LAYER_IDS},
    "target_hidden_size": _LAYER_IDS,
    # Read off the tensors, whatever the config says.
    **{key: set() for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "draft_vocab_size")},
}
# Fields whose legal values must arrive as the file says.
_LEVELS = ((), ("eagle_config",), ("transformer_layer_config",))  # where such a key means what it says
_VALUES = ("rms_norm_eps", "hidden_act", "max_position_embeddings", "norm_before_residual", "norm_output")


def decided_by(key: str, value: Any = None) -> set[str]:
    """The canonical fields that a key, or any key inside its value, may change."""
    found = set(_DECIDES.get(key, {key} & set(FIELDS)))
    if isinstance(value, dict):
        found = found.union(*(decided_by(name, inner) for name, inner in value.items()))
    return found


# ----- values --------------------------------------------------------------------------------------------------------


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def odd_value(rng: random.Random, old: Any) -> Any:
    """Anything that JSON can hold, and now and then something near the old value."""
    near = [old]
    if isinstance(old, int) and not isinstance(old, bool):
        near = [old + 1, old - 1, 2 * old, old // 2, float(min(old, 2**53)), str(old), -old, [old]]
    elif isinstance(old, float):
        near = [old * 2, old / 2, -old, str(old), int(old) if math.isfinite(old) else 0]
    elif isinstance(old, bool):
        near = [not old, int(old), str(old).lower()]
    elif isinstance(old, list) and old:
        near = [
            old[::-1],
            old[:-1],
            [*old, old[-1]],
            [*old, 10**9],
            [-1, *old],
            [str(i) for i in old],
            [old],
            old * 99,
        ]
    elif isinstance(old, str):
        near = [old.upper(), "", old + "x", old * 1000]
    elif isinstance(old, dict):
        near = [{**old, "x": 1}, dict.fromkeys(old), list(old), {**old, "factor": 0}]
    strange = [10**9, 10**18, 10**400, -1, -(10**18), 0, 1, 2, 7, 0.5, -2.5, 1e-300, 1e300, float("nan"), float("inf")]
    strange += [-float("inf"), "", "text", "64", "None", "../x", "\ud800", "\x00", None, True, False, [], {}, [[]]]
    strange += [{"a": {}}, [1, 2, 3], [2, 4, 5], deep(60), deep(300), list(range(5000)), "y" * 100_000, {"": None}]
    strange += [{"rope_type": "linear"}, {"rope_type": "yarn", "factor": "x"}, {"type": "dynamic", "factor": 2}]
    strange += [{"full_attention": {"rope_type": "default"}}, {"rope_type": ["yarn"]}, {"rope_type": "proportional"}]
    return rng.choice(near if rng.random() < 0.35 else strange)


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Where something is in a nested config, inner dicts and lists included."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(*prefix, key), *paths(inner, (*prefix, key))]
    return found


def holder(config: Any, path: tuple) -> Any:
    for key in path[:-1]:
        config = config[key]
    return config


def _touch(case, path: tuple, value: Any = None) -> None:
    for key in path:
        case.touched |= decided_by(key) if isinstance(key, str) else set()
    case.touched |= decided_by(path[-1] if isinstance(path[-1], str) else "", value)
    for name in case.touched:
        case.published.wanted.pop(name, None)


def _brief(value: Any) -> str:
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


# ----- the config ----------------------------------------------------------------------------------------------------


def replace_value(case) -> None:
    config, rng = case.published.config, case.rng
    places = paths(config)
    if not places:
        return
    path = rng.choice(places)
    place = holder(config, path)
    old, new = place[path[-1]], odd_value(rng, place[path[-1]])
    _touch(case, path, old)
    _touch(case, path, new)
    place[path[-1]] = new
    if path[-1] in _VALUES and path[:-1] in _LEVELS and new is not None:
        case.published.wanted[path[-1]] = new
    case.story.append(f"{'.'.join(map(str, path))} = {_brief(new)}")


def delete_key(case) -> None:
    places = [path for path in paths(case.published.config) if isinstance(path[-1], str)]
    if not places:
        return
    path = case.rng.choice(places)
    _touch(case, path, holder(case.published.config, path)[path[-1]])
    del holder(case.published.config, path)[path[-1]]
    case.story.append(f"without {'.'.join(map(str, path))}")


def rename_key(case) -> None:
    places = [path for path in paths(case.published.config) if isinstance(path[-1], str)]
    if not places:
        return
    path, place = case.rng.choice(places), None
    place = holder(case.published.config, path)
    other = case.rng.choice([*(p[-1] for p in places), path[-1].upper(), f"{path[-1]}s", "self", "to_dict", "window"])
    _touch(case, path, place[path[-1]])
    _touch(case, (other,), place[path[-1]])
    _touch(case, (other,), place.get(other))
    place[other] = place.pop(path[-1])
    case.story.append(f"{'.'.join(map(str, path))} renamed {other}")


def put_elsewhere(case) -> None:
    """A key of one level, with another value, at another level."""
    config, rng = case.published.config, case.rng
    places = [path for path in paths(config) if isinstance(path[-1], str)]
    if not places:
        return
    path = rng.choice(places)
    value = holder(config, path)[path[-1]]
    value = copy.deepcopy(odd_value(rng, value) if rng.random() < 0.7 else value)
    where = rng.choice(["", "eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling"])
    if where:
        if not isinstance(config.get(where), dict):
            _touch(case, (where,), config.get(where))
            config[where] = {}
            if where == "transformer_layer_config":  # now a file of speculators, which counts layers in its own way
                case.touched.update({"target_layer_ids", "guessed_layer_ids"})
        place = config[where]
    else:
        place = config
    _touch(case, (where, path[-1]) if where else (path[-1],), value)
    place[path[-1]] = value
    case.story.append(f"{path[-1]} = {_brief(value)} in {where or 'the top level'}")


STRANGE_KEYS = (
    *("quantization_config", "auto_map", "_attn_implementation", "attn_implementation", "transformers_weights"),
    *("to_dict", "window", "is_latent", "get_text_config", "dtype", "torch_dtype", "output_attentions", "use_cache"),
    *("tie_word_embeddings", "is_encoder_decoder", "num_labels", "id2label", "problem_type", "mask_token_id"),
    *("dflash_config", "eh_proj_before_attn", "speculators_model_type", "sliding_window", "layer_types", "qk_norm"),
    *("sub_configs", "attribute_map", "model_type", "_name_or_path", "transformers_version", "per_layer", "__class__"),
    *("pruned_heads", "tokenizer_class", "chunk_size_feed_forward", "target_layer_ids", "own_embeddings", "mlp_bias"),
    *("norm_before_fc", "fc_norm", "norm_output", "final_norm", "norm_before_residual", "attention_bias", "head_dim"),
    *("kv_lora_rank", "use_aux_hidden_state", "num_aux_hidden_states", IDS, "rope_parameters", "rope_scaling"),
    *("max_length", "temperature", "eos_token_id", "bos_token_id", "pad_token_id", "return_dict", "architectures"),
)


def unknown_key(case) -> None:
    rng = case.rng
    key = rng.choice(STRANGE_KEYS) if rng.random() < 0.85 else rng.choice(["", "a.b", "clé", "x" * 5000])
    value = rng.choice([odd_value(rng, None), "kernels-community/x", {"quant_method": "bitsandbytes"}, "../x", True])
    _touch(case, (key,), value)
    _touch(case, (key,), case.published.config.get(key))
    case.published.config[key] = value
    case.story.append(f"{key[:40]} = {_brief(value)} added")


def ids_elsewhere(case) -> None:
    """Layer ids under a further key, at any level; equal to the others, one apart, or anything."""
    config, rng = case.published.config, case.rng
    where, key = rng.choice(["", "eagle_config", "model"]), rng.choice([IDS, *ID_KEYS])
    ids = rng.choice([[1, 3, 4], [2, 4, 5], [2, 4], [0, 1, 2], [5, 3, 1], odd_value(rng, [1, 3, 4])])
    _touch(case, (key,), ids)
    if where and not isinstance(config.get(where), dict):
        _touch(case, (where,), config.get(where))
        config[where] = {}
    (config[where] if where else config)[key] = ids
    case.story.append(f"{key} = {_brief(ids)} in {where or 'the top level'}")


def raw_config(case) -> None:
    text = json.dumps(case.published.config)
    raw = case.rng.choice(
        [
            b"\xff\xfe{}",
            b"\xef\xbb\xbf" + text.encode(),
            text.encode("utf-16"),
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"a":' * 900 + b"1" + b"}" * 900,
            (text[:-1] + ', "z": ' + "[" * 5000 + "]" * 5000 + "}").encode(),
            (text[:-1] + ', "rms_norm_eps": 1e400}').encode(),
            (text[:-1] + ', "rope_theta": ' + "9" * 5000 + "}").encode(),
            (text[:-1] + ', "note": "' + "x" * 20_000_000 + '"}').encode(),
            (text[:-1] + "," + ",".join(f'"k{i}": {i}' for i in range(100_000)) + "}").encode(),
            b"",
            b"\x00" * 100,
            b"null",
            b"NaN",
            b"{}",
            text.encode()[: case.rng.randrange(len(text))],
        ]
    )
    case.touched |= set(FIELDS)
    case.published.wanted.clear()
    case.published.raw_config = raw
    case.story.append(f"config.json is {raw[:20]!r}... of {len(raw)} bytes")


GENERATION = ("num_assistant_tokens", "assistant_tree_depth", "assistant_tree_top_k", "assistant_coupled_sampling")
GENERATION += ("max_new_tokens", "temperature", "do_sample", "eos_token_id", "cache_implementation", "num_beams", "x")
GENERATION += (
    "watermarking_config",
    "compile_config",
    "to_dict",
    "validate",
    "custom_generate",
    "transformers_version",
)


def generation(case) -> None:
    rng = case.rng
    config = dict(case.published.generation or {})
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(GENERATION)
        config[key] = odd_value(rng, config.get(key, 3))
        case.story.append(f"generation {key} = {_brief(config[key])}")
    case.published.generation = config
    if rng.random() < 0.15:
        case.published.raw_generation = rng.choice(
            [b"", b"[" * 100_000, b"[1]", b"\xff", b"{", b"null", b'{"a":' * 990]
        )
        case.story.append(f"generation_config.json is {case.published.raw_generation[:9]!r}...")
