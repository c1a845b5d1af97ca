"""LoRA on a head (adapt a published head to a domain), and heads of a LoRA-adapted target."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from support.chats import tiny_target
from support.training_runs import StopAfter, assert_same_weights, history, new_draft, trainer_for, weights


# peft asks transformers for this alias; nothing of ours does.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def head(target, tokenizer, rows, tmp_path_factory):
    """The folder of a head as one finds it published."""
    folder = tmp_path_factory.mktemp("head")
    trainer_for(target, rows, folder, tokenizer, max_steps=5).model.save_pretrained(folder / "head")
    return folder / "head"


MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "fc", "gate_proj", "up_proj", "down_proj"]


def adapted(head, modules=MODULES, **overrides) -> PeftModel:
    torch.manual_seed(1)
    draft = Eagle3DraftModel.from_pretrained(head)
    return get_peft_model(draft, LoraConfig(r=8, lora_alpha=16, target_modules=modules, **overrides))


def base_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(model).items() if "lora_" not in name}


def prompt(tokenizer) -> torch.Tensor:
    return torch.tensor([tokenizer("What is the capital of France?")["input_ids"]])


@pytest.mark.parametrize("modules", [MODULES, "all-linear"], ids=["named", "all-linear"])
def test_adapters_learn_and_nothing_else_changes(target, tokenizer, rows, head, tmp_path, modules):
    model = adapted(head, modules)
    before = base_weights(model)
    trainer = trainer_for(
        target, rows, tmp_path, tokenizer, draft=model, eval_dataset=rows, max_steps=30, learning_rate=1e-2
    )
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    assert last["eval_loss"] < 0.95 * first["eval_loss"]
    assert last["eval_simulated_acceptance_length"] > first["eval_simulated_acceptance_length"] + 0.03
    assert_same_weights(before, base_weights(model), atol=0)
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for name, p in model.named_parameters() if "lora_" in name}
    assert not any("lm_head" in name for name, _ in model.named_parameters() if "lora_" in name)


def test_adapters_alone_are_saved_and_load_onto_the_published_head(target, tokenizer, rows, head, tmp_path):
    trainer = trainer_for(
        target, rows, tmp_path, tokenizer, draft=adapted(head), max_steps=4, save_strategy="steps", save_steps=4
    )
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-4"
    saved = load_file(folder / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert not (folder / "model.safetensors").exists()
    again = PeftModel.from_pretrained(Eagle3DraftModel.from_pretrained(head), folder)
    assert_same_weights(weights(again), weights(trainer.model), atol=0)


def test_interrupted_and_resumed_equals_uninterrupted(target, rows, head, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}
    whole = trainer_for(target, rows, tmp_path / "whole", draft=adapted(head, lora_dropout=0.1), **options)
    whole.train()
    first = trainer_for(target, rows, tmp_path / "parts", draft=adapted(head, lora_dropout=0.1), **options)
    first.add_callback(StopAfter(3))
    first.train()
    second = trainer_for(target, rows, tmp_path / "parts", draft=adapted(head, lora_dropout=0.1), **options)
    second.train(resume_from_checkpoint=True)
    assert history(second, "loss") == history(whole, "loss")
    assert_same_weights(weights(second.model), weights(whole.model), atol=0)


def test_decoding_with_adapters_merging_and_saving_as_a_head(target, tokenizer, rows, head, tmp_path):
    """Three ways to the same rounds, and the text is the target's own."""
    model = adapted(head)
    trainer_for(target, rows, tmp_path, tokenizer, draft=model, max_steps=30, learning_rate=1e-2).train()
    ids, options = prompt(tokenizer), {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)

    def rounds(draft) -> tuple[int, list[int]]:
        output = target.generate(
            ids,
            assistant_model=draft,
            assistant_lookup=False,
            num_assistant_tokens=11,
            return_dict_in_generate=True,
            **options,
        )
        assert torch.equal(output.sequences, plain)
        return output.speculation.rounds, output.speculation.accepted

    with_adapters = rounds(model)
    published = rounds(Eagle3DraftModel.from_pretrained(head))
    merged = model.merge_and_unload()
    assert type(merged) is Eagle3DraftModel
    merged.save_pretrained(tmp_path / "merged")
    assert rounds(merged) == rounds(Eagle3DraftModel.from_pretrained(tmp_path / "merged")) == with_adapters
    assert with_adapters != published
    again, base = Eagle3DraftModel.from_pretrained(tmp_path / "merged"), Eagle3DraftModel.from_pretrained(head)
    assert set(weights(again)) == set(weights(base))
    assert torch.equal(again.draft_vocab_ids(), base.draft_vocab_ids())


def test_adapters_have_a_card_of_their_own(target, tokenizer, rows, head, tmp_path):
    """Not peft's empty form; one that a person edited stays."""
    trainer = trainer_for(target, rows, tmp_path, tokenizer, draft=adapted(head), max_steps=1)
    trainer.train()
    trainer.save_model()
    path = tmp_path / "out" / "README.md"
    assert "Model Card for Model ID" in path.read_text()
    for _ in range(2):  # ours is replaced by ours
        trainer.create_model_card()
        text = path.read_text()
        assert "rank 8 on down_proj, fc, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in text
        assert 'Eagle3DraftModel.from_pretrained("HEAD")' in text  # that it is a folder of this machine helps nobody
        assert str(Path(head).parent) not in text
        assert ModelCard(text).data.library_name == "peft"
    path.write_text("# Mine\n")
    trainer.create_model_card()
    assert path.read_text() == "# Mine\n"


def test_stored_features_train_adapters_too(target, rows, head, tmp_path):
    write_features(target, rows, tmp_path / "store", [0, 1, 2], dtype=torch.float32, progress=False)
    runs = [
        trainer_for(target, data, tmp_path, draft=adapted(head), max_steps=3)
        for data in (rows, StoredFeatures(tmp_path / "store"))
    ]
    for trainer in runs:
        trainer.train()
    torch.testing.assert_close(*(history(trainer, "loss") for trainer in runs), rtol=1e-5, atol=1e-5)


def test_a_head_without_a_vocabulary_is_refused(target, rows, tmp_path):
    """It would be built here, and be lost with the process: only the adapters are saved."""
    draft = get_peft_model(new_draft(target), LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="no draft vocabulary yet, and adapters do not save one"):
        trainer_for(target, rows, tmp_path, draft=draft)


def test_a_task_type_is_refused(target, rows, head, tmp_path):
    model = adapted(head, task_type="CAUSAL_LM")
    with pytest.raises(TypeError, match=r"made with a task_type \(PeftModelForCausalLM\).* leave task_type out"):
        trainer_for(target, rows, tmp_path, draft=model)
    with pytest.raises(TypeError, match="must be an Eagle3DraftModel, or adapters on one, got LlamaForCausalLM"):
        trainer_for(target, rows, tmp_path, draft=target)


# ----- a LoRA-adapted target -----------------------------------------------------------------------------------------


def adapted_target(tokenizer) -> PeftModel:
    """A fine-tuned target: its adapters change what it says."""
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_target(tokenizer), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("source", ["online", "stored"])
def test_an_adapted_target_teaches_and_verifies(tokenizer, rows, tmp_path, source):
    """What is learnt is what the adapted target says, not the one below; and it verifies."""
    target = adapted_target(tokenizer)
    before = weights(target)
    data = rows
    if source == "stored":
        write_features(target, rows, tmp_path / "store", [0, 1, 2], dtype=torch.float32, progress=False)
        data = StoredFeatures(tmp_path / "store")
    trainer = trainer_for(target, data, tmp_path, tokenizer, max_steps=40, learning_rate=5e-3)
    assert not any(p.requires_grad for p in target.parameters())
    batch = trainer.data_collator([data[i] for i in range(4)])
    taught = trainer.draft_inputs(batch)
    with torch.no_grad():
        own = target(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        with target.disable_adapter():
            below = target(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    positions = (batch["labels"] != -100).nonzero()
    ids = trainer.draft.draft_vocab_ids()
    for logits, same in ((own, True), (below, False)):
        expected = logits[positions[:, 0], positions[:, 1] - 1][:, ids].softmax(-1)
        close = torch.allclose(taught["teacher_logits"].softmax(-1), expected, atol=1e-5)
        assert close == same
    trainer.train()
    assert history(trainer, "loss")[-1] < history(trainer, "loss")[0]
    assert_same_weights(before, weights(target), atol=0)
    ids, options = prompt(tokenizer), {"max_new_tokens": 24, "do_sample": False}
    output = target.generate(input_ids=ids, assistant_model=trainer.model, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, target.generate(input_ids=ids, **options))
    with target.disable_adapter():
        assert not torch.equal(output.sequences, target.generate(input_ids=ids, **options))
