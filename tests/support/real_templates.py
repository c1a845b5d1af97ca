"""Small chat templates in the manner of real families: their frames around turns, their liberties with thoughts."""

from transformers import PreTrainedTokenizerFast

from support.chats import chat_tokenizer


# Special tokens of each family; the first ends a turn.
SPECIALS = {
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "qwen3": ["<|im_end|>", "<|im_start|>"],
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "gemma": ["<end_of_turn>", "<start_of_turn>", "<bos>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]"],
    "r1": ["<|end_of_sentence|>", "<|User|>", "<|Assistant|>"],
    "channels": ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
}

TEMPLATES = {
    "llama3": "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # Thoughts of the last answer only, an empty block where it has none; enable_thinking=false puts it there.
    "qwen3": "{% for m in messages %}{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    # No generation prompt of its own, a space before the answer, the system text inside the first user turn.
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    # The prompt opens the thoughts; rendered turns do not show them, and nothing is known of reasoning_content.
    "r1": "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}",
    # Thoughts under the key `thinking`, in a channel of their own.
    "channels": "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% else %}"
    "{% if m.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
}


def real_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with a family's special tokens and its template."""
    tokenizer = chat_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[family]})
    tokenizer.eos_token = SPECIALS[family][0]
    if family in ("llama3", "mistral"):
        tokenizer.bos_token = SPECIALS[family][1]
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
