"""The config fields about the target's features: which layers a head reads, and how wide its target is."""

from typing import Any

from .detection import reads_no_features
from .errors import HeadFormatError
from .head_file import HeadFile
from .layer_ids import LayerIds


_DEFAULT_COUNT = 3  # layers that a head reads whose config does not say how many


def feature_fields(head: HeadFile, layer_ids: LayerIds, hidden: int) -> dict[str, Any]:
    """Return the target's width and layer ids, checked against the width of `fc`.

    Args:
        head: The published head.
        layer_ids: What its config says about the layers.
        hidden: The width of the head.

    Raises:
        HeadFormatError: `fc` does not fit the number of layers and the target's width.
    """
    stated_hidden = head.config.get("target_hidden_size")
    target_hidden = hidden if stated_hidden is None else head.positive("target_hidden_size")
    if reads_no_features(head.config):
        return _last_state_only(head, hidden, target_hidden)
    width = head.matrix("fc.weight")[1]
    stated = _stated_count(head, layer_ids)
    count = stated or _DEFAULT_COUNT
    if stated_hidden is None and _is_target_of_another_width(head, width, stated, hidden):
        target_hidden = width // count
    if width != count * target_hidden:
        raise HeadFormatError(_unexpected_width(head, width, stated, target_hidden))
    return {
        "target_hidden_size": target_hidden,
        "target_layer_ids": layer_ids.ids,
        "guessed_layer_ids": layer_ids.guessed,
    }


def _last_state_only(head: HeadFile, hidden: int, target_hidden: int) -> dict[str, Any]:
    if head.has("fc.weight"):
        raise HeadFormatError(
            "its config says `use_aux_hidden_state: false`, but it has an fc.weight to fuse features"
        )
    if hidden != target_hidden:
        raise HeadFormatError(f"a head of width {hidden} without `fc` cannot read states of width {target_hidden}")
    return {"use_aux_hidden_state": False, "target_hidden_size": hidden, "target_layer_ids": None}


def _stated_count(head: HeadFile, layer_ids: LayerIds) -> int | None:
    """Return how many layers the file says that the head reads; `None` when it does not say so."""
    ids = layer_ids.ids
    stated = None if head.config.get("num_aux_hidden_states") is None else head.positive("num_aux_hidden_states")
    if isinstance(ids, (list, tuple)) and stated not in (None, len(ids)):
        raise HeadFormatError(f"its config says num_aux_hidden_states {stated}, but names the layers {list(ids)}")
    if ids is None and stated not in (None, _DEFAULT_COUNT):
        raise HeadFormatError(
            f"its config says num_aux_hidden_states {stated}, but not which layers; load it with "
            "target_layer_ids=[...]"
        )
    return stated or (len(ids) if isinstance(ids, (list, tuple)) else None)


def _is_target_of_another_width(head: HeadFile, width: int, stated: int | None, hidden: int) -> bool:
    """Whether the target is wider or narrower than the head, which a published config may leave out.

    Only a head with its own embedding can have such a target. If `fc` reads whole layers of the head's own width, and
    the named layers would not be whole multiples of it, their number is what is wrong.
    """
    count = stated or _DEFAULT_COUNT
    if not head.has("embed_tokens.weight") or width % count:
        return False
    return stated is not None and (width % hidden != 0 or width // count % hidden == 0)


def _unexpected_width(head: HeadFile, width: int, stated: int | None, target_hidden: int) -> str:
    fc, count = head.names.show("fc.weight"), stated or _DEFAULT_COUNT
    given = f"{fc} reads {width} features, but {count} layers of a target of width {target_hidden} give "
    given += f"{count * target_hidden}"
    if stated is not None and width % target_hidden == 0:
        return (
            f"{given}: fc is made for {width // target_hidden} layers, its config (or target_layer_ids) names "
            f"{stated}; load it with target_layer_ids=[...] of {width // target_hidden} numbers"
        )
    return (
        f"{given}: this is not an EAGLE-3 head (an EAGLE-1/2 head reads one layer), or "
        "target_hidden_size or its layer ids (eagle_aux_hidden_state_layer_ids) are missing from its config; load "
        "it with target_hidden_size= or target_layer_ids=[...]"
    )
