"""Reads which layers of the target a head was trained on.

Two conventions are in use, and no file says which one it follows. Ours is the index into `hidden_states` (the state
that enters a block), as in SafeAILab, speculators and vLLM. SpecForge, ModelOpt, AngelSlim, TorchSpec and SGLang
number the *outputs* of blocks, which is one less. vLLM reads ids at the top level of a config, SGLang those in
`eagle_config`. The nested ids of some heads are indices nevertheless, and configs that were rearranged by hand have
the same numbers at both places. Features that are one layer off cost most of the acceptance.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .errors import HeadFormatError


KEY = "eagle_aux_hidden_state_layer_ids"
_OVERRIDE = "load it with target_layer_ids=[...] (hidden_states indices) to choose"
# Other names that trainers and engines use: target_hidden_layer_ids, aux_hidden_state_layer_ids, aux_layer_ids,
# eagle3_layers_to_capture, target_layer_ids and so on.
_NAMES_LAYERS = re.compile(
    r"^layer_ids$|^(?=.*layer)(?!.*(vision|image|video|audio|type)).*(aux|captur|eagle|target|hidden_state|feature)"
)
_NUMBERS = re.compile(r"[\[(\s]*\d+(\s*,\s*\d+)*[\])\s]*")
# Only our exports write this key, and their top-level ids are certainly indices.
_OURS = "target_num_hidden_layers"
_DEEPEST = 4  # levels of nesting that are searched; ids have been seen at two


class LayerIds(NamedTuple):
    """Layer ids of a head.

    Attributes:
        ids: Ascending `hidden_states` indices; `None` when the file names none.
        guessed: Whether the convention had to be assumed.
    """

    ids: list[int] | None
    guessed: bool = False


class _Named(NamedTuple):
    """Layer ids found at one place of a config.

    Attributes:
        place: The path of the key, such as `eagle_config.layer_ids`.
        ids: The ids, ascending.
        counts: What ids at this place number by convention; `None` for keys without a convention.
    """

    place: str
    ids: list[int]
    counts: Literal["indices", "outputs"] | None


def names_layers(key: str, value: Any) -> bool:
    """Whether this config key says which layers of the target a head reads."""
    if not isinstance(key, str) or (key != KEY and not _NAMES_LAYERS.search(key)):
        return False
    if isinstance(value, str):
        return _NUMBERS.fullmatch(value) is not None
    return isinstance(value, (list, tuple)) and any(type(i) is int for i in value)


def layer_ids(config: dict[str, Any], is_speculators: bool, notes: list[str]) -> LayerIds:
    """Return the layer ids of a published config as `hidden_states` indices.

    Args:
        config: The config as published.
        is_speculators: Whether the config is nested as speculators writes it.
        notes: Assumptions are appended to it.

    Raises:
        HeadFormatError: an entry is not a list of distinct integers, or several entries disagree.
    """
    named = list(_named(config, "", is_speculators, notes, _DEEPEST))
    if not named:
        return LayerIds(None)
    low, high = min(n.ids for n in named), max(n.ids for n in named)
    if low != high:
        _check_one_apart(named, low, high)
        return LayerIds(high)
    conventions = {n.counts for n in named}
    if "indices" in conventions and _OURS in config:
        return LayerIds(low)
    if conventions == {"indices"}:
        if low[0] == 1:
            notes.append(_begins_with_one(low, is_speculators))
        return LayerIds(low)
    if "indices" in conventions:
        return _same_everywhere(named, is_speculators, notes)
    return _outputs(named, notes) if "outputs" in conventions else _under_other_keys(named, notes)


def _named(
    config: dict[str, Any], prefix: str, is_speculators: bool, notes: list[str], levels: int
) -> Iterator[_Named]:
    """Yield every place of a config that names layers, the top level first."""
    for key, value in config.items():
        place = f"{prefix}{key}"
        exact = key == KEY or place == "eagle_config.layer_ids"
        if (exact and value is not None) or names_layers(key, value):
            ids = _checked(value, place, notes)
            if ids is not None:
                yield _Named(place, ids, _convention(place, is_speculators))
    for key, value in config.items():
        if isinstance(value, dict) and levels > 1:
            yield from _named(value, f"{prefix}{key}.", is_speculators, notes, levels - 1)


def _convention(place: str, is_speculators: bool) -> Literal["indices", "outputs"] | None:
    if place in (KEY, f"transformer_layer_config.{KEY}", "eagle_config.layer_ids"):
        return "indices"
    if is_speculators and place == "aux_hidden_state_layer_ids":
        return "indices"
    return "outputs" if place == f"eagle_config.{KEY}" else None


def _check_one_apart(named: list[_Named], low: list[int], high: list[int]) -> None:
    """Check that two lists mean the same layers: the larger numbers indices, the smaller ones outputs of blocks."""
    fits = low == [i - 1 for i in high] and all(n.ids in (low, high) for n in named)
    if not fits or any(n.ids == low and n.counts == "indices" for n in named):
        found = ", ".join(f"{n.ids} in {n.place}" + (f" ({_MEANING[n.counts]})" if n.counts else "") for n in named)
        raise HeadFormatError(f"its config names layer ids that are not the same layers: {found}: {_OVERRIDE}")


_MEANING = {"indices": "hidden_states indices", "outputs": "outputs of blocks, one less"}


def _begins_with_one(ids: list[int], is_speculators: bool) -> str:
    others = "speculators' own begin" if is_speculators else f"hidden_states indices, which vLLM reads in {KEY}, begin"
    return (
        f"its layer ids {ids} begin with 1 where {others} with 2: a converted head may read one layer too low; "
        f"if acceptance is low, try target_layer_ids={[i + 1 for i in ids]}"
    )


def _outputs(named: list[_Named], notes: list[str]) -> LayerIds:
    """Interpret ids at the place that SGLang reads: outputs of blocks, except where a trainer wrote indices there."""
    stored = named[0].ids
    outputs, likely = [i + 1 for i in stored], _likely(stored)
    if likely is not None:
        return LayerIds(stored if likely == "indices" else outputs)
    notes.append(
        f"its layer ids {stored} do not say whether they number the outputs of blocks or hidden_states; outputs are "
        f"assumed, so hidden_states indices {outputs} are read; {_OVERRIDE}"
    )
    return LayerIds(outputs, guessed=True)


def _same_everywhere(named: list[_Named], is_speculators: bool, notes: list[str]) -> LayerIds:
    """Interpret the same numbers at two places with different conventions: one of them was copied unchanged.

    In most such configs it is the top level, to which a trainer's numbers of blocks were copied.
    """
    ids, places = named[0].ids, " and ".join(n.place for n in named)
    chosen = LayerIds(ids) if is_speculators or _likely(ids) == "indices" else LayerIds([i + 1 for i in ids], True)
    notes.append(
        f"its config names the layer ids {ids} in {places}, which have different conventions: they are hidden_states "
        f"indices {ids}, or outputs of blocks and so the indices {[i + 1 for i in ids]}; {chosen.ids} are read; "
        f"{_OVERRIDE}"
    )
    return chosen


def _under_other_keys(named: list[_Named], notes: list[str]) -> LayerIds:
    """Interpret ids under keys that no engine reads."""
    ids, places = named[0].ids, " and ".join(n.place for n in named)
    likely = _likely(ids)
    chosen = LayerIds(ids) if likely == "indices" else LayerIds([i + 1 for i in ids], guessed=likely is None)
    notes.append(
        f"its config names the layer ids {ids} in {places}, which no engine reads: they are hidden_states "
        f"indices {ids}, or outputs of blocks and so the indices {[i + 1 for i in ids]}; {chosen.ids} are read; "
        f"{_OVERRIDE}"
    )
    return chosen


def _likely(stored: list[int]) -> Literal["indices", "outputs"] | None:
    """Return what ids number if they are the reference's three, `[2, L // 2, L - 3]`, or one less; else `None`."""
    if stored[0] == 1:
        return "outputs"
    # For the L that the last entry gives.
    return "indices" if len(stored) == 3 and stored[0] == 2 and stored[1] == (stored[2] + 3) // 2 else None


def _checked(ids: Any, key: str, notes: list[str]) -> list[int] | None:
    if ids is None or ids == []:  # ModelOpt writes [] for a head that reads no features
        return None
    integers = isinstance(ids, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not integers or not ids or min(ids) < 0 or len(set(ids)) != len(ids) or len(ids) > 64:
        raise HeadFormatError(
            f"its config's {key} must be distinct layer numbers >= 0, got {ids!r}: load it with target_layer_ids=[...]"
        )
    if sorted(ids) != list(ids):
        notes.append(f"its {key} {list(ids)} are not ascending; features are read from low to high, as engines do")
    return sorted(ids)
