"""`synced_gpus`: two processes with texts of different lengths run every forward of a spread target together."""

import json

import pytest
import torch.distributed as dist

from eagle3_hf.decoding.target.synced_gpus import synced_gpus_of
from support.drafts import new_draft, target_of
from support.families import prompt
from support.processes import run_in_two


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from support.drafts import new_draft, target_of
from support.families import prompt
from support.families.others import chain_target
from eagle3_hf.model.target_modules import decoder_blocks

dist.init_process_group("gloo")
rank = dist.get_rank()
result = {}
for name, make, tree in (("llama", target_of, (7, 3, 3)), ("qwen3_next", chain_target, (4, 4, 1))):
    target = make(name)
    draft = new_draft(target, half=False, own_embeddings=True)
    config = draft.generation_config
    config.num_assistant_tokens, config.assistant_tree_depth, config.assistant_tree_top_k = tree
    for sample in (False, True):
        kwargs = {"do_sample": sample, "max_new_tokens": (5, 23)[rank] if sample else (30, 9)[rank]}
        ids = prompt(6 + 3 * rank, rank)
        torch.manual_seed(rank)
        plain = target.generate(ids, **kwargs)
        result[f"{name} {sample}"] = ids, kwargs, plain, draft
    forwards = []
    for block in decoder_blocks(target):
        fully_shard(block)
    fully_shard(target)
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    for sample in (False, True):
        ids, kwargs, plain, draft = result[f"{name} {sample}"]
        del forwards[:]
        torch.manual_seed(rank)
        draft.foretell(plain[:, ids.shape[1]:], rank, 0.7)
        ours = target.generate(ids, assistant_model=draft, synced_gpus=True, **kwargs)
        counts = [None, None]
        dist.all_gather_object(counts, len(forwards))
        result[f"{name} {sample}"] = {
            "equal": torch.equal(ours, plain), "forwards": counts, "rounds": draft.stats.rounds,
            "accepted": sum(draft.stats.accepted), "new": plain.shape[1] - ids.shape[1],
        }
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
def test_processes_of_different_lengths_decode_their_own_texts(tmp_path):
    run_in_two(SCRIPT, tmp_path)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for call, first in results[0].items():
        second = results[1][call]
        assert first["equal"], call
        assert second["equal"], call
        assert first["forwards"][0] == first["forwards"][1], call
        assert first["rounds"] != second["rounds"], "one of them had to wait"
        assert first["accepted"] + second["accepted"] > 0, call
        longest = max(first["new"], second["new"])
        assert first["forwards"][0] < longest + 3, "drafts made the longer text's forwards fewer"


@pytest.mark.parametrize("processes", [1, 2])
def test_only_several_processes_wait_for_each_other(processes, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: processes)
    target = target_of("llama")
    assert (synced_gpus_of(target, new_draft(target), prompt(5), True) is not None) == (processes > 1)
    assert synced_gpus_of(target, new_draft(target), prompt(5), None) is None, "nobody asked for it"
