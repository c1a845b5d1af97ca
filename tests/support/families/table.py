"""What each family of targets can verify, and how exactly: the numbers behind docs/families.md.

`PYTHONPATH=.:tests python -m support.families.table` measures every family and writes the page; with names as
arguments it prints their rows alone. Both sides are `generate`'s own forwards: a tree, or a chain, that the draft is
made to propose, against plain decoding forced along each of its paths.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle3_hf.decoding.loop import SpeculativeDecoding
from eagle3_hf.decoding.target.capability import VerifyMode
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.runner import CACHE_KEY, TargetRun
from eagle3_hf.decoding.tree import DraftTree
from support.drafts import new_draft, padded, set_tree
from support.families import FAMILIES
from support.families.others import CHAINS, PLAIN, TREES, tiny_other
from support.families.vision import CONFIGS as VISION
from support.families.vision import image_prompt, tiny_vision


PAGE = Path(__file__).parents[3] / "docs" / "families.md"
BEGIN, END = "<!-- table: written by tests/support/families/table.py -->", "<!-- end of the table -->"
NEW_TOKENS, SEEDS = 24, 4
# Ten nodes: branches of unequal length, siblings far apart, so that a node's slot is not its position.
TREE_PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 6, 7]
CHAIN_PARENTS = [-1, 0, 1, 2, 3]
# Of the largest logit, in float32. Recurrent layers compute several tokens in another form than one.
MOST, MOST_RECURRENT = 1e-5, 1e-4


@dataclass
class Row:
    """One family's line of the table."""

    family: str
    target: str
    attention: str
    layers: str
    mode: VerifyMode
    difference: float | None = None
    restores: bool = False
    equal: dict[str, str] = field(default_factory=dict)

    @property
    def allowed(self) -> float:
        return MOST_RECURRENT if self.restores else MOST

    def faults(self) -> list[str]:
        found = [f"{what}: {result}" for what, result in self.equal.items() if len(set(result.split("/"))) > 1]
        if self.difference is not None and not self.difference <= self.allowed:
            found.append(f"logits differ by {self.difference:.1e} of the largest")
        return found

    def cells(self) -> list[str]:
        difference = "" if self.difference is None else f"{self.difference:.0e}"
        cells = [self.family, self.target, self.attention, self.layers, self.mode.value, difference]
        return [*cells, *(self.equal.get(name, "") for name in COLUMNS)]


COLUMNS = ["batch 1", "batch 3, left padded", "sampled", "batch 3, sampled", "static cache"]
HEADS = ["family", "class", "attention", "cache layers", "way", "logits", *COLUMNS]


def names() -> list[str]:
    return [*FAMILIES, *TREES, *VISION, *CHAINS, *PLAIN]


def build(name: str) -> PreTrainedModel:
    return tiny_vision(name) if name in VISION else tiny_other(name)


def inputs_of(name: str, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A prompt longer than the windows, or one with images."""
    if name in VISION:
        return image_prompt(name, rows, seed)
    return padded([22 + seed, 14, 29 - seed][:rows], seed)


def measure(name: str, seeds: int = SEEDS) -> Row:
    target = build(name)
    capability = capability_of(target)
    row = Row(
        name, type(target).__name__, target.config.get_text_config()._attn_implementation, "", capability.mode,
        restores=capability.restores,
    )  # fmt: skip
    draft = set_tree(new_draft(target, half=False), "cpu")
    if capability.mode is not VerifyMode.PLAIN:
        parents = TREE_PARENTS if capability.mode is VerifyMode.TREE else CHAIN_PARENTS
        row.difference = max(difference(target, draft, inputs_of(name, rows, 1), parents) for rows in (1, 3))
    calls: dict[str, dict[str, Any]] = {
        "batch 1": {"rows": 1}, "batch 3, left padded": {"rows": 3}, "sampled": {"rows": 1, "do_sample": True},
        "batch 3, sampled": {"rows": 3, "do_sample": True},
    }  # fmt: skip
    if capability.mode is VerifyMode.TREE and runs(target, inputs_of(name, 1, 0), cache_implementation="static"):
        calls["static cache"] = {"rows": 1, "cache_implementation": "static"}
    for what, kwargs in calls.items():
        row.equal[what] = f"{sum(equal(name, target, draft, seed, **kwargs) for seed in range(seeds))}/{seeds}"
    row.layers = layers_of(target, inputs_of(name, 1, 0))
    return row


def runs(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs) -> bool:
    """Whether plain decoding itself does this (transformers 5.24's PaliGemma has no static cache with windows)."""
    try:
        target.generate(**inputs, max_new_tokens=2, **kwargs)
    except Exception:
        return False
    return True


def layers_of(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str:
    """The kinds of layers of a cache, after a call."""
    out = target.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
    cache = getattr(out, CACHE_KEY, None)
    kinds = {type(layer).__name__.removesuffix("Layer") for layer in getattr(cache, "layers", ())}
    return ", ".join(sorted(kinds))


def equal(name: str, target: PreTrainedModel, draft, seed: int, rows: int, **kwargs) -> bool:
    """Whether ids and generator are vanilla's, with drafts of which many are right."""
    inputs = inputs_of(name, rows, seed)
    torch.manual_seed(seed)
    vanilla = target.generate(**inputs, max_new_tokens=NEW_TOKENS, **kwargs)
    state = torch.get_rng_state()
    draft.foretell(vanilla[:, -NEW_TOKENS:], seed)
    torch.manual_seed(seed)
    ours = target.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft, **kwargs)
    tried = draft.stats.rounds == 0 or draft.stats.mean_accepted > 0.3
    return torch.equal(ours, vanilla) and torch.equal(torch.get_rng_state(), state) and tried


# ----- logits of a given tree ----------------------------------------------------------------------------------------


def difference(target: PreTrainedModel, draft, inputs: dict[str, torch.Tensor], parents: Sequence[int]) -> float:
    """The largest difference of a tree's logits from those of its paths alone, relative to the largest logit."""
    first = target.generate(**inputs, max_new_tokens=1)[:, -1:]
    generator = torch.Generator().manual_seed(3)
    guessed = torch.randint(1, 300, (first.shape[0], len(parents) - 1), generator=generator)
    tokens = torch.cat([first, guessed], dim=1)
    together = verified(target, draft, inputs, tokens, parents)
    worst = largest = 0.0
    for path in paths_of(parents):
        alone = forced(target, inputs, tokens[:, path])
        worst = max(worst, (together[:, path] - alone).abs().max().item())
        largest = max(largest, alone.abs().max().item())
    return worst / largest


def paths_of(parents: Sequence[int]) -> Iterator[list[int]]:
    """From the root to each leaf."""
    for leaf in range(len(parents)):
        if leaf not in parents:
            path = [leaf]
            while path[0]:
                path.insert(0, parents[path[0]])
            yield path


def verified(target, draft, inputs, tokens: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
    """(B, N, V) logits of the tree in the forward that verifies it."""
    flat = DraftTree.chain(tokens)
    tree = DraftTree(tokens, torch.tensor([list(parents)] * len(tokens)), flat.num_nodes, flat.scores, flat.log_probs)
    with proposing(tree) as logits:
        target.generate(**inputs, assistant_model=draft.foretell([]), max_new_tokens=len(parents) + 2)
    return logits[0][:, -len(parents) :]


@contextmanager
def proposing(tree: DraftTree) -> Iterator[list[torch.Tensor]]:
    """Propose this tree in the first round; yields the logits of all verifications."""
    logits: list[torch.Tensor] = []
    original, verify = SpeculativeDecoding._propose, TargetRun.verify

    def propose(self, *args):
        own = original(self, *args)
        return own if logits else (tree, [])

    def watch(self, *args):
        outputs = verify(self, *args)
        logits.append(outputs.logits.clone())
        return outputs

    SpeculativeDecoding._propose, TargetRun.verify = propose, watch  # type: ignore[method-assign]
    try:
        yield logits
    finally:
        SpeculativeDecoding._propose, TargetRun.verify = original, verify  # type: ignore[method-assign]


def forced(target, inputs, path: torch.Tensor) -> torch.Tensor:
    """(B, n, V) logits behind each token of a path (B, n), as plain decoding computes them token by token."""
    start = (inputs["inputs"] if "inputs" in inputs else inputs["input_ids"]).shape[1]

    def only(row: int, ids: torch.Tensor) -> list[int]:
        place = len(ids) - start
        return [int(path[row, place])] if place < path.shape[1] else [1]

    out = target.generate(
        **inputs, max_new_tokens=path.shape[1] + 1, prefix_allowed_tokens_fn=only, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences[:, start:-1], path)
    return torch.stack(out.logits[1:], dim=1)


# ----- the page ------------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(rows: Sequence[Row]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{render(rows)}\n\n{END}{after}")


def main(arguments: list[str]) -> int:
    rows = []
    for name in arguments or names():
        rows.append(measure(name))
        print(render(rows[-1:]).splitlines()[-1], flush=True)  # noqa: T201 - a script
    faults = [f"{row.family}: {fault}" for row in rows for fault in row.faults()]
    print("\n".join(faults))  # noqa: T201
    if not arguments and not faults:
        write(rows)
    return len(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
