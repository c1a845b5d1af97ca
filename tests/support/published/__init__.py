"""Published heads, one row for each format and peculiarity: their folders, and what we must make of them.

A row is written down as its publisher writes it (names, config keys, what is left out) together with the canonical
fields that loading must arrive at. `docs/heads.md` shows the same rows. Each row comes in two sizes:

- as published, shapes only: a real config and a weights file with a real header over a hole of the right length, so
  that a head of six gigabytes costs a few kilobytes;
- tiny, for the targets of `families`: real random tensors in float32, with every relation kept that matters (narrower
  than the target, `head_dim` apart from `hidden / heads`, whole vocabulary, ...).

Facts come from the publishers' trainers, exporters, configs and pages; a fact that none of them states is said to be
"assumed" in the row's `peculiarity`.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from support.families import HIDDEN_SIZE, LAYERS, VOCAB_SIZE
from support.heads import DRAFT_VOCAB, write_folder


WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "F8_E4M3": 1, "U8": 1}
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}
TORCH |= {"BOOL": torch.bool, "U8": torch.uint8}
LEGACY_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
LLAMA3_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
YARN32 = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
KIMI_YARN = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
KIMI_YARN |= {"original_max_position_embeddings": 4096}
KIMI_FIELDS = {key: value for key, value in KIMI_YARN.items() if key != "type"} | {"rope_type": "yarn"}


@dataclass(frozen=True)
class Mla:
    """The ranks and widths of latent attention."""

    kv_lora: int
    nope: int
    rope: int
    v: int
    q_lora: int | None = None


@dataclass(frozen=True)
class Shape:
    """Sizes of a head and of the target that it reads. `target_hidden=None`: as wide as the head."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    target_layers: int
    draft_vocab: int = 32000
    target_hidden: int | None = None
    layers: int = 1
    captured: int = 3
    mla: Mla | None = None

    @property
    def features(self) -> int:
        return self.captured * (self.target_hidden or self.hidden)

    def tiny(self) -> "Shape":
        """The same relations at the size of the tiny targets."""
        hidden = HIDDEN_SIZE if self.target_hidden is None else HIDDEN_SIZE // 2
        usual = self.head_dim * self.heads == self.hidden
        return replace(
            self,
            hidden=hidden,
            intermediate=96,
            heads=4,
            kv_heads=4 if self.kv_heads == self.heads else 2,
            head_dim=(hidden // 4) * (1 if usual else 2),
            vocab=VOCAB_SIZE,
            target_layers=LAYERS,
            draft_vocab=VOCAB_SIZE if self.draft_vocab == self.vocab else DRAFT_VOCAB,
            target_hidden=None if self.target_hidden is None else HIDDEN_SIZE,
            mla=self.mla and Mla(kv_lora=16, nope=16, rope=8, v=12, q_lora=self.mla.q_lora and 24),
        )


LLAMA_8B = Shape(4096, 14336, 32, 8, 128, vocab=128256, target_layers=32)
LLAMA_70B = Shape(8192, 28672, 64, 8, 128, vocab=128256, target_layers=80)
QWEN_8B = Shape(4096, 12288, 32, 8, 128, vocab=151936, target_layers=36)
QWEN_4B = Shape(2560, 9728, 32, 8, 128, vocab=151936, target_layers=36)
QWEN_30B = Shape(2048, 12288, 32, 4, 128, vocab=151936, target_layers=48)
QWEN_235B = Shape(4096, 24576, 64, 4, 128, vocab=151936, target_layers=94)
GPT_OSS_120B = Shape(2880, 17280, 64, 8, 64, vocab=201088, target_layers=36)
GPT_OSS_20B = replace(GPT_OSS_120B, target_layers=24)
KIMI = Shape(7168, 12288, 64, 64, 128, vocab=163840, target_layers=61, draft_vocab=163840)
KIMI_MLA = Shape(7168, 18432, 64, 64, 64, 163840, 61, draft_vocab=163840, mla=Mla(512, 128, 64, 128, q_lora=1536))


@dataclass(frozen=True)
class Row:
    """One kind of published head.

    Attributes:
        name: Short, unique; the id of its tests.
        target, repos, format, peculiarity: What `docs/heads.md` says of it. No repository where none is public.
        shape: As published.
        config: What its `config.json` says beyond the sizes; `...` leaves a usual key out. `tiny_config` on top of it
            for the tiny size, where layer ids and rotary sections must be others.
        layer: Name of a draft layer in the file, `{}` for its number; `outer` in front of embedding, fc and norms.
        embed, lm_head, d2t, t2d, norm, fc, hidden_norm: Whether the file has them.
        extra: Tensors beyond a head's own, with their shapes as functions of the shape.
        ids, tiny_ids: `target_layer_ids` after loading; `bound_ids` after binding to the tiny target, if not those.
        expected: Other canonical fields that are not the default.
        rope: What `rope_parameters` must contain after loading.
        notes: Words that the notes must contain; a row without any must give no warning at load.
        refusal: Instead of all that: words of the error.
        parameters: Parameters in the file that a public page states, in units of 1e9, with the page's precision.
    """

    name: str
    target: str
    format: str
    peculiarity: str
    shape: Shape
    repos: tuple[str, ...] = ()
    style: str = "flat"
    config: dict[str, Any] = field(default_factory=dict)
    tiny_config: dict[str, Any] = field(default_factory=dict)
    layer: str = "midlayer"
    outer: str = ""
    embed: bool = False
    lm_head: bool = True
    d2t: bool = True
    t2d: bool = True
    norm: bool = True
    fc: bool = True
    hidden_norm: bool = True
    legacy_norms: bool = False
    later_norm: str = "input_layernorm"
    extra: dict[str, Any] = field(default_factory=dict)
    dtype: str = "BF16"
    file: str = "model.safetensors"
    ids: list[int] | None = None
    tiny_ids: list[int] | None = None
    bound_ids: list[int] | None = None
    expected: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refusal: str | None = None
    parameters: float | None = None

    def switch(self, name: str) -> bool:
        return bool(self.expected.get(name, False))


# ----- config.json ---------------------------------------------------------------------------------------------------


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, nested dicts merged, keys with the value `...` left out."""
    result = dict(base)
    for key, value in changes.items():
        if value is ...:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def layer_config(shape: Shape) -> dict[str, Any]:
    fields = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 16384,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    if shape.mla is None and shape.head_dim * shape.heads != shape.hidden:
        fields["head_dim"] = shape.head_dim
    if shape.mla is not None:
        mla = shape.mla
        fields |= {"q_lora_rank": mla.q_lora, "kv_lora_rank": mla.kv_lora, "qk_nope_head_dim": mla.nope}
        fields |= {"qk_rope_head_dim": mla.rope, "v_head_dim": mla.v}
    return fields


def flat_config(row: Row, shape: Shape) -> dict[str, Any]:
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(shape),
        "draft_vocab_size": shape.draft_vocab,
    }
    fields |= {"torch_dtype": {"F16": "float16"}.get(row.dtype, "bfloat16"), "bos_token_id": 1, "eos_token_id": 2}
    if shape.target_hidden is not None:
        fields["target_hidden_size"] = shape.target_hidden
    return fields


def old_speculators_config(row: Row, shape: Shape) -> dict[str, Any]:
    """As transformers 4 wrote it; the verifier's path is that of a machine long gone."""
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/proving-grounds/engine/verifier"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {**layer_config(shape), "head_dim": shape.head_dim, "attention_bias": False},
        "transformers_version": "4.55.0",
    }


def speculators_config(row: Row, shape: Shape) -> dict[str, Any]:
    """As 0.9 writes it, all flags spelt out."""
    old = old_speculators_config(row, shape)
    del old["torch_dtype"]
    return {
        **old,
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "dtype": "bfloat16",
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {
            **old["transformer_layer_config"],
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "transformers_version": "5.19.0",
    }


CONFIGS = {"flat": flat_config, "speculators old": old_speculators_config, "speculators": speculators_config}


def config_of(row: Row, tiny: bool = False) -> dict[str, Any]:
    shape = row.shape.tiny() if tiny else row.shape
    config = merged(CONFIGS[row.style](row, shape), row.config)
    return merged(config, row.tiny_config) if tiny else config


# ----- tensors -------------------------------------------------------------------------------------------------------


def _attention_tensors(row: Row, shape: Shape, width: int) -> dict[str, tuple[int, ...]]:
    if shape.mla is not None:
        return _mla_tensors(shape, width)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, width), "k_proj.weight": (keys, width)}
    found |= {"v_proj.weight": (keys, width), "o_proj.weight": (shape.hidden, queries)}
    if row.switch("attention_bias"):
        found |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
        if row.expected.get("attention_output_bias") is not False:
            found["o_proj.bias"] = (shape.hidden,)
    if row.switch("qk_norm"):
        found |= {"q_norm.weight": (shape.head_dim,), "k_norm.weight": (shape.head_dim,)}
    return found


def _mla_tensors(shape: Shape, width: int) -> dict[str, tuple[int, ...]]:
    mla = shape.mla
    queries = shape.heads * (mla.nope + mla.rope)
    found: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, width)}
    if mla.q_lora is not None:
        found = {"q_a_proj.weight": (mla.q_lora, width), "q_a_layernorm.weight": (mla.q_lora,)}
        found["q_b_proj.weight"] = (queries, mla.q_lora)
    return found | {
        "kv_a_proj_with_mqa.weight": (mla.kv_lora + mla.rope, width),
        "kv_a_layernorm.weight": (mla.kv_lora,),
        "kv_b_proj.weight": (shape.heads * (mla.nope + mla.v), mla.kv_lora),
        "o_proj.weight": (shape.hidden, shape.heads * mla.v),
    }


def _layer_tensors(row: Row, shape: Shape, number: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = shape.intermediate, shape.hidden
    attention = _attention_tensors(row, shape, 2 * narrow if number == 0 else narrow)
    found = {f"self_attn.{name}": size for name, size in attention.items()}
    found |= {"mlp.gate_proj.weight": (wide, narrow), "mlp.up_proj.weight": (wide, narrow)}
    found |= {"mlp.down_proj.weight": (narrow, wide), "post_attention_layernorm.weight": (narrow,)}
    found |= {"input_layernorm.weight": (narrow,)}
    if row.switch("mlp_bias"):
        found |= {"mlp.gate_proj.bias": (wide,), "mlp.up_proj.bias": (wide,), "mlp.down_proj.bias": (narrow,)}
    if number == 0 and row.hidden_norm:
        found["hidden_norm.weight"] = (narrow,)
    return {f"layers.{number}.{name}": size for name, size in found.items()}


def own_tensors(row: Row, tiny: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of the file, under our names, without those that carry nothing."""
    shape = row.shape.tiny() if tiny else row.shape
    sizes: dict[str, tuple[int, ...]] = {}
    for number in range(shape.layers):
        sizes |= _layer_tensors(row, shape, number)
    optional = {
        "fc.weight": (row.fc, (shape.hidden, shape.features)),
        "fc.bias": (row.switch("fc_bias"), (shape.hidden,)),
        "embed_tokens.weight": (row.embed, (shape.vocab, shape.hidden)),
        "lm_head.weight": (row.lm_head, (shape.draft_vocab, shape.hidden)),
        "norm.weight": (row.norm, (shape.hidden,)),
        "input_norm.weight": (row.switch("norm_before_fc"), (shape.features,)),
    }
    for number in range(shape.captured):
        optional[f"fc_norm.{number}.weight"] = (row.switch("fc_norm"), (shape.target_hidden or shape.hidden,))
    sizes |= {name: size for name, (there, size) in optional.items() if there}
    tensors = {name: (size, "F32" if tiny else row.dtype) for name, size in sizes.items()}
    if row.d2t:
        tensors["d2t"] = ((shape.draft_vocab,), "I64")
    if row.t2d:
        tensors["t2d"] = ((shape.vocab,), "BOOL")
    return tensors


def file_name(row: Row, name: str) -> str:
    """Our name of a tensor to the name it has in the file."""
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        if rest == "input_layernorm.weight" and number != "0":
            rest = f"{row.later_norm}.weight"
        return f"{row.layer.format(number)}.{rest}"
    if row.legacy_norms and name.startswith("fc_norm."):
        return LEGACY_NORMS[int(name.split(".")[1])]
    return name if name in ("lm_head.weight", "d2t", "t2d") else row.outer + name


def file_tensors(row: Row, tiny: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of the file, under the names it has there."""
    shape = row.shape.tiny() if tiny else row.shape
    named = {file_name(row, name): what for name, what in own_tensors(row, tiny).items()}
    extra = {name: (size(shape), dtype) for name, (size, dtype) in row.extra.items()}
    return {name: what for name, what in {**named, **extra}.items() if what[0] is not None}


def renamed(row: Row, tiny: bool = False) -> dict[str, str]:
    """File name -> our name, of every tensor that is to be used."""
    names = {file_name(row, name): name for name in own_tensors(row, tiny)}
    return {there: ours for there, ours in names.items() if there not in row.dropped}


# ----- what loading must make of it ----------------------------------------------------------------------------------

SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
    "fc_bias",
)
SWITCHES += ("qk_norm",)


def canonical(row: Row, tiny: bool = False) -> dict[str, Any]:
    """The fields that `describe_head` must give, `rope_parameters` apart."""
    shape = row.shape.tiny() if tiny else row.shape
    fields = {
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.target_hidden or shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.mla.rope if shape.mla else shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "own_embeddings": row.embed,
        "own_lm_head": row.lm_head,
        "target_layer_ids": row.tiny_ids if tiny else row.ids,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        **dict.fromkeys(SWITCHES, False),
    }
    if shape.mla:
        mla = shape.mla
        fields |= {"q_lora_rank": mla.q_lora, "kv_lora_rank": mla.kv_lora, "qk_nope_head_dim": mla.nope}
        fields |= {"qk_rope_head_dim": mla.rope, "v_head_dim": mla.v}
    return {**fields, **row.expected}


# ----- folders -------------------------------------------------------------------------------------------------------


def shape_only(row: Row, folder: Path) -> Path:
    """The head as published, without its numbers: a hole of the right length where they would be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(row)), encoding="utf-8")
    header, end = {}, 0
    for name, (size, dtype) in file_tensors(row).items():
        start, end = end, end + math.prod(size) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def tiny_tensors(row: Row, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random numbers for every tensor of the tiny file; norms near one, a draft vocabulary all over the target's."""
    generator = torch.Generator().manual_seed(seed)
    shape, tensors = row.shape.tiny(), {}
    ids = torch.arange(shape.draft_vocab)
    if shape.draft_vocab < shape.vocab:
        ids = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
    for name, (size, dtype) in file_tensors(row, tiny=True).items():
        if name == "d2t":
            tensors[name] = (ids - torch.arange(len(ids))).to(TORCH[dtype])
        elif name == "t2d":
            tensors[name] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, ids, True)
        elif dtype in ("F32", "F16", "BF16"):
            noise = torch.randn(size, generator=generator) * 0.1
            near_one = len(size) == 1 and name.endswith("weight")
            tensors[name] = (noise + 1 if near_one else noise).to(TORCH[dtype])
        else:
            tensors[name] = torch.ones(size).to(TORCH.get(dtype, torch.float8_e4m3fn))
    return tensors


def tiny_folder(row: Row, folder: Path, seed: int = 0, file: str | None = None) -> Path:
    return write_folder(folder, config_of(row, tiny=True), tiny_tensors(row, seed), file or row.file)


def parameters(row: Row) -> float:
    """Parameters in the published file, in units of 1e9."""
    return sum(math.prod(size) for name, (size, _) in own_tensors(row).items() if name not in ("d2t", "t2d")) / 1e9
