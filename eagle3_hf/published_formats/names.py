"""Maps the tensor names of all published formats to canonical names, the ones that `Eagle3DraftModel` has.

One table declares the renamings. transformers gets it as `key_mapping`; `rename` applies it to the names only, so that
they can be checked before a byte is loaded.
"""

import re
from collections.abc import Iterable, Mapping

from .errors import HeadFormatError


# Pattern -> replacement, applied in this order, each at most once per name.
WEIGHT_RENAMINGS = {
    r"^model\.": "",  # NeMo AutoModel
    r"^midlayer\.(\d+)\.": r"layers.\1.",  # ModelOpt, several layers
    r"^midlayer\.(?!\d+\.)": "layers.0.",  # SafeAILab, SpecForge, AngelSlim, ModelOpt
    r"^layers\.([1-9]\d*)\.hidden_norm\.": r"layers.\1.input_layernorm.",  # SGLang's name of this norm
    r"^aux_norm_low\.": "fc_norm.0.",  # SGLang's first names of EAGLE-3.1's norms
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
}

# Tensors that some files have and no draft reads: tables that follow from the config, and copies of the target's
# weights that only a trainer needs.
DROPPED_TENSORS = (r"rotary_emb\.inv_freq$", r"^verifier_lm_head\.", r"^verifier_norm\.")


def canonical_name(name: str) -> str:
    """Return the canonical name of a tensor in any published format."""
    for pattern, replacement in WEIGHT_RENAMINGS.items():
        name = re.sub(pattern, replacement, name, count=1)
    return name


def is_dropped(name: str) -> bool:
    """Whether no draft reads the tensor of this canonical name."""
    return any(re.search(pattern, name) for pattern in DROPPED_TENSORS)


def rename(names: Iterable[str]) -> dict[str, str]:
    """Return a map from the names in the file to canonical names.

    Raises:
        HeadFormatError: two tensors of the file have the same canonical name.
    """
    renamed: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in sorted(names):
        canonical = canonical_name(name)
        if canonical in owner:
            raise HeadFormatError(f"its tensors {owner[canonical]} and {name} are two of the same kind ({canonical})")
        owner[canonical] = name
        renamed[name] = canonical
    return renamed


class FileNames:
    """Spells canonical names as the file does, for messages.

    Args:
        renamed: The name in the file -> the canonical name, for every tensor in the file.
    """

    def __init__(self, renamed: Mapping[str, str]):
        self._renamed = renamed
        self._in_file = {canonical: name for name, canonical in renamed.items()}

    def show(self, canonical: str) -> str:
        """Return the file's name, followed by the canonical one where they differ.

        The name of a missing tensor is derived from those of the same layer.
        """
        name = self._in_file.get(canonical) or self._derived(canonical)
        return canonical if name in (None, canonical) else f"{name} ({canonical})"

    def _derived(self, canonical: str) -> str | None:
        """Return the name with the prefix that another tensor of the same layer has in the file."""
        layer = re.match(r"layers\.\d+\.", canonical)
        if layer is None:
            return None
        prefix = layer[0]
        for name, other in self._renamed.items():
            if other.startswith(prefix) and name.endswith(other[len(prefix) :]):
                return name[: len(name) - len(other) + len(prefix)] + canonical[len(prefix) :]
        return None


def count_layers(names: Iterable[str]) -> int:
    """Count the draft layers in canonical names. Configs are not asked: some give the target's number.

    Raises:
        HeadFormatError: the layers are not numbered consecutively from 0.
    """
    found = sorted({int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,4})\.", name))})
    if found != list(range(len(found))):
        raise HeadFormatError(f"its draft layers are numbered {found}: layer {_first_gap(found)} is missing")
    return len(found)


def _first_gap(found: list[int]) -> int:
    return next(i for i in range(len(found) + 1) if i not in found)
