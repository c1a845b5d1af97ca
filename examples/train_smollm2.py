"""Trains the demo head: an EAGLE-3 head for SmolLM2-135M-Instruct, on chats that this target wrote.

    python examples/train_smollm2.py --chats chats.jsonl --workdir runs/smollm2

`eagle3-hf datagen` writes `chats.jsonl` (without `--chats`, some are written first). The target runs once over the
chats and its features are stored. The same command resumes an interrupted run.
"""

import argparse
from pathlib import Path

import torch
from demo_target import TARGET_ID, demo_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import (
    Eagle3DraftModel,
    Eagle3Trainer,
    Eagle3TrainingArguments,
    StoredFeatures,
    last_whole_checkpoint,
    own_device,
    prepare_dataset,
    synthesize,
    write_features,
)
from eagle3_hf.commands.parser import Parser


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or Hub id of the target (default: the demo target)")
    parser.add_argument("--chats", type=Path, help="JSONL of `messages` written by the target")
    parser.add_argument("--num_chats", type=int, default=2000, help="chats to write when --chats is not given")
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs/smollm2"), help="folder for features and checkpoints"
    )
    parser.add_argument("--output", type=Path, help="folder of the finished head (default: WORKDIR/head)")
    parser.add_argument("--draft_vocab_size", type=int, default=8192)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--held_out", type=int, default=128, help="chats to evaluate on, not trained on")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--ttt_steps", type=int, default=4)
    parser.add_argument("--position_share", type=float, default=0.33)
    return parser.parse_args()


def stored_features(arguments: argparse.Namespace, target, tokenizer, layer_ids: list[int]) -> Path:
    """Store the target's features of every chat once, and return their folder."""
    chats = arguments.chats or arguments.workdir / "chats.jsonl"
    if arguments.chats is None:
        synthesize(target, tokenizer, chats, arguments.num_chats)
    dataset = prepare_dataset(chats, tokenizer, max_length=arguments.max_length)
    write_features(target, dataset, arguments.workdir / "features", layer_ids)
    return arguments.workdir / "features"


def main() -> None:
    arguments = parse_arguments()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    folder = arguments.target or demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(own_device())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    name = arguments.target or TARGET_ID
    draft = Eagle3DraftModel.from_target(
        target, draft_vocab_size=arguments.draft_vocab_size, target_name_or_path=str(name)
    )
    features = stored_features(arguments, target, tokenizer, draft.config.target_layer_ids)
    everything = len(StoredFeatures(features))
    split = everything - arguments.held_out
    trainer = Eagle3Trainer(
        model=draft,
        target_model=target,
        args=training_arguments(arguments),
        train_dataset=StoredFeatures(features, indices=range(split)),
        eval_dataset=StoredFeatures(features, indices=range(split, everything)),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(arguments.workdir / "checkpoints"))
    print(trainer.evaluate())
    draft.to(torch.bfloat16).save_pretrained(arguments.output or arguments.workdir / "head")


def training_arguments(arguments: argparse.Namespace) -> Eagle3TrainingArguments:
    return Eagle3TrainingArguments(
        output_dir=str(arguments.workdir / "checkpoints"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.04,
        ttt_steps=arguments.ttt_steps,
        position_share=arguments.position_share,
        train_sampling_strategy="group_by_length",
        bf16=True,
        use_cpu=not torch.accelerator.is_available(),
        logging_steps=10,
        save_steps=100,
        save_total_limit=2,
        report_to=[],
        seed=0,
    )


if __name__ == "__main__":
    main()
