"""Training predicts decoding, round by round.

On a text that the target decoded greedily, the training forward knows for every row and step whether the draft would
have been right. Replaying decoding from these hits (leave the text at a row, accept while right, jump to where the
round ends) must give the very sequence of accepted lengths that `generate` has with a chain. A head that is neither
useless nor perfect shows it: with either, any bookkeeping would agree.
"""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from eagle3_hf import Eagle3DraftModel, export_head
from eagle3_hf.acceptance import SpeculationStats
from eagle3_hf.training.data.encoding import Eagle3DataCollator
from eagle3_hf.training.data.packing import pack_examples
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.loss import IGNORE_INDEX, Supervision, supervised_mask
from eagle3_hf.ttt.settings import TTTSettings
from support.families import prompt, tiny


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


def rows_of(texts: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": text[0], "labels": labels_of(text, length)[0]}
        for text, length in zip(texts, PROMPT_LENGTHS, strict=True)
    ]


def hits_in(draft, target, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, list[dict[int, bool]]]]:
    """Of every text in a batch of one row: its ids, and of every step: row -> whether the draft's first choice is the
    target's."""
    mask = supervised_mask(batch["labels"])
    taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)
    positions = batch.get("position_ids")
    supervision = Supervision.build(mask, taught["teacher_logits"], taught["teacher_in_vocab"], positions)
    with torch.no_grad():
        steps = draft.training_time_test(batch["input_ids"], taught["features"], supervision, TTTSettings(STEPS))
    u = mask[0].nonzero()[:, 0]
    starts = [0] if positions is None else (positions[0] == 0).nonzero()[:, 0].tolist()
    found = []
    for start, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
        places = [
            {int(u[entry]) - step: bool(hit) for entry, hit in zip(result.entries, result.hits, strict=True)}
            for step, result in enumerate(steps)
        ]
        own = [{row - start: hit for row, hit in step.items() if start <= row < end} for step in places]
        found.append((batch["input_ids"][:, start:end], own))
    return found


def hits(draft, target, text: torch.Tensor, prompt_length: int) -> list[dict[int, bool]]:
    """The same for one text alone."""
    return hits_in(draft, target, {"input_ids": text, "labels": labels_of(text, prompt_length)})[0][1]


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
    batch = Eagle3DataCollator(pad_token_id=0)(rows_of(texts))
    batch.update(Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(150):
        if step % 10 == 0:
            rounds = predicted(draft, target, texts)
            if sum(rounds) > 1.4 * len(rounds):
                return draft
        draft(**batch, settings=TTTSettings(STEPS)).loss.backward()
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


@pytest.fixture(scope="module")
def trained():
    """A target, its texts and a head that is neither useless nor perfect; with all fields an engine can express."""
    return half_trained_for("llama")


def half_trained_for(family: str, **overrides) -> tuple:
    target = tiny(family, num_hidden_layers=4)
    texts = greedy_texts(target)
    return target, texts, half_trained(target, texts, **overrides)


def test_accepted_lengths_are_those_that_training_predicts(trained, monkeypatch):
    assert_decodes_as_predicted(*trained, monkeypatch)


@pytest.mark.parametrize(
    "family", ["mistral_sw", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "olmo2"))]
)
def test_so_do_those_of_other_families(family, monkeypatch):
    assert_decodes_as_predicted(*half_trained_for(family), monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "latent" else ()) for name in HEADS]
)
def test_so_do_those_of_other_heads(name, monkeypatch):
    assert_decodes_as_predicted(*half_trained_for("llama", **HEADS[name]), monkeypatch)


def assert_decodes_as_predicted(target, texts, draft, monkeypatch) -> None:
    everything = []
    for text, length, rounds in zip(texts, PROMPT_LENGTHS, decoded(draft, target, texts, monkeypatch), strict=True):
        assert rounds == replay(hits(draft, target, text, length), length, text.shape[1])
        everything += rounds
    mean = sum(everything) / len(everything)
    assert 1 < mean < 3
    assert set(everything) == set(range(STEPS + 1))  # rounds of every length occur


def decoded(draft, target, texts: list[torch.Tensor], monkeypatch) -> list[list[int]]:
    """Accepted drafts of every round of every text, decoded with a chain."""
    config = draft.generation_config
    config.num_assistant_tokens = config.assistant_tree_depth = STEPS
    config.assistant_tree_top_k = 1
    config.assistant_lookup = False
    rounds: list[int] = []
    record = SpeculationStats.record

    def recording(stats, accepted, depth, emitted):
        rounds.append(accepted)
        record(stats, accepted, depth, emitted)

    monkeypatch.setattr(SpeculationStats, "record", recording)
    found = []
    for text, length in zip(texts, PROMPT_LENGTHS, strict=True):
        rounds.clear()
        ids = target.generate(text[:, :length], assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(ids, text)
        found.append([*rounds])
    return found


# ----- the same from other places ------------------------------------------------------------------------------------


def batches(target, draft, texts: list[torch.Tensor], source: str, folder) -> list[dict[str, torch.Tensor]]:
    """What training would see: from stored features or not, packed into one row or one text a batch."""
    rows: Any = rows_of(texts)
    if "stored" in source:
        write_features(
            target, rows, folder, draft.config.target_layer_ids, dtype=torch.float32, shard_size=3, progress=False
        )
        rows = [*StoredFeatures(folder)]
    collate = Eagle3DataCollator(pad_token_id=0)
    if "packed" in source:
        return [collate(pack_examples(rows, sum(text.shape[1] for text in texts)))]
    return [collate([row]) for row in rows]


@pytest.mark.parametrize("source", ["packed", "stored", "stored, packed"])
def test_also_packed_and_from_stored_features(trained, tmp_path, monkeypatch, source):
    target, texts, draft = trained
    rounds = decoded(draft, target, texts, monkeypatch)
    seen = [
        part for batch in batches(target, draft, texts, source, tmp_path) for part in hits_in(draft, target, batch)
    ]
    assert len(seen) == len(texts)
    for ids, steps in seen:
        i = next(i for i, text in enumerate(texts) if torch.equal(text, ids))
        assert rounds[i] == replay(steps, PROMPT_LENGTHS[i], ids.shape[1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("merged", [False, True])
def test_also_with_adapters(trained, monkeypatch, merged):
    """Adapters change what the head says, in training and in decoding alike; so does merging them in."""
    target, texts, draft = trained
    plain = decoded(draft, target, texts, monkeypatch)
    torch.manual_seed(0)
    model = get_peft_model(
        copy.deepcopy(draft).bind(target), LoraConfig(r=4, target_modules=["q_proj", "fc", "o_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    head = model.merge_and_unload() if merged else model
    rounds = decoded(head, target, texts, monkeypatch)
    assert rounds != plain
    assert sum(map(sum, rounds)) > 0
    body = head if merged else head.get_base_model()
    for text, length, accepted in zip(texts, PROMPT_LENGTHS, rounds, strict=True):
        assert accepted == replay(hits(body, target, text, length), length, text.shape[1])


@pytest.mark.parametrize("to", ["eagle3-hf", "vllm", "sglang", "speculators"])
def test_also_after_export_and_reload(trained, tmp_path, monkeypatch, to):
    """What was predicted before a head was written for an engine is what the file read back decodes."""
    target, texts, draft = trained
    export_head(draft, tmp_path / "head", to, target=target, verifier="some/target" if to == "speculators" else None)
    again = Eagle3DraftModel.from_pretrained(tmp_path / "head")
    rounds = decoded(again, target, texts, monkeypatch)
    for text, length, accepted in zip(texts, PROMPT_LENGTHS, rounds, strict=True):
        assert accepted == replay(hits(draft, target, text, length), length, text.shape[1])
