"""Training runs on a tiny target, for the tests of training."""

from pathlib import Path

import torch
from transformers import TrainerCallback

from eagle3_hf import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.training.data.encoding import prepare_dataset
from support.chats import chat_tokenizer


ANSWERS = [
    "The capital of France is Paris.",
    "The sea is wide, the sea is deep.",
    "It sings. The answer is four.",
    "Let me think about it. The answer is Paris.",
]


def chats(count: int = 8) -> list[dict]:
    """Chats of different lengths, two answers in every third."""
    made = []
    for i in range(count):
        turns = [("user", "What is the answer?"[: 6 + i]), ("assistant", ANSWERS[i % 4][: 12 + 3 * i])]
        if i % 3 == 0:
            turns += [("user", "Write a poem."), ("assistant", ANSWERS[(i + 1) % 4])]
        made.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return made


def new_draft(target, draft_vocab_size: int | None = 200, **overrides) -> Eagle3DraftModel:
    torch.manual_seed(0)
    return Eagle3DraftModel.from_target(target, draft_vocab_size=draft_vocab_size, **overrides)


def arguments(tmp_path, **overrides) -> Eagle3TrainingArguments:
    fields = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "ttt_steps": 3,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Eagle3TrainingArguments(**{**fields, **overrides})


def trainer_for(
    target, dataset, tmp_path, tokenizer=None, draft=None, eval_dataset=None, **overrides
) -> Eagle3Trainer:
    return Eagle3Trainer(
        model=draft if draft is not None else new_draft(target),
        target_model=target,
        args=arguments(tmp_path, **overrides),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )


def history(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(left: dict, right: dict, atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class Gradients(TrainerCallback):
    """The gradients before each optimizer step."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def batches(target, path: Path, rank: int, world_size: int):
    """A trainer (for its teacher), this process's rows as a batch, and the supervised tokens of all processes."""
    tokenizer = chat_tokenizer()
    rows = prepare_dataset(chats(), tokenizer, max_length=None)
    trainer = trainer_for(target, rows, path, tokenizer)
    everything = [rows[i] for i in range(8)]
    count = int((trainer.data_collator(everything)["labels"] != -100).sum())
    return trainer, trainer.data_collator(everything[rank::world_size]), count


def steps(draft, trainer, data, count: int, world_size: int) -> dict:
    """Two optimizer steps; gradients are averaged over processes, so the loss is scaled as Trainer does."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for _ in range(2):
        inputs = trainer.draft_inputs(data)
        loss = draft(**inputs, num_items_in_batch=count).loss * world_size
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms}
