"""Which layers of the target a file means: two conventions are in use, and no file says which one it follows.

Ours is the index into `hidden_states` (the state that enters a block: SafeAILab, speculators, vLLM). SpecForge,
ModelOpt, AngelSlim, TorchSpec and SGLang number the *outputs* of blocks, one less. Top-level ids are vLLM's, nested
ones SGLang's; nested ones of some heads are indices all the same. One layer off costs most of the acceptance.
"""

from typing import Any, NamedTuple

from .errors import HeadFormatError


KEY = "eagle_aux_hidden_state_layer_ids"
_OVERRIDE = "load it with target_layer_ids=[...] (hidden_states indices) to settle it"


class LayerIds(NamedTuple):
    """`hidden_states` indices, ascending; `None` when the file names none. `guessed`: the convention was assumed."""

    ids: list[int] | None
    guessed: bool = False


def layer_ids(config: dict[str, Any], is_speculators: bool, notes: list[str]) -> LayerIds:
    """The ids of a published config.

    Args:
        config: As published.
        is_speculators: Whether the config is nested as speculators writes it.
        notes: What was assumed is appended.

    Raises:
        HeadFormatError: no list of distinct integers, or top-level and nested ids that disagree.
    """
    eagle = config.get("eagle_config") or {}
    indices = _checked(config.get(KEY), KEY, notes)
    if indices is None:
        indices = _checked(eagle.get("layer_ids"), "eagle_config.layer_ids", notes)
    nested = _checked(eagle.get(KEY), f"eagle_config.{KEY}", notes)
    if indices is not None:
        _check_agreement(indices, nested)
        if is_speculators and indices[0] == 1:
            notes.append(
                f"its layer ids {indices} begin with 1 where speculators' own begin with 2: a converted head may be "
                f"one layer low; if it accepts little, try target_layer_ids={[i + 1 for i in indices]}"
            )
        return LayerIds(indices)
    return LayerIds(None) if nested is None else _nested(nested, notes)


def _nested(stored: list[int], notes: list[str]) -> LayerIds:
    outputs = [i + 1 for i in stored]
    if stored[0] == 1:
        return LayerIds(outputs)
    if len(stored) == 3 and stored[0] == 2 and stored[1] == (stored[2] + 3) // 2:
        return LayerIds(stored)  # the reference's [2, L // 2, L - 3] for the L that its last entry gives
    notes.append(
        f"its layer ids {stored} do not say whether they number the outputs of blocks or hidden_states; outputs are "
        f"assumed, so hidden_states indices {outputs} are read; {_OVERRIDE}"
    )
    return LayerIds(outputs, guessed=True)


def _check_agreement(indices: list[int], nested: list[int] | None) -> None:
    # Some targets of SGLang take indices as well: equal ids are no contradiction.
    if nested not in (None, indices, [i - 1 for i in indices]):
        raise HeadFormatError(
            f"its config names layer ids {indices} at the top (hidden_states indices) and {nested} in eagle_config "
            f"(outputs of blocks, one less), which are not the same layers: {_OVERRIDE}"
        )


def _checked(ids: Any, key: str, notes: list[str]) -> list[int] | None:
    if ids is None or ids == []:  # ModelOpt's word for "none" where a head reads no features
        return None
    integers = isinstance(ids, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not integers or not ids or min(ids) < 0 or len(set(ids)) != len(ids) or len(ids) > 64:
        raise HeadFormatError(f"its config's {key} must be distinct layer numbers >= 0, got {ids!r}")
    if sorted(ids) != list(ids):
        notes.append(f"its {key} {list(ids)} are not ascending; features are read from low to high, as engines do")
    return sorted(ids)
