"""A head for every family that transformers has, from configs as their library makes them (see `families.every`)."""

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_hf import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.target_modules import decoder_blocks, table_shape, target_vocab_size
from support.drafts import ForetellingDraft, set_tree
from support.families import HIDDEN_SIZE, VOCAB_SIZE, prompt
from support.families.every import EXCLUDED, FLOAT32_ONLY, REJECTED, TEXT, VISION, WRONG_WHEN_OLD, build
from support.families.others import IS_OLD


NEW_TOKENS = 12
# One of each kind that no head could be made for, at some time.
FAST = ["gemma4_text", "mamba2", "opt", "rembert", "cohere2_moe", "mllama", "dory", "deepseek_v4", "cpmant", "git"]
NAMES = [name for name in [*TEXT, *VISION] if name not in EXCLUDED]
ALL = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
HALVES = [torch.bfloat16, torch.float16]


def target_of(name: str, dtype: torch.dtype = torch.float32):
    try:
        return build(name, dtype)
    except Exception as error:
        if IS_OLD:
            pytest.skip(f"another config in this version of transformers: {type(error).__name__}")
        raise


@torch.no_grad()
def read(target, draft) -> torch.Tensor:
    with FeatureReader(target, draft.config.target_layer_ids) as reader:
        target(prompt(14))
        return reader.take()


@pytest.mark.parametrize("name", ALL)
def test_a_head_is_made_read_saved_and_lossless(name, tmp_path):
    if IS_OLD and name in WRONG_WHEN_OLD:
        pytest.skip("plain decoding itself is wrong in this version of transformers")
    target = target_of(name)
    plain = target.generate(prompt(14), max_new_tokens=NEW_TOKENS)
    if name in REJECTED:
        with pytest.raises(ValueError, match=REJECTED[name]):
            read(target, Eagle3DraftModel.from_target(target))
        return
    draft = set_tree(ForetellingDraft.from_target(target).eval(), "cpu")
    draft.check_target(target)
    assert draft.config.vocab_size == target(prompt(3)).logits.shape[-1]
    features = read(target, draft)
    logits = draft(prompt(14), features).logits
    assert logits.isfinite().all()
    draft.save_pretrained(tmp_path)
    assert torch.equal(Eagle3DraftModel.from_pretrained(tmp_path).bind(target)(prompt(14), features).logits, logits)
    draft.foretell(plain[:, 14:])
    assert torch.equal(target.generate(prompt(14), assistant_model=draft, max_new_tokens=NEW_TOKENS), plain)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_a_head_of_a_target_in_half_precision(name, dtype):
    if {name} & (FLOAT32_ONLY | set(REJECTED)):
        pytest.skip("no head, or no half precision")
    target = target_of(name, dtype)
    draft = Eagle3DraftModel.from_target(target)
    assert draft(prompt(14), read(target, draft)).logits.isfinite().all()
    assert target.generate(prompt(14), assistant_model=draft, max_new_tokens=2).shape[1] <= 16


def test_every_family_is_listed_once():
    """What is new in transformers has to be looked at."""
    known = {*TEXT, *VISION}
    assert not set(EXCLUDED) & set(REJECTED)
    if not IS_OLD:
        assert {*EXCLUDED, *REJECTED, *FLOAT32_ONLY} <= known


# ----- the right values ----------------------------------------------------------------------------------------------


def test_attention_is_that_of_the_last_block_where_it_differs_by_layer():
    target = target_of("gemma4_text")
    draft = Eagle3DraftModel.from_target(target)
    attention = decoder_blocks(target)[-1].self_attn
    assert draft.config.head_dim == attention.head_dim == 512
    assert torch.equal(draft.layers[0].self_attn.o_proj.weight, attention.o_proj.weight)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [({}, (1, 64)), ({"num_attention_heads": 4}, (4, 16)), ({"head_dim": 8}, (8, 8)), ({"hidden_size": 32}, (1, 32))],
)
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_heads_where_the_target_has_no_attention(name, overrides, expected):
    config = Eagle3DraftModel.from_target(target_of(name), **overrides).config
    assert (config.num_attention_heads, config.head_dim) == expected
    assert config.num_key_value_heads == config.num_attention_heads


@pytest.mark.parametrize(("name", "eps"), [("cohere2_moe", "layer_norm_eps"), ("gpt2", "layer_norm_epsilon")])
def test_the_norms_eps_goes_by_other_names(name, eps):
    target = target_of(name)
    setattr(target.config, eps, 3e-4)
    assert Eagle3DraftModel.from_target(target).config.rms_norm_eps == 3e-4


def test_an_embedding_of_another_width_is_not_borrowed():
    target = target_of("opt")
    draft = Eagle3DraftModel.from_target(target)
    assert table_shape(target.get_input_embeddings()) == (VOCAB_SIZE, 32)
    assert draft.config.own_embeddings
    assert draft.embed_tokens.weight.shape == (VOCAB_SIZE, HIDDEN_SIZE)
    for field, value in (("own_embeddings", False), ("own_lm_head", False)):
        with pytest.raises(ValueError, match=f"width 32, .* hidden_size 64.* {field}=True"):
            Eagle3DraftModel.from_target(target, **{field: value})
    with pytest.raises(ValueError, match="final output at width 64, .* reads width 32"):
        Eagle3DraftModel.from_target(target, use_aux_hidden_state=False)


def test_the_vocabulary_is_what_the_target_can_write():
    target = target_of("mllama")
    assert len(target.get_input_embeddings().weight) == VOCAB_SIZE + 8
    assert target_vocab_size(target) == VOCAB_SIZE
    whole, part = (Eagle3DraftModel.from_target(target, ids, own_embeddings=True) for ids in (None, range(100)))
    for draft in (whole, part):
        assert draft.config.vocab_size == VOCAB_SIZE
        assert torch.equal(draft.lm_head.weight, target.lm_head.weight[draft.draft_vocab_ids()])
    beyond = torch.tensor([[5, VOCAB_SIZE, 7]])  # such as the token of an image
    assert whole(beyond, read(target, whole)[:, :3]).logits.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["stablelm", "gpt_neox", "starcoder2"])
def test_the_gain_of_a_layer_norm_in_half_precision(name, dtype):
    target = target_of(name, dtype)
    draft = Eagle3DraftModel.from_target(target)
    final = (draft.norm, getattr(target.get_decoder(), "norm", None))
    block = (draft.layers[0].post_attention_layernorm, decoder_blocks(target)[-1].post_attention_layernorm)
    mine, theirs = block if final[1] is None else final
    assert (type(theirs), theirs.weight.dtype) == (torch.nn.LayerNorm, dtype)
    torch.testing.assert_close(mine.weight, theirs.weight.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma4_text", "mamba2", "opt", "mllama"])
def test_a_head_is_trained(name, tmp_path):
    target, ids = target_of(name), prompt(24, rows=4)
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    draft = Eagle3DraftModel.from_target(target, draft_vocab_size=100)
    args = Eagle3TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    before = draft.fc.weight.detach().clone()
    loss = Eagle3Trainer(draft, target, args=args, train_dataset=rows).train().training_loss
    assert 0 < loss < 100
    assert not torch.equal(draft.fc.weight, before)


def test_of_a_block_that_runs_twice_the_last_run_is_read():
    target = target_of("dory")
    with torch.no_grad(), FeatureReader(target, [2]) as reader:
        runs: list[torch.Tensor] = []
        handle = decoder_blocks(target)[1].register_forward_hook(lambda m, a, out: runs.append(out))
        target(prompt(6))
        features = reader.take()
        target(prompt(3))
        target(prompt(4))
        assert reader.take().shape[1] == 7, "several forwards are still joined"
        handle.remove()
    assert len(runs) == 6
    last = runs[1] if isinstance(runs[1], torch.Tensor) else runs[1][0]
    assert torch.equal(features, last)


def test_blocks_are_the_text_models():
    target = target_of("git")  # its image encoder has as many
    assert type(decoder_blocks(target)[0]).__name__ == "GitLayer"
    assert type(decoder_blocks(target_of("modernbert-decoder"))[0]).__name__ == "ModernBertDecoderLayer"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
def test_adapters_on_embedding_and_output_layer(kind):
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "num_hidden_layers": 4}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    modules = {"target_modules": ["q_proj"], kind: ["embed_tokens", "lm_head"]}
    settings = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5, init_lora_weights=False, **modules)
    model = peft.get_peft_model(base, settings).get_base_model()
    assert model.training
    draft = Eagle3DraftModel.from_target(model, range(100))
    assert (draft.config.vocab_size, draft.config.own_embeddings) == (VOCAB_SIZE, False)
    assert any(module.training for module in model.lm_head.modules()), "modes are put back"
    model.eval()
    expected = model.lm_head(torch.eye(HIDDEN_SIZE))[:, :100].T
    torch.testing.assert_close(draft.lm_head.weight, expected)
    plain = model.generate(prompt(5), max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(prompt(5), assistant_model=draft, max_new_tokens=8, do_sample=False), plain)
