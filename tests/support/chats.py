"""Tokenizers with chat templates of every kind that changes what is to be supervised, and a tiny target for them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


SPECIALS = ["<bos>", "<eos>", "<pad>", "<|start|>", "<|end|>"]

CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "Write a poem about the sea. The sea is wide, the sea is deep.\n\nIt sings.",
    "<think>\nLet me think about it.\n</think>\n\nThe answer is four.",
    "user\nassistant\nsystem\nYou are a helpful assistant.",
]

_TURNS = "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"

TEMPLATES = {
    # A default system message, as SmolLM2 has.
    "chatml": "{% if messages[0].role != 'system' %}{{ '<|start|>system\nYou are helpful.<|end|>\n' }}{% endif %}"
    + _TURNS
    + _PROMPT,
    # Llama 3: a beginning-of-text token of its own, trimmed content, no newline behind a turn.
    "bos": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}",
    "markers": "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _PROMPT,
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURNS
    + _PROMPT,
    # Phi 3: an end of text behind everything unless an answer is to follow.
    "trailing eos": _TURNS
    + "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}",
    # Qwen 3: thoughts are shown in the last answer only.
    "strips thoughts": "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' + c + '<|end|>\n' }}{% endfor %}" + _PROMPT,
    # R1: the prompt opens the thoughts, and no rendered turn shows them.
    "opens thoughts": "{% for m in messages %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' + c + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n<think>\n' }}{% endif %}",
    "no end of turn": "{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}",
}


def chat_tokenizer(template: str | None = "chatml") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that adds `<bos>` on its own, as Llama's does, with one of `TEMPLATES`."""
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


def tiny_target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A random Llama for the tokenizer, in float32. Call under a fixed seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
