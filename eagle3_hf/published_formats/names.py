"""Tensor names of every dialect, in one declared table of renamings to ours.

The table goes to transformers as `key_mapping`; `rename` applies it to the names alone, so that everything can be
checked before a byte is loaded.
"""

import re
from collections.abc import Iterable, Mapping

from .errors import HeadFormatError


# Pattern -> replacement, applied in this order, each at most once a name.
WEIGHT_RENAMINGS = {
    r"^model\.": "",  # NeMo AutoModel
    r"^midlayer\.(\d+)\.": r"layers.\1.",  # ModelOpt, several layers
    r"^midlayer\.(?!\d+\.)": "layers.0.",  # SafeAILab, SpecForge, AngelSlim, ModelOpt
    r"^layers\.([1-9]\d*)\.hidden_norm\.": r"layers.\1.input_layernorm.",  # SGLang calls later layers' norm so
    r"^aux_norm_low\.": "fc_norm.0.",  # SGLang's first names of EAGLE-3.1's norms
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
}

# What some files carry and no draft reads: tables that follow from the config, and copies of the target's weights that
# only a trainer needs.
DROPPED_TENSORS = (r"rotary_emb\.inv_freq$", r"^verifier_lm_head\.", r"^verifier_norm\.")


def canonical_name(name: str) -> str:
    """Our name for a tensor of any dialect."""
    for pattern, replacement in WEIGHT_RENAMINGS.items():
        name = re.sub(pattern, replacement, name, count=1)
    return name


def is_dropped(name: str) -> bool:
    """Whether the tensor of this canonical name carries nothing that a draft reads."""
    return any(re.search(pattern, name) for pattern in DROPPED_TENSORS)


def rename(names: Iterable[str]) -> dict[str, str]:
    """File name -> our name.

    Raises:
        HeadFormatError: two tensors of the file would become one.
    """
    renamed: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in sorted(names):
        ours = canonical_name(name)
        if ours in owner:
            raise HeadFormatError(f"its tensors {owner[ours]} and {name} are two of the same kind ({ours})")
        owner[ours] = name
        renamed[name] = ours
    return renamed


class FileNames:
    """Our names of tensors as the file spells them, for messages.

    Args:
        renamed: File name -> our name, of the tensors that are there.
    """

    def __init__(self, renamed: Mapping[str, str]):
        self._renamed = renamed
        self._spelt = {ours: name for name, ours in renamed.items()}

    def show(self, ours: str) -> str:
        """The file's own name, with ours behind it where they differ; one that is missing is spelt like the others."""
        name = self._spelt.get(ours) or self._by_neighbour(ours)
        return ours if name in (None, ours) else f"{name} ({ours})"

    def _by_neighbour(self, ours: str) -> str | None:
        """With the prefix that another tensor of the same layer has."""
        layer = re.match(r"layers\.\d+\.", ours)
        if layer is None:
            return None
        prefix = layer[0]
        for name, other in self._renamed.items():
            if other.startswith(prefix) and name.endswith(other[len(prefix) :]):
                return name[: len(name) - len(other) + len(prefix)] + ours[len(prefix) :]
        return None


def count_layers(names: Iterable[str]) -> int:
    """How many draft layers the (canonical) names speak of; configs are known to say the target's number here.

    Raises:
        HeadFormatError: a layer is missing in between.
    """
    found = sorted({int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,4})\.", name))})
    if found != list(range(len(found))):
        raise HeadFormatError(f"its draft layers are numbered {found}: layer {_first_gap(found)} is missing")
    return len(found)


def _first_gap(found: list[int]) -> int:
    return next(i for i in range(len(found) + 1) if i not in found)
