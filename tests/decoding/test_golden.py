"""What the reference implementation did on a tiny target, rebuilt: its trees, its text, its losses, its training run.

The reference counts the root in its number of nodes, and its depth counts the passes after the first one: its 60/7/10
is 59/8/10 here. Its training keeps rows that we leave out (see `ttt.loss`), so its own mask is rebuilt here.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from eagle3_hf import DraftTree, Eagle3Candidate, Eagle3DraftModel
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.published_formats import WEIGHT_RENAMINGS
from eagle3_hf.ttt.loss import Supervision, weighted_loss
from eagle3_hf.ttt.settings import TTTSettings
from support.trees import assert_valid


TRACES = ["trace", "trace_small", "trace_chain"]
SETTINGS = TTTSettings(num_steps=7, step_decay=0.8)


@pytest.fixture(scope="module")
def reference(shared) -> Path:
    return shared / "reference"


@pytest.fixture(scope="module")
def target(reference):
    model = AutoModelForCausalLM.from_pretrained(reference / "target", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the reference's traces do not stop there
    return model


@pytest.fixture
def draft(reference, target) -> Eagle3DraftModel:
    return Eagle3DraftModel.from_pretrained(reference / "head").bind(target)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# ----- decoding ------------------------------------------------------------------------------------------------------


class Recorder:
    """Every tree that a run drafted, and the tokens that were committed just before it (its root last)."""

    def __init__(self, monkeypatch):
        self.trees: list[DraftTree] = []
        self.committed: list[list[int]] = []
        original_extend, original = Eagle3Candidate.extend, Eagle3Candidate.draft_tree

        def extend(candidate, inputs):
            self.committed.append(inputs.tokens[0].tolist())
            original_extend(candidate, inputs)

        def draft_tree(candidate, *args):
            tree = original(candidate, *args)
            self.trees.append(tree)
            return tree

        monkeypatch.setattr(Eagle3Candidate, "extend", extend)
        monkeypatch.setattr(Eagle3Candidate, "draft_tree", draft_tree)

    def accepted(self, number: int) -> list[int]:
        """Root and accepted drafts of a round: what the next round's draft was fed, but for its own root."""
        return [self.trees[number].host()[0].tokens[0], *self.committed[number + 1][:-1]]


def generate(target, draft, trace: dict, new_tokens: int) -> list[int]:
    settings = trace["args"]
    draft.generation_config.num_assistant_tokens = settings["total_token"] - 1
    draft.generation_config.assistant_tree_depth = settings["depth"] + 1
    draft.generation_config.assistant_tree_top_k = settings["top_k"]
    draft.generation_config.assistant_lookup = False
    prompt = torch.tensor([trace["prompt"]])
    return target.generate(prompt, assistant_model=draft, max_new_tokens=new_tokens, do_sample=False)[0].tolist()


def tokens_of_nodes(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """For each node the tokens from the root to it, which say what a node is, whatever the order of the nodes."""
    paths = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def leaf_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """What the reference's retrieve table holds: for each leaf the tokens from the root to it, sorted."""
    tokens, parents = tree.host()[0]
    paths = tokens_of_nodes(tokens, parents)
    return sorted(paths[node] for node in range(1, len(parents)) if node not in parents)


@pytest.mark.parametrize("name", TRACES)
def test_every_tree_and_every_accepted_token_through_generate(reference, target, draft, name, monkeypatch):
    trace = read(reference / f"{name}.json")
    recorder = Recorder(monkeypatch)
    # Longer than the trace, so that the length limit makes none of its trees shallower.
    output = generate(target, draft, trace, len(trace["output"]) + trace["args"]["depth"] + 4)
    assert output[: len(trace["output"])] == trace["output"] == trace["hf_greedy"]
    for number, expected in enumerate(trace["rounds"]):
        tree = recorder.trees[number]
        assert_valid(tree)
        # The same nodes: the reference has them in the order of its pool, here the likeliest path comes first.
        nodes, theirs = tokens_of_nodes(*tree.host()[0]), tokens_of_nodes(expected["tree_tokens"], expected["parents"])
        assert sorted(nodes) == sorted(theirs), number
        assert tree.depths[0].tolist() == [len(path) - 1 for path in nodes], number
        leaves = [max(path) for path in expected["retrieve"]]  # a path is ascending, with -1 behind it
        assert leaf_paths(tree) == sorted(theirs[leaf] for leaf in leaves), number
        accepted = recorder.accepted(number)
        assert accepted == expected["accepted"], number
        assert len(accepted) == expected["accept"] + 1
        assert theirs[expected["retrieve"][expected["best"]][len(accepted) - 1]] == tuple(accepted)


@pytest.mark.parametrize("name", TRACES)
def test_output_and_tau(reference, target, draft, name):
    trace = read(reference / f"{name}.json")
    new = len(trace["output"]) - len(trace["prompt"])
    assert generate(target, draft, trace, new) == trace["output"]
    # The reference drops the bonus token of its last round; tau counts it.
    assert generate(target, draft, trace, new + 1)[:-1] == trace["output"]
    assert draft.stats.rounds == len(trace["rounds"])
    assert draft.stats.tau == pytest.approx(trace["tau"])


# ----- training ------------------------------------------------------------------------------------------------------


def reference_supervision(draft, logits: torch.Tensor, mask: torch.Tensor) -> Supervision:
    """The reference's targets: rows shifted past the end are zero, which makes them uniform; they carry loss, too."""
    shifted = nn.functional.pad(logits[:, 1:], (0, 0, 0, 1))
    in_vocab = draft.t2d[shifted.argmax(-1)]
    return Supervision.build(mask, shifted[mask][:, draft.draft_vocab_ids()], in_vocab[mask])


@torch.no_grad()
def run_target(target, ids: torch.Tensor, layer_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with FeatureReader(target, layer_ids) as reader:
        logits = target(ids).logits
        return logits, reader.take()


def test_losses_and_accuracies_of_the_seven_steps(reference, target, draft):
    expected = read(reference / "ttt_eval.json")
    ids, mask = torch.tensor(expected["input_ids"]), torch.tensor(expected["loss_mask"]).bool()
    logits, features = run_target(target, ids, draft.config.target_layer_ids)
    with torch.no_grad():
        steps = draft.training_time_test(ids, features, reference_supervision(draft, logits, mask), SETTINGS)
    losses = [step.loss_sum.item() / ids.numel() for step in steps]
    accuracies = [step.hits.sum().item() / mask[:, s:].sum().item() for s, step in enumerate(steps)]
    assert losses == pytest.approx(expected["plosses"], abs=1e-5)
    assert accuracies == pytest.approx(expected["acces"], abs=1e-6)


def from_reference_names(path: Path) -> dict[str, torch.Tensor]:
    renamed = load_file(path)
    for pattern, replacement in WEIGHT_RENAMINGS.items():
        renamed = {re.sub(pattern, replacement, name): tensor for name, tensor in renamed.items()}
    return renamed


class TrainingRun:
    """The reference's training run on our head: its batches, mask, normalisation, optimizer and clipping."""

    def __init__(self, reference: Path, target, draft):
        self.log, self.draft = read(reference / "ttt_train.json"), draft.train()
        self.ids = torch.tensor(self.log["sequences"])
        self.logits, self.features = run_target(target, self.ids, draft.config.target_layer_ids)
        draft.load_state_dict(from_reference_names(reference / "ttt_train_init.safetensors"))
        settings = self.log["optimizer"]
        assert (settings["name"], settings["loss_weights"]) == ("AdamW", "0.8^k")
        self.clip = settings["clip"]
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), settings["lr"], settings["betas"], weight_decay=settings["weight_decay"]
        )

    def step(self, number: int) -> tuple[list[float], list[float]]:
        """One optimizer step; losses and accuracies of its batch before the update."""
        rows = torch.tensor(self.log["batches"][number])
        ids, mask = self.ids[rows], torch.ones_like(self.ids[rows], dtype=torch.bool)
        mask[:, : self.log["loss_mask_zero_before"]] = False
        supervision = reference_supervision(self.draft, self.logits[rows], mask)
        steps = self.draft.training_time_test(ids, self.features[rows], supervision, SETTINGS)
        self.optimizer.zero_grad()
        weighted_loss(steps, ids.numel(), SETTINGS).backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), self.clip)
        self.optimizer.step()
        losses = [step.loss_sum.item() / ids.numel() for step in steps]
        return losses, [step.hits.sum().item() / mask[:, s:].sum().item() for s, step in enumerate(steps)]


def hits(accuracies: list[float], mask_count: int) -> torch.Tensor:
    return (torch.tensor(accuracies) * mask_count).round()


def test_training_run_of_two_hundred_steps(reference, target, draft):
    """About ten seconds, all of it the promise that training is the reference's."""
    run, moved = TrainingRun(reference, target, draft), 0.0
    count = run.ids[:8, run.log["loss_mask_zero_before"] :].numel()
    for number in range(len(run.log["batches"])):
        losses, accuracies = run.step(number)
        assert losses == pytest.approx(run.log["losses"][number], abs=1e-4), number
        difference = (hits(accuracies, count) - hits(run.log["accuracies"][number], count)).abs()
        assert difference.max() <= 4, number
        moved += difference.sum().item()
    assert moved <= 20  # of 1,400 counts of up to 456: rounding decides a few near-ties
    final = from_reference_names(reference / "ttt_train_final.safetensors")
    state = draft.state_dict()
    assert final.keys() == state.keys()
    for name, tensor in final.items():
        assert torch.allclose(state[name].float(), tensor.float(), rtol=0, atol=1e-3), name
