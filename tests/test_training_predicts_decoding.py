"""Training predicts decoding, round by round.

On a text that the target decoded greedily, the training forward knows for every row and step whether the draft would
have been right. Replaying decoding from these hits (leave the text at a row, accept while right, jump to where the
round ends) must give the very sequence of accepted lengths that `generate` has with a chain. A head that is neither
useless nor perfect shows it: with either, any bookkeeping would agree.
"""

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.acceptance import SpeculationStats
from eagle3_hf.training.data import Eagle3DataCollator
from eagle3_hf.training.teacher import Teacher
from eagle3_hf.ttt.loss import IGNORE_INDEX, Supervision, supervised_mask
from families import prompt, tiny


STEPS = 5
PROMPT_LENGTHS = [5, 9, 14, 20]
NEW_TOKENS = 48


def greedy_texts(target) -> list[torch.Tensor]:
    prompts = [prompt(length, seed=length) for length in PROMPT_LENGTHS]
    return [target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False) for ids in prompts]


def labels_of(text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """The target wrote everything from `prompt_length` on; all but the first of it is to be learnt."""
    labels = text.clone()
    labels[:, : prompt_length + 1] = IGNORE_INDEX
    return labels


def new_draft(target, texts: list[torch.Tensor], **overrides) -> Eagle3DraftModel:
    """A head whose vocabulary lacks some of the words, so that some choices cannot be drafted at all."""
    words = torch.cat([text[0] for text in texts]).unique()
    torch.manual_seed(0)
    assert (words % 9 == 0).any()
    return Eagle3DraftModel.from_target(target, draft_vocab=words[words % 9 != 0], **overrides)


def hits(draft, target, text: torch.Tensor, prompt_length: int) -> list[dict[int, bool]]:
    """Of every step: row -> whether the draft's first choice there is the target's."""
    labels = labels_of(text, prompt_length)
    mask = supervised_mask(labels)
    taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(
        {"input_ids": text, "labels": labels}
    )
    supervision = Supervision.build(mask, taught["teacher_logits"], taught["teacher_in_vocab"])
    with torch.no_grad():
        steps = draft.training_time_test(text, taught["features"], supervision, STEPS)
    u = mask[0].nonzero()[:, 0]
    return [
        {int(u[entry]) - step: bool(hit) for entry, hit in zip(result.entries, result.hits, strict=True)}
        for step, result in enumerate(steps)
    ]


def replay(hits: list[dict[int, bool]], prompt_length: int, length: int) -> list[int]:
    """Accepted drafts of every round, from the training forward alone."""
    accepted, committed = [], prompt_length + 1  # the prefill gives the first token
    while committed < length:
        row, depth = committed - 2, 0  # the newest row that has the target's feature
        # A round always adds the target's own next token, so the last token of a text is never drafted.
        while depth < min(STEPS, length - committed - 1) and hits[depth][row]:
            depth += 1
        accepted.append(depth)
        committed += depth + 1
    return accepted


def predicted(draft, target, texts: list[torch.Tensor]) -> list[int]:
    """The replayed rounds of all texts."""
    return [
        accepted
        for text, length in zip(texts, PROMPT_LENGTHS, strict=True)
        for accepted in replay(hits(draft, target, text, length), length, text.shape[1])
    ]


def half_trained(target, texts: list[torch.Tensor], **overrides) -> Eagle3DraftModel:
    """Train until about two drafts a round would be accepted, going by the training forward."""
    draft = new_draft(target, texts, **overrides)
    rows = [
        {"input_ids": text[0], "labels": labels_of(text, length)[0]}
        for text, length in zip(texts, PROMPT_LENGTHS, strict=True)
    ]
    batch = Eagle3DataCollator(pad_token_id=0)(rows)
    batch.update(Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(150):
        if step % 5 == 0:
            rounds = predicted(draft, target, texts)
            if sum(rounds) > 1.4 * len(rounds):
                return draft
        draft(**batch, ttt_steps=STEPS).loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    pytest.fail(f"the head learnt too little: {sum(rounds) / len(rounds):.2f} accepted a round")


LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
HEADS = {
    "latent": LATENT,
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 6},
    "latent with a window": {**LATENT, "layer_types": ["sliding_attention"], "sliding_window": 3},
    "final output alone": {"use_aux_hidden_state": False},
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [(family, {}) for family in ("llama", "qwen3", "mistral_sw", "gemma3", "olmo2")]
    + [("llama", overrides) for overrides in HEADS.values()],
    ids=["llama", "qwen3", "mistral_sw", "gemma3", "olmo2", *(f"llama, {name}" for name in HEADS)],
)
def test_accepted_lengths_are_those_that_training_predicts(family, overrides, monkeypatch):
    target = tiny(family)
    texts = greedy_texts(target)
    draft = half_trained(target, texts, **overrides)
    draft.generation_config.num_assistant_tokens = STEPS
    draft.generation_config.assistant_tree_depth = STEPS
    draft.generation_config.assistant_tree_top_k = 1

    rounds: list[int] = []
    record = SpeculationStats.record

    def recording(stats, accepted, depth, emitted):
        rounds.append(accepted)
        record(stats, accepted, depth, emitted)

    monkeypatch.setattr(SpeculationStats, "record", recording)
    everything = []
    for text, length in zip(texts, PROMPT_LENGTHS, strict=True):
        rounds.clear()
        ids = target.generate(text[:, :length], assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(ids, text)
        assert rounds == replay(hits(draft, target, text, length), length, text.shape[1])
        everything += rounds
    mean = sum(everything) / len(everything)
    assert 1 < mean < 3
    assert set(everything) == set(range(STEPS + 1))  # rounds of every length occur
