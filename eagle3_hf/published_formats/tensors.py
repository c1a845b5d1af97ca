"""Reads the table of a weights file: its tensors' names, shapes and dtypes, without loading any of them."""

import os
import zipfile
from typing import NamedTuple

from .errors import HeadFormatError
from .names import FileNames


_FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAFETENSORS_DTYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_VOCABULARY = ("d2t", "t2d")


class TensorInfo(NamedTuple):
    """Shape and dtype of one tensor; the dtype is spelled as in torch, such as `"float16"`."""

    shape: tuple[int, ...]
    dtype: str


def read_tensor_table(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """Return the tensors of a `.safetensors` or `.bin` file by name; no code in the file is ever run.

    Raises:
        HeadFormatError: the file is truncated or corrupt, or is a pickle that holds code.
    """
    try:
        if str(path).endswith(".safetensors"):
            return _safetensors_table(path)
        return _pickle_table(path)
    except HeadFormatError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise HeadFormatError(
            f"{os.fspath(path)} cannot be read as a weights file ({type(error).__name__}: {reason}). It is truncated, "
            "corrupt, or holds code instead of plain tensors (never executed). Download it again, or ask its author "
            "for a safetensors file."
        ) from error


def _safetensors_table(path) -> dict[str, TensorInfo]:
    from safetensors import safe_open

    table = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file object is not a mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            table[name] = TensorInfo(tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype.lower()))
    return table


def _pickle_table(path) -> dict[str, TensorInfo]:
    import torch

    mapped = zipfile.is_zipfile(path)  # the format of old torch versions cannot be mapped into memory
    if not mapped:
        _check_plain(path, torch.load(path, map_location="meta", weights_only=True))
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    _check_plain(path, state)
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise HeadFormatError(f"{os.fspath(path)} has shapes, but no values for {empty}: save the head again")
    return {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()}


def _check_plain(path, state) -> None:
    """Check that a pickle holds only plain tensors, none of which claims more bytes than the file has."""
    import torch

    if not isinstance(state, dict):
        kind = "null" if state is None else type(state).__name__
        raise HeadFormatError(f"{os.fspath(path)} holds a {kind}, not a dict of named tensors")
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise HeadFormatError(
            f"{os.fspath(path)} holds {others[:5]} that are not tensors: a training checkpoint, not the "
            "weights of a head"
        )
    size = os.path.getsize(path)
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise HeadFormatError(f"{os.fspath(path)} names a tensor {name!r}, which is not a string")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise HeadFormatError(f"{os.fspath(path)}: {name} is sparse or quantised, not a plain tensor")
        if tensor.numel() * tensor.element_size() > size:
            raise HeadFormatError(
                f"{os.fspath(path)}: {name} claims shape {tuple(tensor.shape)}, more bytes than the file has ({size})"
            )


def rounding_note(tensors: dict[str, TensorInfo], names: FileNames) -> list[str]:
    """Return a note on tensors that are rounded when the head is loaded in one dtype. Keys are canonical names."""
    dtype = float_dtype(tensors, names)
    exact = {"float64": set(_FLOAT_DTYPES), "float32": {"float32", "float16", "bfloat16"}}.get(str(dtype), {dtype})
    rounded = sorted(name for name, info in tensors.items() if name not in _VOCABULARY and info.dtype not in exact)
    if not rounded:
        return []
    kinds = sorted({tensors[name].dtype for name in rounded})
    shown = [names.show(name) for name in rounded]
    return [
        f"the head is loaded as {dtype}, which rounds its {kinds} tensors {shown}; pass dtype=torch.float32 to keep "
        "their precision"
    ]


def float_dtype(tensors: dict[str, TensorInfo], names: FileNames) -> str | None:
    """Return the dtype of `fc`, or of `o_proj` without one; `None` without either. Keys are canonical names.

    Raises:
        HeadFormatError: weights are quantised, or a cast to a float dtype has rounded the vocabulary map.
    """
    if "d2t" in tensors and tensors["d2t"].dtype not in ("int64", "int32"):
        dtype = tensors["d2t"].dtype
        damage = "cannot hold" if "int" in dtype or dtype == "bool" else "rounds"
        raise HeadFormatError(f"d2t must hold integer offsets, got {dtype}, which {damage} them")
    for name, info in tensors.items():
        if name not in _VOCABULARY and info.dtype not in _FLOAT_DTYPES:
            shown = names.show(name)
            raise HeadFormatError(
                f"{shown} has dtype {info.dtype}: quantised heads are not supported, use the original one"
            )
    for name in ("fc.weight", "layers.0.self_attn.o_proj.weight"):
        if name in tensors:
            return tensors[name].dtype
    return None
