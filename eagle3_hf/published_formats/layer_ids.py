"""Which layers of the target a file means: two conventions are in use, and no file says which one it follows.

Ours is the index into `hidden_states` (the state that enters a block: SafeAILab, speculators, vLLM). SpecForge,
ModelOpt, AngelSlim, TorchSpec and SGLang number the *outputs* of blocks, one less. Top-level ids are vLLM's, nested
ones SGLang's; nested ones of some heads are indices all the same, and configs that were rearranged by hand have the
same numbers at both places. One layer off costs most of the acceptance.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .errors import HeadFormatError


KEY = "eagle_aux_hidden_state_layer_ids"
_OVERRIDE = "load it with target_layer_ids=[...] (hidden_states indices) to settle it"
# Other names of trainers and engines: target_hidden_layer_ids, aux_hidden_state_layer_ids, aux_layer_ids,
# eagle3_layers_to_capture, target_layer_ids and so on.
_NAMES_LAYERS = re.compile(
    r"^layer_ids$|^(?=.*layer)(?!.*(vision|image|video|audio|type)).*(aux|captur|eagle|target|hidden_state|feature)"
)
_NUMBERS = re.compile(r"[\[(\s]*\d+(\s*,\s*\d+)*[\])\s]*")
# Written by our exports alone, whose top-level ids are indices for certain.
_OURS = "target_num_hidden_layers"
_DEEPEST = 4  # levels at which ids have been seen: two


class LayerIds(NamedTuple):
    """`hidden_states` indices, ascending; `None` when the file names none. `guessed`: the convention was assumed."""

    ids: list[int] | None
    guessed: bool = False


class _Named(NamedTuple):
    """Ids at one place of a config, and what they count there by custom; `None` for keys without one."""

    place: str
    ids: list[int]
    counts: Literal["indices", "outputs"] | None


def names_layers(key: str, value: Any) -> bool:
    """Whether a config key says which layers of the target a head reads."""
    if not isinstance(key, str) or (key != KEY and not _NAMES_LAYERS.search(key)):
        return False
    if isinstance(value, str):
        return _NUMBERS.fullmatch(value) is not None
    return isinstance(value, (list, tuple)) and any(type(i) is int for i in value)


def layer_ids(config: dict[str, Any], is_speculators: bool, notes: list[str]) -> LayerIds:
    """The ids of a published config.

    Args:
        config: As published.
        is_speculators: Whether the config is nested as speculators writes it.
        notes: What was assumed is appended.

    Raises:
        HeadFormatError: no list of distinct integers, or ids at several places that disagree.
    """
    named = list(_named(config, "", is_speculators, notes, _DEEPEST))
    if not named:
        return LayerIds(None)
    low, high = min(n.ids for n in named), max(n.ids for n in named)
    if low != high:
        _check_one_apart(named, low, high)
        return LayerIds(high)
    customs = {n.counts for n in named}
    if "indices" in customs and _OURS in config:
        return LayerIds(low)
    if customs == {"indices"}:
        if low[0] == 1:
            notes.append(_begins_with_one(low, is_speculators))
        return LayerIds(low)
    if "indices" in customs:
        return _same_everywhere(named, is_speculators, notes)
    return _outputs(named, notes) if "outputs" in customs else _under_other_keys(named, notes)


def _named(
    config: dict[str, Any], prefix: str, is_speculators: bool, notes: list[str], levels: int
) -> Iterator[_Named]:
    """Every place of a config that names layers, the top level first."""
    for key, value in config.items():
        place = f"{prefix}{key}"
        exact = key == KEY or place == "eagle_config.layer_ids"
        if (exact and value is not None) or names_layers(key, value):
            ids = _checked(value, place, notes)
            if ids is not None:
                yield _Named(place, ids, _custom(place, is_speculators))
    for key, value in config.items():
        if isinstance(value, dict) and levels > 1:
            yield from _named(value, f"{prefix}{key}.", is_speculators, notes, levels - 1)


def _custom(place: str, is_speculators: bool) -> Literal["indices", "outputs"] | None:
    if place in (KEY, f"transformer_layer_config.{KEY}", "eagle_config.layer_ids"):
        return "indices"
    if is_speculators and place == "aux_hidden_state_layer_ids":
        return "indices"
    return "outputs" if place == f"eagle_config.{KEY}" else None


def _check_one_apart(named: list[_Named], low: list[int], high: list[int]) -> None:
    """Two lists are the same layers if the larger numbers are indices and the smaller ones outputs of blocks."""
    fits = low == [i - 1 for i in high] and all(n.ids in (low, high) for n in named)
    if not fits or any(n.ids == low and n.counts == "indices" for n in named):
        found = ", ".join(f"{n.ids} in {n.place}" + (f" ({_MEANING[n.counts]})" if n.counts else "") for n in named)
        raise HeadFormatError(f"its config names layer ids that are not the same layers: {found}: {_OVERRIDE}")


_MEANING = {"indices": "hidden_states indices", "outputs": "outputs of blocks, one less"}


def _begins_with_one(ids: list[int], is_speculators: bool) -> str:
    others = "speculators' own begin" if is_speculators else f"hidden_states indices, which vLLM reads in {KEY}, begin"
    return (
        f"its layer ids {ids} begin with 1 where {others} with 2: a converted head may be one layer low; if it "
        f"accepts little, try target_layer_ids={[i + 1 for i in ids]}"
    )


def _outputs(named: list[_Named], notes: list[str]) -> LayerIds:
    """Ids where SGLang reads them: outputs of blocks, but for heads of trainers that write indices there."""
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
    """The same numbers where they count indices and where they do not: one of the places was copied unchanged.

    Mostly that is the top level, where a trainer's numbers of blocks were lifted to.
    """
    ids, places = named[0].ids, " and ".join(n.place for n in named)
    chosen = LayerIds(ids) if is_speculators or _likely(ids) == "indices" else LayerIds([i + 1 for i in ids], True)
    notes.append(
        f"its config names the layer ids {ids} in {places}, which do not count alike: they are hidden_states indices "
        f"{ids}, or outputs of blocks and so the indices {[i + 1 for i in ids]}; {chosen.ids} are read; {_OVERRIDE}"
    )
    return chosen


def _under_other_keys(named: list[_Named], notes: list[str]) -> LayerIds:
    ids, places = named[0].ids, " and ".join(n.place for n in named)
    likely = _likely(ids)
    chosen = LayerIds(ids) if likely == "indices" else LayerIds([i + 1 for i in ids], guessed=likely is None)
    notes.append(
        f"its config names the layer ids {ids} in {places}, which is not where engines look: they are hidden_states "
        f"indices {ids}, or outputs of blocks and so the indices {[i + 1 for i in ids]}; {chosen.ids} are read; "
        f"{_OVERRIDE}"
    )
    return chosen


def _likely(stored: list[int]) -> Literal["indices", "outputs"] | None:
    """What ids count, where they show it: the reference's three, `[2, L // 2, L - 3]`, or one less."""
    if stored[0] == 1:
        return "outputs"
    # For the L that the last entry gives.
    return "indices" if len(stored) == 3 and stored[0] == 2 and stored[1] == (stored[2] + 3) // 2 else None


def _checked(ids: Any, key: str, notes: list[str]) -> list[int] | None:
    if ids is None or ids == []:  # ModelOpt's word for "none" where a head reads no features
        return None
    integers = isinstance(ids, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not integers or not ids or min(ids) < 0 or len(set(ids)) != len(ids) or len(ids) > 64:
        raise HeadFormatError(
            f"its config's {key} must be distinct layer numbers >= 0, got {ids!r}: load it with target_layer_ids=[...]"
        )
    if sorted(ids) != list(ids):
        notes.append(f"its {key} {list(ids)} are not ascending; features are read from low to high, as engines do")
    return sorted(ids)
