"""FSDP2 shards the head alone, and the configs for many GPUs say what accelerate understands."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from support.chats import chat_tokenizer, tiny_target
from support.processes import run_in_two
from support.training_runs import batches, new_draft, steps


CONFIGS = Path(__file__).parents[2] / "examples" / "configs"

SHARDED = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from support.chats import chat_tokenizer, tiny_target
from eagle3_hf.training.callbacks.nan_guard import local_gradients
from support.training_runs import batches, new_draft, steps

dist.init_process_group("gloo")
torch.manual_seed(0)
target = tiny_target(chat_tokenizer())
places = [p.data_ptr() for p in target.parameters()]
trainer, data, count = batches(target, Path(sys.argv[1]), dist.get_rank(), dist.get_world_size())
draft = trainer.model
fully_shard(draft, reshard_after_forward=False)
result = steps(draft, trainer, data, count, dist.get_world_size())
assert {type(p).__name__ for p in draft.parameters()} == {"DTensor"}
# What a step that is not finite does to sharded gradients.
optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
draft(**trainer.draft_inputs(data), num_items_in_batch=count).loss.backward()
assert all(p.grad.full_tensor().abs().sum() > 0 for p in draft.parameters())
for gradient in local_gradients(optimizer):
    gradient.masked_fill_(torch.tensor(True), 0)
assert all(p.grad.full_tensor().abs().sum() == 0 for p in draft.parameters())
assert places == [p.data_ptr() for p in target.parameters()]  # nobody touched the target
result["weights"] = {name: p.full_tensor().flatten()[:20].tolist() for name, p in draft.named_parameters()}
if dist.get_rank() == 0:
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
def test_fully_shard_equals_one_process(tmp_path):
    """Two processes, gloo, CPU: the unroll runs its layer several times in one forward of the sharded head."""
    run_in_two(SHARDED, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    torch.manual_seed(0)
    target = tiny_target(chat_tokenizer())
    trainer, data, count = batches(target, tmp_path, 0, 1)
    expected = steps(trainer.model, trainer, data, count, 1)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, parameter in trainer.model.named_parameters():
        assert result["weights"][name] == pytest.approx(parameter.flatten()[:20].tolist(), abs=2e-5), name


@pytest.mark.parametrize("name", ["ddp.yaml", "fsdp2.yaml", "deepspeed_zero2.yaml"])
def test_accelerate_reads_the_configs(name):
    config = load_config_from_file(str(CONFIGS / name))
    kinds = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP}
    assert config.distributed_type == kinds.get(name.partition(".")[0], DistributedType.DEEPSPEED)
    assert config.num_processes == 8


def test_the_fsdp_config_is_version_2_and_keeps_whole_state_dicts():
    """A checkpoint must hold a head that loads anywhere."""
    from accelerate import FullyShardedDataParallelPlugin

    settings = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())["fsdp_config"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=settings["fsdp_version"],
        auto_wrap_policy=settings["fsdp_auto_wrap_policy"],
        reshard_after_forward=settings["fsdp_reshard_after_forward"],
        state_dict_type=settings["fsdp_state_dict_type"],
    )
    assert plugin.fsdp_version == 2
    assert "FULL" in str(plugin.state_dict_type)
    assert plugin.reshard_after_forward is False


def test_the_deepspeed_config_fits_trainer():
    """What Trainer fills in is left open; the stage keeps every process's head whole, so that it can be saved."""
    config = json.loads((CONFIGS / "deepspeed_zero2.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert config["gradient_clipping"] == config["train_micro_batch_size_per_gpu"] == "auto"
    settings = yaml.safe_load((CONFIGS / "deepspeed_zero2.yaml").read_text())["deepspeed_config"]
    assert Path(settings["deepspeed_config_file"]).name == "deepspeed_zero2.json"


def test_new_draft_is_all_trainable():
    """What DDP without a search for unused parameters, and FSDP with one unit, lean on."""
    torch.manual_seed(0)
    assert all(p.requires_grad for p in new_draft(tiny_target(chat_tokenizer())).parameters())
