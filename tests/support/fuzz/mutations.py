"""Ways to damage a head: its tensors and the bytes of its files (its configs: `config`), and a table of all."""

import json
import os
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from support.families import VOCAB_SIZE
from support.fuzz import config


# ----- the tensors ---------------------------------------------------------------------------------------------------


def _some(case, count: int = 1) -> list:
    names = list(case.published.tensors)
    return case.rng.sample(names, min(count, len(names)))


def _put(case, name, tensor, what: str) -> None:
    case.published.tensors[name] = tensor
    case.story.append(f"{name} {what}")


def _touch_tensor(case, name: str) -> None:
    """What a file leaves out is borrowed, if it can be."""
    case.touched |= {"own_embeddings"} if "embed_tokens" in name else {"own_lm_head"} if "lm_head" in name else set()
    case.touched |= {"fc_bias"} if name == "fc.bias" else set()


def delete_tensor(case) -> None:
    for name in _some(case):
        _touch_tensor(case, name)
        del case.published.tensors[name]
        case.story.append(f"without {name}")


STRAYS = ("fc.bias", "input_norm.weight", "fc_norm.0.weight", "fc_norm.3.weight", "midlayer.self_attn.q_norm.weight")
STRAYS += ("layers.1.hidden_norm.weight", "layers.999999.x", "embed_tokens.weight", "model.fc.weight", "mask_hidden")
STRAYS += ("lm_head.weight", "lm_head.bias", "t2d", "d2t", "layers.0.mlp.up_proj.weight_scale", "rotary_emb.inv_freq")
STRAYS += (
    "verifier_norm.weight",
    "",
    "..",
    "layers.0.self_attn.q_proj.bias",
    "midlayer.00.x",
    "z" * 3000,
    "norm.bias",
)


def add_tensor(case) -> None:
    name = case.rng.choice(STRAYS)
    _touch_tensor(case, name)
    like = case.rng.choice(list(case.published.tensors.values()) or [torch.zeros(3)])
    _put(case, name, case.rng.choice([torch.zeros(64), torch.zeros(16), like.clone()]), "added")


def many_tensors(case) -> None:
    for i in range(3000):
        case.published.tensors[f"layers.0.experts.{i}.weight"] = torch.zeros(1)
    case.story.append("3000 tensors more")


def rename_tensor(case) -> None:
    for name in _some(case):
        _touch_tensor(case, name)
        tensor = case.published.tensors.pop(name)
        text = str(name)
        new = case.rng.choice(
            [
                f"model.{text}",
                text.replace("midlayer", "layers.0"),
                text.upper(),
                f"{text}.weight",
                text[:-1],
                f" {text}",
            ]
            + [text.replace("layers.0", "midlayer"), text.replace("layers.0", "layers.7"), f"draft.{text}"]
        )
        case.published.tensors[new] = tensor
        case.story.append(f"{name} renamed {new}")


def swap_tensors(case) -> None:
    names = _some(case, 2)
    if len(names) == 2:
        tensors = case.published.tensors
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
        case.story.append(f"{names[0]} and {names[1]} swapped")


def _reshaped(rng: random.Random, t: torch.Tensor) -> torch.Tensor:
    if t.dim() == 0:
        return t.reshape(1)
    return rng.choice(
        [t.t() if t.dim() == 2 else t[None], t[: len(t) // 2], t[:0], t[..., :0], t[:-1], t[None], t.flatten()[0]]
        + [t.flatten(), t[..., None], torch.cat([t, t]), torch.zeros(()), t.new_zeros(0, *t.shape[1:])]
    )


def reshape_tensor(case) -> None:
    for name in _some(case):
        new = _reshaped(case.rng, case.published.tensors[name])
        _put(case, name, new.clone(), f"of shape {tuple(new.shape)}")


DTYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool)
DTYPES += (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int16, torch.float32, torch.uint16)


def cast_tensor(case) -> None:
    dtype = case.rng.choice(DTYPES)
    names = _some(case) if case.rng.random() < 0.7 else list(case.published.tensors)
    for name in names:
        tensor = case.published.tensors[name]
        case.published.tensors[name] = tensor.to(dtype)
    case.story.append(f"{names if len(names) == 1 else 'all tensors'} to {dtype}")


def odd_numbers(case) -> None:
    for name in _some(case):
        tensor = case.published.tensors[name].clone()
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1:
            tensor.view(-1)[case.rng.randrange(tensor.numel())] = case.rng.choice([float("nan"), float("inf"), -1e4])
        _put(case, name, tensor, "with an odd number")


def odd_map(case) -> None:
    rng, tensors = case.rng, case.published.tensors
    size = len(tensors["d2t"]) if "d2t" in tensors and tensors["d2t"].dim() else 128
    d2t = tensors["d2t"].clone() if "d2t" in tensors else torch.zeros(size, dtype=torch.int64)
    if d2t.dim() != 1 or not len(d2t) or d2t.dtype != torch.int64:
        return
    i, rows = rng.randrange(len(d2t)), torch.arange(len(d2t))
    change = rng.choice(["negative", "huge", "twice", "zeros", "absolute", "shifted", "reversed", "last", "mask"])
    if change in ("negative", "huge"):
        d2t[i] = rng.choice([-1000, -(2**63), -1 - i] if change == "negative" else [2**63 - 1, VOCAB_SIZE, 10**6])
    elif change == "twice":
        d2t[i] = d2t[i - 1] - 1 if i else 0
    elif change == "zeros":
        d2t.zero_()
    elif change in ("absolute", "shifted"):
        d2t += rows if change == "absolute" else rng.choice([1, -1, 100])
    elif change == "reversed":
        d2t = (d2t + rows).flip(0) - rows
    elif change == "last":
        d2t[-1] = VOCAB_SIZE - len(d2t)
    elif "t2d" in tensors and tensors["t2d"].dim() == 1 and len(tensors["t2d"]):
        tensors["t2d"] = rng.choice([~tensors["t2d"].bool(), torch.zeros_like(tensors["t2d"]), tensors["t2d"].roll(1)])
    if rng.random() < 0.4:
        tensors.pop("t2d", None)
        change += ", without t2d"
    _put(case, "d2t", d2t, change)


class Runs:
    """What a hostile pickle is."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def odd_pickle(case) -> None:
    """A `.bin` file with something in it that only a pickle can hold."""
    rng, head = case.rng, case.published
    head.file = "pytorch_model.bin" if rng.random() < 0.8 else "old/pytorch_model.bin"
    name = rng.choice(list(head.tensors) or ["fc.weight"])
    tensor = head.tensors.get(name, torch.zeros(2))
    real = tensor if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1 else torch.ones(4)
    odd = {
        "giant": torch.zeros(1).expand(10**6, 10**6),
        "giant of its shape": torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape),
        "meta": torch.empty(tensor.shape, device="meta"),
        "sparse": real.to_sparse(),
        "parameter": torch.nn.Parameter(real.float()),
        "view": torch.cat([tensor.flatten(), tensor.flatten()])[tensor.numel() :].view(tensor.shape),
        "transposed view": tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
        "number": 3,
        "none": None,
        "code": Runs(),
        "quantized": torch.quantize_per_tensor(real.float(), 0.1, 0, torch.qint8),
        "conjugate": torch.complex(real.float(), real.float()).conj(),
    }
    kind = rng.choice([*odd, "list", "nothing", "nested", "int key", "tuple key", "ordered", "shared", "huge key"])
    state: Any = dict(head.tensors)
    if kind in odd:
        state[name] = odd[kind]
    elif kind in ("list", "nothing", "nested"):
        state = {"list": list(state.values()), "nothing": None, "nested": {"state_dict": state}}[kind]
    elif kind in ("int key", "tuple key", "huge key"):
        key: Any = {"int key": 7, "tuple key": ("fc", "weight"), "huge key": "k" * 10**6}[kind]
        state[key] = state.pop(name, tensor) if rng.random() < 0.5 else torch.zeros(2)
    elif kind == "ordered":
        state = OrderedDict(state)
    else:
        whole = torch.randn(max((t.numel() for t in state.values()), default=1))
        state = {n: whole[: t.numel()].view(t.shape) if t.is_floating_point() else t for n, t in state.items()}
    head.state = state
    case.story.append(f"{head.file} with {kind} {name if kind in odd else ''}")


# ----- the bytes of the files ----------------------------------------------------------------------------------------


def _weights(case, folder: Path) -> Path | None:
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") and file.is_file())
    return case.rng.choice(files) if files else None


def truncate(case, folder: Path) -> None:
    file = _weights(case, folder)
    if file is not None:
        size = file.stat().st_size
        left = case.rng.choice([0, 1, 8, case.rng.randrange(size + 1), max(size - 1, 0), size // 2])
        os.truncate(file, min(left, size))
        case.story.append(f"{file.name} cut to {left} of {size} bytes")


def flip(case, folder: Path) -> None:
    """Bits of the header of a safetensors file, or of anywhere in the first and last bytes of a pickle."""
    file = _weights(case, folder)
    if file is None or not file.stat().st_size:
        return
    content = bytearray(file.read_bytes())
    end = min(len(content), 3000)
    if file.suffix == ".safetensors" and len(content) > 8:
        end = min(len(content), 8 + struct.unpack("<Q", content[:8])[0])
    for _ in range(case.rng.choice((1, 1, 3, 20))):
        place = case.rng.randrange(end)
        if file.suffix == ".bin" and case.rng.random() < 0.5:
            place = len(content) - 1 - place
        content[place] ^= 1 << case.rng.randrange(8)
    file.write_bytes(content)
    case.story.append(f"{file.name} with flipped bits")


def header(case, folder: Path) -> None:
    """Another safetensors header: lengths and shapes out of the world."""
    file = _weights(case, folder)
    if file is None or file.suffix != ".safetensors" or file.stat().st_size < 8:
        return
    content, rng = file.read_bytes(), case.rng
    length = struct.unpack("<Q", content[:8])[0]
    try:
        table, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    except ValueError:  # another mutation was here
        return
    name = rng.choice([name for name in table if name != "__metadata__"] or ["x"])
    kind = rng.choice(["length", "shape", "empty", "offsets", "metadata", "twice", "dtype", "negative"])
    entry = table.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    if kind == "shape":
        entry["shape"] = rng.choice([[10**9, 10**9], [2**63, 2], [2**64], [2**32, 2**32], entry["shape"][::-1]])
    elif kind == "empty":
        table["extra"] = {"dtype": "F32", "shape": [0, 10**18], "data_offsets": [len(data), len(data)]}
    elif kind == "offsets":
        entry["data_offsets"] = rng.choice([[0, 2**63], [2**63, 2**63], [5, 1], [0, 0], [0], []])
    elif kind == "metadata":
        table["__metadata__"] = rng.choice([{}, {"format": "np"}, {"format": "flax"}, {"format": "../x"}, {"a": "b"}])
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["F64", "F16", "F4", "F8_E8M0", "X", "", "U64", "C64"])
    elif kind == "negative":
        entry["shape"] = rng.choice([[-1, 64], [1.5], "64", None, [[64]]])
    text = json.dumps(table).encode()
    if kind == "twice":
        text = text[:-1] + b", " + json.dumps({name: entry}).encode()[1:]
    said = rng.choice([2**63, 2**64 - 1, 100_000_001, 10**8, 0, len(text) + 1]) if kind == "length" else len(text)
    file.write_bytes(struct.pack("<Q", said) + text + data)
    case.story.append(f"{file.name}: header with {kind} {said if kind == 'length' else name}")


def index(case, folder: Path) -> None:
    """An index file, in place of the one there is or beside the whole file."""
    rng, weights = case.rng, _weights(case, folder)
    if weights is None:
        return
    name = "model.safetensors" if weights.suffix == ".safetensors" else "pytorch_model.bin"
    if (folder / name).exists() and rng.random() < 0.8:
        (folder / name).rename(folder / f"part{weights.suffix}")
    parts = sorted(file.name for file in folder.iterdir() if file.suffix == weights.suffix)
    where: Any = {tensor: rng.choice(parts) for tensor in map(str, case.published.tensors)}
    kind = rng.choice(
        ["good", "outside", "absolute", "lost", "numbers", "list", "null", "empty", "one", "dot", "config"]
    )
    odd = {"outside": "../x.safetensors", "absolute": "/etc/passwd", "lost": "gone.safetensors", "numbers": 3}
    odd |= {"list": ["a"], "null": None, "one": parts[0], "dot": rng.choice([".", "..", "", "a\x00b", "x" * 5000])}
    odd |= {"config": "config.json"}
    if kind in odd and where:
        where[rng.choice(list(where))] = odd[kind]
    content: Any = {"metadata": {}, "weight_map": {} if kind == "empty" else where}
    if rng.random() < 0.2:
        content = rng.choice(
            [[], {"weight_map": [1]}, {"weight_map": "x"}, {"metadata": 1, "weight_map": where}, {"weight_map": where}]
        )
    (folder / f"{name}.index.json").write_text(json.dumps(content))
    case.story.append(f"an index that is {kind}")


def odd_files(case, folder: Path) -> None:
    """Things beside or in place of the files that belong there."""
    rng, weights = case.rng, _weights(case, folder)
    kind = rng.choice(
        ["adapter", "directory", "fifo", "both", "code", "link", "checkpoint", "config directory", "shard"]
    )
    if kind == "adapter":
        fields = {
            "base_model_name_or_path": "somebody/else",
            "peft_type": "LORA",
            "r": 4,
            "target_modules": ["q_proj"],
        }
        (folder / "adapter_config.json").write_text(rng.choice([json.dumps(fields), "{", "[]"]))
    elif kind in ("directory", "fifo") and weights is not None:
        weights.unlink()
        weights.mkdir() if kind == "directory" else os.mkfifo(weights)
    elif kind == "both" and weights is not None:
        other = "pytorch_model.bin" if weights.suffix == ".safetensors" else "model.safetensors"
        (folder / other).write_bytes(rng.choice([b"", b"junk", weights.read_bytes()]))
    elif kind == "code":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text("import os; os.mkdir('ran')")
        (folder / "config.py").write_text("import os; os.mkdir('ran')")
    elif kind == "link":
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "generation_config.json").symlink_to("/nowhere/at/all")
    elif kind == "checkpoint":
        (folder / ".metadata").write_bytes(b"junk")
        (folder / "__0_0.distcp").write_bytes(b"junk")
    elif kind == "shard" and weights is not None:
        (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(weights.read_bytes())
    elif kind == "config directory":
        (folder / "config.json").unlink(missing_ok=True)
        (folder / "config.json").mkdir()
    case.story.append(f"odd files: {kind}")


# What damages the case, whether it works on the written files, and how often it is drawn.
_ALL = [
    (config.replace_value, False, 30),
    (config.delete_key, False, 8),
    (config.rename_key, False, 5),
    (config.put_elsewhere, False, 6),
    (config.unknown_key, False, 12),
    (config.raw_config, False, 4),
    (config.generation, False, 8),
    (delete_tensor, False, 3),
    (add_tensor, False, 4),
    (many_tensors, False, 1),
    (rename_tensor, False, 3),
    (swap_tensors, False, 3),
    (reshape_tensor, False, 5),
    (cast_tensor, False, 6),
    (odd_numbers, False, 4),
    (odd_map, False, 7),
    (odd_pickle, False, 7),
    (truncate, True, 4),
    (flip, True, 5),
    (header, True, 5),
    (index, True, 5),
    (odd_files, True, 5),
    (config.ids_elsewhere, False, 10),
]
KINDS = [(mutate, on_files) for mutate, on_files, _ in _ALL]
WEIGHTS = [weight for *_, weight in _ALL]
