"""`diagnose`: why few drafts of a head are accepted on some chats, and what to do about it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...acceptance import SpeculationStats
from ...decoding.assistants import as_draft
from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.tree_settings import TreeSettings, measured_alone, tree_settings
from ...training.data.options import EncodingOptions
from ..misses import Cause
from ..statistics import Interval, ratio_interval
from .calibration import calibration
from .collect import Collector, TextEvidence
from .findings import Evidence, conclusion, findings
from .record import check_record
from .result import Diagnosis, Group, Precision
from .sampling import mean_shares
from .sweep import TriedSetting, judge
from .texts import TrueText, load_texts, own_answers
from .vocabulary import check_map, coverage


TEMPERATURES = (0.0, 0.5, 1.0)
_LENGTHS = (128, 512, 2048)  # of prompts, in tokens: ends of the groups


def diagnose(
    target: PreTrainedModel,
    draft: Any,
    data: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    chats: int | None = 24,
    max_length: int = 1024,
    answers: str = "given",
    max_new_tokens: int = 128,
    rounds: int = 400,
    depth: int = 4,
    temperatures: Sequence[float] = TEMPERATURES,
    sweep: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Diagnosis:
    """Diagnose a head on its target.

    The target runs once over each chat, which tells what it would choose at every position of the answers. The head is
    asked at all of these positions, and drafts trees in rounds along the text, without lookup, of the size that is set
    on it, or else of 11/3/4 (nodes/levels/children) on a CPU and 59/8/10 elsewhere. Nothing of target and head is
    changed.

    Args:
        target: The target.
        draft: The head, which may have adapters.
        data: Chats: whatever [`load_chats`] takes, or such sources by the name of their task. Best are chats whose
            answers the target wrote, of the kind that it is used for.
        tokenizer: The target's tokenizer.
        split: Split of the data.
        chats: Number of chats of each task, chosen at random; `None` for all.
        max_length: Tokens that are kept of each chat.
        answers: "given" for the answers of the data; "own" lets the target answer (greedily) first.
        max_new_tokens: Length of its own answers.
        rounds: Number of rounds to simulate, over all texts.
        depth: Number of depths at which the head is asked.
        temperatures: Temperatures of acceptance in sampling.
        sweep: Whether to try other layer ids and rope bases.
        template_kwargs: Variables for the chat template.
        seed: Seed of the choice of chats.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: the draft is no head.
        ValueError: an argument is invalid, the head does not fit the target, or no chat has an answer.
    """
    if answers not in ("given", "own"):
        raise ValueError(f'answers must be "given" or "own", got {answers!r}')
    head = as_draft(draft)
    if not isinstance(head, Eagle3DraftModel):
        raise TypeError(
            f"draft must be an Eagle3DraftModel, got a {type(draft).__name__}: only heads can be diagnosed"
        )
    for name, number in {"rounds": rounds, "depth": depth, "max_new_tokens": max_new_tokens}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    head.check_target(target)
    texts = load_texts(data, tokenizer, EncodingOptions(max_length, template_kwargs), split, chats, seed)
    if answers == "own":
        texts = [own_answers(text, target, max_new_tokens) for text in texts]
        texts = [text for text in texts if text.is_answer.any()]
        if not texts:
            raise ValueError("the target ends each of its answers at once: nothing is left to draft")
    with measured_alone(head, target):
        collector = Collector(target, head, tree_settings(head, target), depth, temperatures, sweep)
        seen = _collect(collector, texts, rounds, progress)
    return _result(collector, seen, check_record(head.config, tokenizer), answers == "own", _decode(tokenizer))


def _collect(collector: Collector, texts: list[TrueText], rounds: int, progress: bool) -> list[TextEvidence]:
    seen: list[TextEvidence] = []
    for number, text in enumerate(tqdm(texts, desc="Diagnosis", unit="chat", disable=not progress)):
        left = rounds - sum(each.rounds.stats.rounds for each in seen)
        seen.append(collector.collect(text, -(-left // (len(texts) - number))))
    return seen


def _decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    return lambda token: str(tokenizer.decode([token]))


def _result(
    collector: Collector, seen: list[TextEvidence], record: Any, own: bool, decode: Callable[[int], str]
) -> Diagnosis:
    draft = collector.draft
    choices = _joined(each.depths[0].choices for each in seen)
    next_tokens = _joined(each.next_tokens for each in seen)
    covered = coverage(choices, next_tokens, draft.t2d.cpu().numpy())
    mapped = check_map(
        [each.exact[0].first.numpy() for each in seen],
        [each.exact[0].first_token.numpy() for each in seen],
        [each.exact[0].choices.numpy() for each in seen],
        [each.last_tokens for each in seen],
    )
    tried = _tried(collector, seen)
    precision = _precision(collector, seen)
    exact = _accuracies([each.exact for each in seen])
    causes = {cause: sum(each.rounds.causes[cause] for each in seen) for cause in Cause}
    found = findings(
        Evidence(
            precision.not_finite,
            (precision.dtype, precision.target_dtype),
            exact,
            covered,
            mapped,
            record,
            tried,
            causes,
        )
    )
    probabilities = _joined(each.depths[0].probability for each in seen)
    hits = _joined(each.depths[0].hits for each in seen)
    stats = SpeculationStats.total(each.rounds.stats for each in seen)
    return Diagnosis(
        target=_name(collector.target),
        head=_name(draft),
        own_answers=own,
        texts=len(seen),
        positions=len(choices),
        agreement=float((choices == next_tokens).mean()),
        tree=_tree_in_words(collector.tree),
        stats=stats,
        misses=sum(each.rounds.misses for each in seen),
        causes=causes,
        accuracy_by_depth=_accuracies([each.depths for each in seen]),
        coverage=covered,
        map_check=mapped,
        record=record,
        sweep=tried,
        precision=precision,
        by_task=_groups({each.text.task: None for each in seen}, seen, lambda each: each.text.task),
        by_prompt_length=_groups(dict.fromkeys(_length_names()), seen, lambda each: _length_name(each.text)),
        by_temperature=mean_shares(
            collector.temperatures, torch.stack([each.shares for each in seen]).sum(0), len(choices)
        ),
        calibration=calibration(np.nan_to_num(probabilities), hits),
        findings=found,
        conclusion=conclusion(found, causes, stats.rounds),
        missing_words=[decode(token) for token, _ in covered.missing],
    )


def _tried(collector: Collector, seen: list[TextEvidence]) -> list[TriedSetting]:
    present = [each.exact[0].hits.numpy() for each in seen]
    others = [(setting, [each.hits[index] for each in seen]) for index, setting in enumerate(collector.settings)]
    return judge(present, others)


def _precision(collector: Collector, seen: list[TextEvidence]) -> Precision:
    finite = _joined(depth.is_finite for each in seen for depth in each.depths)
    return Precision(
        _dtype(collector.draft),
        _dtype(collector.target),
        float(1 - finite.mean()),
        _accuracies([each.depths for each in seen])[0],
        _accuracies([each.exact for each in seen])[0] if collector.has_twin else None,
    )


def _accuracies(readings: Sequence[Sequence[Any]]) -> list[float]:
    """Return the share of hits at each depth at which the head was asked at all."""
    by_depth = [_joined(depth.hits for depth in depths) for depths in zip(*readings, strict=True)]
    return [float(hits.mean()) for hits in by_depth if len(hits)]


def _groups(names: Mapping[str, Any], seen: list[TextEvidence], name_of: Callable[[TextEvidence], str]) -> list[Group]:
    groups = []
    for name in names:
        own = [each for each in seen if name_of(each) == name]
        if own:
            hits = _joined(each.depths[0].hits for each in own)
            groups.append(Group(name, len(own), len(hits), float(hits.mean()), _tau(own)))
    return groups


def _tau(seen: list[TextEvidence]) -> Interval | None:
    stats = [each.rounds.stats for each in seen if each.rounds.stats.rounds]
    if not stats:
        return None
    return ratio_interval([[each.emitted for each in stats]], [[each.rounds for each in stats]])


def _length_names() -> list[str]:
    begins = [0, *_LENGTHS]
    return [f"{low} to {high - 1}" for low, high in zip(begins, _LENGTHS, strict=False)] + [f"{_LENGTHS[-1]} or more"]


def _length_name(text: TrueText) -> str:
    return _length_names()[int(np.searchsorted(_LENGTHS, text.roots[0], side="right"))]


def _name(model: PreTrainedModel) -> str:
    """Return where a model was loaded from, of a local folder its name alone."""
    place = model.name_or_path or type(model).__name__
    return Path(place).resolve().name if Path(place).is_dir() else place


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _tree_in_words(tree: TreeSettings) -> str:
    return f"{tree.num_nodes}/{tree.depth}/{tree.top_k}"


def _joined(parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


__all__ = ["TEMPERATURES", "diagnose"]
