"""Recording: for texts of the target, the pool that a draft head has at every position.

A policy of trees decides at which positions rounds begin, so that the rounds of one run are not enough to evaluate
another policy. So a text is generated without the head first. The target then runs over it once, and the head is fed
as in decoding, one position after the other. At each position it grows the pool of a round that would begin there.
"""

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessorList

from ..decoding.attachments import without_attachment
from ..decoding.coupling import Noise
from ..decoding.draft.candidate import Eagle3Candidate
from ..decoding.draft.growth import CandidatePool
from ..decoding.draft.inputs import DraftInputs
from ..decoding.output.processors import prefix_free_warpers
from ..model.features import FeatureReader
from ..model.tree_settings import TreeSettings
from .pools import EveryWidth, Pool, depths_of, sorted_pool
from .record import Header, RecordedText, RecordWriter


_STEPS_BEHIND = 32  # steps behind the end of a text whose noise is kept, for trees that reach beyond it


def write_record(
    recorder: "TextRecorder",
    prompts: Sequence[tuple[str, torch.Tensor]],
    path: str | os.PathLike,
    names: tuple[str, str] | None = None,
    seed: int = 0,
) -> None:
    """Generate a text behind each prompt, and write a record of all of them.

    Args:
        recorder: The recorder of target and head.
        prompts: For each prompt, the name of its task and its ids (1, P).
        path: Where the record is written.
        names: Names of target and head in the header; `None` for where they were loaded from.
        seed: Seed of the first text; each further one has the next.
    """
    with RecordWriter(path, recorder.header(names)) as writer:
        for number, (task, ids) in enumerate(tqdm(prompts, desc="Recording", unit="text")):
            writer.add(recorder.record(ids, task, seed + number), seed + number)


class TextRecorder:
    """Records texts of one target with one head.

    Args:
        target: The target model.
        draft: The draft head.
        pool_depth: Levels of the pools.
        pool_top_k: Children of each expanded node.
        options: Arguments of `generate`, among them `max_new_tokens`.
    """

    def __init__(self, target, draft, pool_depth: int = 8, pool_top_k: int = 10, **options: Any):
        self.target = target
        self.draft = draft
        self.options = {"do_sample": False, **options}
        self.settings = TreeSettings(pool_top_k + (pool_depth - 1) * pool_top_k**2, pool_depth, pool_top_k)
        self._children = min(pool_top_k, draft.config.draft_vocab_size)
        coupled = getattr(draft.generation_config, "assistant_coupled_sampling", True)
        self._is_coupled = bool(self.options["do_sample"] and coupled)
        if not isinstance(self.options.get("max_new_tokens"), int):
            raise ValueError("a record needs max_new_tokens, the greatest length of a text")

    def header(self, names: tuple[str, str] | None = None) -> Header:
        """Return the header of a record without texts."""
        target, draft = self.target, self.draft
        versions = {name: version(name) for name in ("eagle3-hf", "transformers", "torch")}
        options = {name: value for name, value in self.options.items() if name != "max_new_tokens"}
        target_name, head_name = names or (target.name_or_path, draft.name_or_path)
        return Header(
            target=target_name,
            head=head_name,
            depth=self.settings.depth,
            top_k=self._children,
            max_new_tokens=self.options["max_new_tokens"],
            options=options if self.options["do_sample"] else {},
            draft_vocab_size=draft.config.draft_vocab_size,
            is_coupled=self._is_coupled,
            versions={**versions, "dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type},
        )

    @torch.no_grad()
    def record(self, input_ids: torch.Tensor, task: str = "", seed: int = 0) -> RecordedText:
        """Return a text behind one prompt, with its pools. The default generator is moved as `generate` moves it.

        Args:
            input_ids: (1, P) the prompt, without padding.
            task: Name of the task.
            seed: Seed of the text.
        """
        if len(input_ids) != 1:
            raise ValueError(f"expected one prompt, of shape (1, P), got {tuple(input_ids.shape)}")
        torch.manual_seed(seed)
        ids, warpers = self._generate(input_ids)
        length = input_ids.shape[1]
        features, vocab_size = self._features(ids)
        text = ids[0, length:].tolist()
        noise, known, log_noise = None, None, None
        if self._is_coupled:
            torch.manual_seed(seed)
            noise = Noise(1, vocab_size, ids.device)
            known = torch.unique(ids)
            steps = min(self.options["max_new_tokens"], len(text) + _STEPS_BEHIND)
            log_noise = torch.stack([drawn[0, known] for drawn in noise.peek_at(range(steps))]).log().cpu().numpy()
        return RecordedText.of_pools(
            task,
            input_ids[0].tolist(),
            text,
            self.options["max_new_tokens"],
            self._pools(ids, length, features, warpers, noise),
            None if known is None else known.cpu().numpy(),
            log_noise,
        )

    def _generate(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list]:
        """Return (1, P + T) prompt and text, and the warpers that decoding would apply to the draft's logits."""
        seen: list[LogitsProcessorList] = []

        def plain_decoding(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            seen.append(logits_processor)
            return model._sample(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                **kwargs,
            )

        mask = torch.ones_like(input_ids)
        with without_attachment(self.target):
            ids = self.target.generate(input_ids, attention_mask=mask, custom_generate=plain_decoding, **self.options)
        return ids, list(prefix_free_warpers(seen[0]))

    def _features(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the features (1, P + T - 1, A * Ht) before the last token, and the size of the logits."""
        keep = {"logits_to_keep": 1} if self.target._supports_logits_to_keep() else {}
        with FeatureReader(self.target, self.draft.config.captured_layer_ids) as reader:
            logits = self.target(ids[:, :-1], use_cache=False, **keep).logits
            return reader.take(), logits.shape[-1]

    def _pools(
        self, ids: torch.Tensor, prompt_length: int, features: torch.Tensor, warpers: Sequence, noise: Noise | None
    ) -> list[Pool]:
        """Return the pool of each position of the text from 1 on."""
        candidate = Eagle3Candidate(self.target, self.draft, self.settings, noise, warpers, coupled=self._is_coupled)
        pools = []
        fed = 0
        for end in range(prompt_length, ids.shape[1] - 1):
            step = end - prompt_length + 1
            inputs = DraftInputs(features[:, fed:end], ids[:, fed + 1 : end + 1])
            fed = end
            candidate.feed_later(inputs)
            pool = candidate.draft_pool(self.settings, [step], expansion=EveryWidth(self._children))
            pools.append(_on_host(pool, step, noise))
        return pools


def _on_host(pool: CandidatePool, step: int, noise: Noise | None) -> Pool:
    """Return a pool on the host, best first.

    Args:
        pool: The pool of one sequence.
        step: The step that chooses among the children of the root.
        noise: The noise by which the pool is ranked, or `None`.
    """
    joined = [part[0] for part in pool.joined()]
    tokens, parents = torch.stack(joined[:2]).cpu().numpy()
    scores, log_probs = torch.stack(joined[2:]).cpu().numpy()
    scores = np.nan_to_num(scores, nan=-np.inf, neginf=-np.inf)
    return sorted_pool(
        tokens, parents, scores, None if noise is None else _log_z(tokens, parents, scores, log_probs, step, noise)
    )


def _log_z(
    tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, log_probs: np.ndarray, step: int, noise: Noise
) -> np.ndarray:
    """Return (M + 1,) `log_z` of the root and of each node (see [`Pool`]); NaN where there are no children.

    The increment of a node is `log q - log e - log Z`, and `log q` that of its log-probability, so that each node's
    best child tells its Z.
    """
    above, first = np.unique(parents, return_index=True)
    depths = depths_of(parents)[first]
    drawn = noise.peek_at([step + level for level in range(int(depths.max()))])
    log_noise = torch.stack([drawn[d - 1][0, token] for d, token in zip(depths, tokens[first].tolist(), strict=True)])
    log_z = np.full(len(tokens) + 1, np.nan, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # excluded candidates
        increments = _differences(scores, parents)[first]
        log_z[above + 1] = _differences(log_probs, parents)[first] - log_noise.log().cpu().numpy() - increments
    return log_z


def _differences(sums: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Return by how much the sum of each node differs from its parent's."""
    return sums - np.where(parents < 0, np.float32(0), sums[parents])
