"""The files of a head, in a local folder or a Hub repository: its config and the table of its tensors.

No code among them is run, no file elsewhere is read, and no weights are loaded here.
"""

import json
import os
import re
from typing import Any, NamedTuple

from transformers.utils import cached_file

from ..published_formats import HeadFormatError, TensorInfo, check_is_head, is_own_format, read_tensor_table


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "token", "revision", "subfolder")
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_LARGEST_CONFIG = 16 * 2**20  # bytes; real ones have a few thousand
_DEEPEST_CONFIG = 32  # levels; real ones have four
# Beside such a file transformers loads every `.safetensors` file, whatever the index says.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


class HeadFiles(NamedTuple):
    """A head's files before they are interpreted: `config.json`, and the tensors under the file's names."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_head_files(path: str | os.PathLike, config: str | os.PathLike | None, kwargs: dict[str, Any]) -> HeadFiles:
    """Read the config and the tensor table of a head.

    Args:
        path: Local folder or Hub id of the weights.
        config: Another local folder or Hub id for the config, as in transformers' `from_pretrained`.
        kwargs: Those of `from_pretrained`, some of which say which files are read, and from where.

    Raises:
        HeadFormatError: a file is missing, damaged, or unsafe.
    """
    hub = _hub_arguments(kwargs)
    published = _read_config(path if config is None else config, hub)
    return HeadFiles(published, read_tensors(path, kwargs, published))


def read_tensors(path, kwargs: dict[str, Any], config: dict | None = None) -> dict[str, TensorInfo]:
    """Read the table of tensors of the file that transformers is going to load, by its order of preference."""
    hub = _hub_arguments(kwargs)
    _check_nothing_else(path, hub)
    wanted = kwargs.get("use_safetensors")
    names = [_SAFETENSORS] * (wanted is not False) + [_PICKLE] * (wanted is not True)
    for name in names:
        if kwargs.get("variant"):
            stem, ending = name.rsplit(".", 1)
            name = f"{stem}.{kwargs['variant']}.{ending}"
        file = _file(path, name, hub)
        if file is not None:
            return read_tensor_table(file)
        index = _file(path, f"{name}.index.json", hub)
        if index is not None:
            return _sharded_table(path, index, hub, config)
    raise HeadFormatError(
        f"{path} has neither {' nor '.join(names)}: not a draft head, or an interrupted download (download it again)"
    )


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}


def _check_nothing_else(path, hub: dict[str, Any]) -> None:
    """Reject files that would make transformers load other weights than those that are checked here."""
    if _optional_file(path, "adapter_config.json", hub) is not None:
        raise HeadFormatError(
            f"{path} holds an adapter (adapter_config.json), which would be laid over the head: merge the two, "
            "or remove its files"
        )
    folder = os.path.join(path, hub.get("subfolder") or "")
    strange = [name for name in os.listdir(folder) if _DISTRIBUTED.match(name)] if os.path.isdir(folder) else []
    if strange:
        raise HeadFormatError(
            f"{path} holds the shard {strange[0]} of a distributed checkpoint, which would be loaded in place of the "
            "head's weights: consolidate it into one model.safetensors, or remove it"
        )


def read_generation_config(path: str | os.PathLike, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Read `generation_config.json`; the result is empty without such a file.

    Raises:
        HeadFormatError: the file is not a JSON object.
    """
    file = _optional_file(path, "generation_config.json", _hub_arguments(kwargs))
    return {} if file is None else _read_json(file)


def _sharded_table(path, index: str, hub: dict[str, Any], config: dict | None) -> dict[str, TensorInfo]:
    content = _read_json(index)
    where = content.get("weight_map")
    if not isinstance(where, dict):
        raise HeadFormatError(f"{index} has no `weight_map`: corrupt, download it again")
    if not isinstance(content.get("metadata"), dict):
        raise HeadFormatError(f'{index} has no `metadata`, which transformers needs: add `"metadata": {{}}` to it')
    if config is not None and not is_own_format(config):
        _check_index(path, config, set(where))
    table: dict[str, TensorInfo] = {}
    for name in sorted(set(map(str, where.values()))):
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir) or not name.isprintable():
            raise HeadFormatError(f"{index} names {name!r}, a file outside its folder, which is not read")
        file = _file(path, name, hub)
        if file is None:
            raise HeadFormatError(f"{path} lacks {name}, which its index names: an interrupted download")
        table.update(read_tensor_table(file))
    lost = sorted(set(where) - set(table))
    if lost:
        raise HeadFormatError(
            f"{path}: its index names tensors that its shards do not hold: {lost}; download it again"
        )
    return table


def _check_index(path, config: dict[str, Any], names: set[str]) -> None:
    """Reject an ordinary model before its many gigabytes are downloaded."""
    try:
        check_is_head(config, names)
    except HeadFormatError as error:
        raise HeadFormatError(f"{path}: {error}") from error


def _file(path, name: str, hub: dict[str, Any]) -> str | None:
    """The local path of one file, downloaded if necessary; `None` when there is none."""
    try:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        if str(path) in str(error):
            raise
        # Without a network, transformers' message does not name the path.
        raise OSError(f"{path} is no local folder, and as a Hub id: {error}") from error


def _optional_file(path, name: str, hub: dict[str, Any]) -> str | None:
    """As `_file`; where a repository cannot be reached, the file counts as absent, as for transformers."""
    quiet = {"_raise_exceptions_for_connection_errors": False, "_raise_exceptions_for_gated_repo": False}
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **quiet, **hub)


def _read_json(file: str) -> dict[str, Any]:
    size = os.path.getsize(file)
    if size > _LARGEST_CONFIG:
        raise HeadFormatError(f"{file} has {size} bytes, more than {_LARGEST_CONFIG}: not a config")
    too_deep = f"{file} is nested more than {_DEEPEST_CONFIG} levels deep: not a config"
    try:
        with open(file, encoding="utf-8") as stream:
            content = json.load(stream)
    except RecursionError as error:
        raise HeadFormatError(too_deep) from error
    except ValueError as error:
        raise HeadFormatError(f"{file} is not JSON ({error}): corrupt or truncated, download it again") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else type(content).__name__
        raise HeadFormatError(f"{file} must hold a JSON object, it holds a {kind}")
    if _is_deeper(content, _DEEPEST_CONFIG):
        raise HeadFormatError(too_deep)
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in inner)


def _read_config(path, hub: dict[str, Any]) -> dict[str, Any]:
    if os.path.isfile(path):
        raise HeadFormatError(f"{path} is a file: pass the folder that holds the head's config.json and weights")
    if not os.path.isdir(path) and not _HUB_ID.fullmatch(str(path)):
        raise FileNotFoundError(f"{path} is neither a local folder nor a Hub id (owner/name)")
    file = _file(path, "config.json", hub)
    if file is None:
        if not os.path.isdir(path):
            cached_file(path, "config.json", **hub)  # raises transformers' own error for a repository without it
        raise HeadFormatError(f"{path} has no config.json: {_what_else(path)}")
    return _read_json(file)


def _what_else(path) -> str:
    """What a local folder without a config seems to hold."""
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        merged = os.path.join(path, "merged")
        where = f"merged in, {merged}" if os.path.isdir(merged) else "merged in (merge_and_unload of peft)"
        return f"it holds adapters of a head; pass the head with them {where}"
    checkpoints = [name for name in os.listdir(path) if re.fullmatch(r"checkpoint-\d+", name)]
    if checkpoints:
        last = max(checkpoints, key=lambda name: int(name.rpartition("-")[2]))
        return f"it holds checkpoints of a training run; pass one of them, such as {os.path.join(path, last)}"
    return "not a draft head, or an interrupted download"
