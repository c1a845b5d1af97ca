"""Heads that draft well on the chats that they have learnt by heart, and copies of them to plant faults in."""

import copy
import random
from dataclasses import dataclass
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_hf import Eagle3DataCollator, Eagle3DraftModel, EncodingOptions
from eagle3_hf.evaluation.diagnosis.texts import load_texts, own_answers
from eagle3_hf.model.vocab import record_tokenizer
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.settings import TTTSettings
from support.chats import chat_tokenizer


STEPS, FEW_STEPS = 90, 12
NEW_TOKENS = 40
_TEXT = "the a sea is wide deep answer four Paris capital of France poem it sings think about me let and"


@dataclass
class Pair:
    """A target and a head for it, with the tokenizer, the chats, and the target's answers to them as tokens."""

    target: LlamaForCausalLM
    draft: Eagle3DraftModel
    tokenizer: PreTrainedTokenizerFast
    chats: list[dict]
    answered: list[dict]

    def copied(self) -> "Pair":
        """The same with copies of head and tokenizer, which may be changed."""
        return Pair(self.target, copy.deepcopy(self.draft), copy.deepcopy(self.tokenizer), self.chats, self.answered)


def chats_of(seed: int, count: int = 4, words: int = 5) -> list[dict]:
    """Chats of random words."""
    chance = random.Random(seed)

    def text() -> str:
        return " ".join(chance.choices(_TEXT.split(), k=words))

    return [
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]}
        for _ in range(count)
    ]


def sound_pair(seed: int = 0, steps: int = STEPS) -> Pair:
    """A pair whose head has learnt the target's answers to the chats; the same one for the whole session."""
    return _trained_pair(seed, steps)


@cache
def _trained_pair(seed: int, steps: int) -> Pair:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = chat_tokenizer("bos")
        target, chats = _target(tokenizer), chats_of(seed)
        draft = Eagle3DraftModel.from_target(target, target_layer_ids=[2, 4, 6])
        record_tokenizer(draft.config, tokenizer)
        texts = [own_answers(text, target, NEW_TOKENS) for text in load_texts(chats, tokenizer, EncodingOptions())]
        rows = [{"input_ids": text.ids, "labels": text.ids.masked_fill(~text.is_answer, -100)} for text in texts]
        _train(draft, target, rows, steps)
    answered = [{name: ids.tolist() for name, ids in row.items()} for row in rows]
    return Pair(target, draft.eval(), tokenizer, chats, answered)


def _target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A random target that is sure of its choices."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config).eval()
    target.generation_config.eos_token_id = None  # answers of equal lengths
    with torch.no_grad():
        target.lm_head.weight.mul_(3.0)
    return target


def _train(draft, target, rows: list[dict], steps: int) -> None:
    batch = Eagle3DataCollator(pad_token_id=2)(rows)
    taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        draft(**{**batch, **taught}, settings=TTTSettings(3, attention="eager")).loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
