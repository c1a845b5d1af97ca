"""The paper's ablation at a small scale: the effect of training-time test and of fused features on tau.

    python examples/ablation.py --target HuggingFaceTB/SmolLM2-135M-Instruct --chats chats.jsonl --max_steps 600

The script trains four heads from the same seed, on the same chats in the same order, and decodes the same held-out
prompts with each. The target should have written `chats.jsonl` (`eagle3-hf datagen`). Tau is the mean acceptance
length.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from eagle3_hf import (
    Eagle3DraftModel,
    Eagle3Trainer,
    Eagle3TrainingArguments,
    MeasureTau,
    load_chats,
    own_device,
    prepare_dataset,
)
from eagle3_hf.commands.parser import Parser


# EAGLE and EAGLE-2 weight the token loss with 0.1 and the regression with 1.
EAGLE2_REGRESSION = 10.0
HEADS: list[tuple[str, bool, dict[str, Any]]] = [  # name, only the top feature, training arguments
    ("EAGLE-2: feature regression", True, {"ttt_steps": 1, "feature_loss_weight": EAGLE2_REGRESSION}),
    ("no training-time test", True, {"ttt_steps": 1}),
    ("+ training-time test", True, {}),
    ("+ fused features (EAGLE-3)", False, {}),
]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--chats", required=True, help="JSONL of `messages`, preferably written by the target")
    parser.add_argument("--workdir", type=Path, default=Path("runs/ablation"), help="folder for the heads")
    parser.add_argument("--draft_vocab_size", type=int, default=8192)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--held_out", type=int, default=64, help="chats to measure on, excluded from training")
    parser.add_argument("--prompts", type=int, default=16, help="number of held-out chats to decode")
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--max_steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--ttt_steps", type=int, default=5, help="steps of the heads with training-time test")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    dtype = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype)
    target.to(own_device())
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    print(table(ablate(target, tokenizer, options.chats, options)))


def ablate(target, tokenizer, chats, options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Train and measure every head.

    Returns:
        For each head its name, tau, and the acceptance length of a chain that its accuracies predict.
    """
    check_workdir(options)
    chats = load_chats(chats)
    split = len(chats) - options.held_out
    if split < 1:
        raise ValueError(
            f"there are {len(chats)} chats, of which {options.held_out} are to be held out: none is left to train on"
        )
    train, held_out = (
        prepare_dataset(chats.select(part), tokenizer, max_length=options.max_length)
        for part in (range(split), range(split, len(chats)))
    )
    prompts = [chats[split + i] for i in range(min(options.prompts, options.held_out))]
    measure = MeasureTau(prompts, tokenizer, max_new_tokens=options.new_tokens)
    results = []
    for number, (name, only_top, overrides) in enumerate(HEADS):
        print(f"{name} ...", flush=True)
        draft = train_head(target, tokenizer, train, only_top, overrides, options, number)
        emitted, rounds = measure.measure(draft.eval(), target)
        predicted = evaluate(draft, target, tokenizer, held_out, options)
        results.append((name, emitted / max(rounds, 1), predicted))
    return results


def check_workdir(options: argparse.Namespace) -> None:
    """Check that the folder is new or belongs to a run with the same options, which is then resumed."""
    trained_with = ("chats", "draft_vocab_size", "max_length", "held_out", "max_steps", "batch_size", "ttt_steps")
    given = {name: str(getattr(options, name, None)) for name in (*trained_with, "learning_rate", "seed", "target")}
    options.workdir.mkdir(parents=True, exist_ok=True)
    file = options.workdir / "options.json"
    known = json.loads(file.read_text()) if file.exists() else given
    changed = [f"{name} {known.get(name)} (now {value})" for name, value in given.items() if known.get(name) != value]
    if changed:
        raise ValueError(f"{options.workdir} holds heads of another run: {', '.join(changed)}. Give another --workdir")
    file.write_text(json.dumps(given, indent=1))


def train_head(
    target, tokenizer, dataset, only_top: bool, overrides: dict[str, Any], options: argparse.Namespace, number: int
) -> Eagle3DraftModel:
    """Train one head and save it in `workdir/NUMBER`, or load it if it is there already."""
    folder = options.workdir / str(number)
    if (folder / "config.json").exists():
        return Eagle3DraftModel.from_pretrained(folder, dtype=torch.float32).to(target.device).bind(target)
    set_seed(options.seed)
    layer_ids = {"target_layer_ids": [target.config.get_text_config().num_hidden_layers]} if only_top else {}
    draft = Eagle3DraftModel.from_target(target, draft_vocab_size=options.draft_vocab_size, **layer_ids)
    trainer = new_trainer(draft, target, tokenizer, options, train_dataset=dataset, **overrides)
    trainer.train()
    draft.save_pretrained(folder.with_suffix(".partial"))
    folder.with_suffix(".partial").rename(folder)  # complete or not at all
    return draft


def evaluate(draft, target, tokenizer, dataset, options: argparse.Namespace) -> float:
    """Evaluate a head with the same number of steps, whatever it was trained with."""
    trainer = new_trainer(draft, target, tokenizer, options, eval_dataset=dataset)
    return trainer.evaluate()["eval_simulated_acceptance_length"]


def new_trainer(
    draft, target, tokenizer, options: argparse.Namespace, *, train_dataset=None, eval_dataset=None, **own
):
    settings = {
        "output_dir": str(options.workdir / "log"),
        "max_steps": options.max_steps,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "ttt_steps": options.ttt_steps,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.04,
        "save_strategy": "no",
        "logging_steps": 50,
        "report_to": "none",
        "seed": options.seed,
        "use_cpu": target.device.type == "cpu",
    }
    return Eagle3Trainer(
        model=draft,
        target_model=target,
        args=Eagle3TrainingArguments(**{**settings, **own}),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )


def table(results: list[tuple[str, float, float]]) -> str:
    """Return a Markdown table: tau with the head's default tree, and the predicted length of a chain."""
    lines = ["| trained with | tau (tree) | simulated (chain) |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {tau:.2f} | {predicted:.2f} |" for name, tau, predicted in results)])


if __name__ == "__main__":
    main()
