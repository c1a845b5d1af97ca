"""A target that writes its own chats: what is in the file, and that an interruption leaves no trace in it."""

import json

import pytest
import torch

from eagle3_hf.training.data.encoding import prepare_dataset
from eagle3_hf.training.datagen.local_writer import GreedySequences
from eagle3_hf.training.datagen.synthesis import synthesize
from support.chats import chat_tokenizer, tiny_target


END = 4
SETTINGS = {"batch_size": 4, "max_new_tokens": 12, "max_user_tokens": 8, "progress": False}


def target_that_ends(tokenizer, chance_up):
    """A random target whose end of turn is made likelier by an addition to its logit."""
    torch.manual_seed(0)
    target = tiny_target(tokenizer)

    def favour_end(module, inputs, output):
        output.logits[..., END] += chance_up

    target.register_forward_hook(favour_end)
    return target


@pytest.fixture(scope="module")
def target(tokenizer):
    return target_that_ends(tokenizer, 3.0)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_file_holds_chats(target, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    assert synthesize(target, tokenizer, path, 30, **SETTINGS) == 30
    chats = lines_of(path)
    assert len(chats) == 30
    assert {tuple(chat) for chat in chats} == {("messages", "decoding", "finished")}
    assert {tuple(m["role"] for m in chat["messages"]) for chat in chats} == {("user", "assistant")}
    assert {chat["decoding"] for chat in chats} == {"greedy", "temperature_1"}
    assert {chat["finished"] for chat in chats} == {True, False}
    assert all(chat["messages"][0]["content"].strip() for chat in chats)
    assert not any("<|" in chat["messages"][0]["content"] for chat in chats)
    assert not any("<|end|>" in chat["messages"][1]["content"] for chat in chats)
    assert len({chat["messages"][0]["content"] for chat in chats}) > 20


def test_the_file_trains(target, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    synthesize(target, tokenizer, path, 8, **SETTINGS)
    written = [chat for chat in lines_of(path) if chat["messages"][1]["content"].strip()]
    rows = prepare_dataset(written, tokenizer, max_length=None)
    assert len(rows) > 4
    assert any(row["labels"][-1] == END for row in rows)


@pytest.fixture(scope="module")
def uninterrupted(target, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "chats.jsonl"
    synthesize(target, tokenizer, path, 10, **SETTINGS)
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.77, 0.999])
def test_resumed_equals_uninterrupted(target, tokenizer, tmp_path, uninterrupted, share):
    """Cut anywhere: between batches, inside a batch, inside a line."""
    path = tmp_path / "chats.jsonl"
    kept = uninterrupted[: int(share * len(uninterrupted))]
    path.write_bytes(kept)
    torch.manual_seed(hash(share) % 1000)
    assert synthesize(target, tokenizer, path, 10, **SETTINGS) == 10 - kept.count(b"\n")
    assert path.read_bytes() == uninterrupted


def test_interrupted_between_batches(target, tokenizer, tmp_path, uninterrupted, monkeypatch):
    """What is written survives an interruption, and the run after it ends at the same file."""
    path = tmp_path / "chats.jsonl"
    calls = []
    generate = target.generate

    def interrupted_generate(*args, **kwargs):
        calls.append(len(path.read_bytes()))
        if len(calls) > 3:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, "generate", interrupted_generate)
        with pytest.raises(KeyboardInterrupt):
            synthesize(target, tokenizer, path, 10, **SETTINGS)
    assert path.read_bytes().count(b"\n") == 4
    synthesize(target, tokenizer, path, 10, **SETTINGS)
    assert path.read_bytes() == uninterrupted


def test_a_complete_file_is_left_alone(target, tokenizer, tmp_path, uninterrupted, monkeypatch):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(uninterrupted)
    monkeypatch.setattr(target, "generate", None)
    assert synthesize(target, tokenizer, path, 10, **SETTINGS) == 0
    assert synthesize(target, tokenizer, path, 7, **SETTINGS) == 0
    assert path.read_bytes() == uninterrupted


def test_another_seed_writes_other_chats(target, tokenizer, tmp_path, uninterrupted):
    path = tmp_path / "chats.jsonl"
    synthesize(target, tokenizer, path, 10, seed=1, **SETTINGS)
    first = set(uninterrupted.splitlines())
    assert not first & set(path.read_bytes().splitlines())


def test_greedy_answers_are_those_of_generate(target, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    synthesize(target, tokenizer, path, 6, greedy_share=1.0, **SETTINGS)
    for chat in lines_of(path):
        assert chat["decoding"] == "greedy"
        prompt = tokenizer.apply_chat_template(
            chat["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**prompt, do_sample=False, max_new_tokens=12, eos_token_id=[1, END], pad_token_id=2)
        ids = output[0, prompt["input_ids"].shape[1] :].tolist()
        ended = [i for i, token in enumerate(ids) if token in (1, END)]
        assert chat["finished"] == bool(ended)
        answer = tokenizer.decode(ids[: ended[0]] if ended else ids).rstrip("\ufffd")
        assert chat["messages"][1]["content"].rstrip("\ufffd") == answer


def test_sampled_answers_only(target, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    synthesize(target, tokenizer, path, 4, greedy_share=0.0, temperature=0.7, **SETTINGS)
    assert {chat["decoding"] for chat in lines_of(path)} == {"temperature_0.7"}


def test_greedy_rows_leave_the_others_as_they_are():
    scores = torch.randn(3, 7)
    out = GreedySequences(torch.tensor([True, False, True]))(torch.zeros(3, 1, dtype=torch.long), scores)
    assert torch.equal(out[1], scores[1])
    for row in (0, 2):
        probs = out[row].softmax(-1)
        assert probs[scores[row].argmax()] == 1.0
        assert probs.sum() == 1.0


def test_user_turns_begin_with_the_seeds(target, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    seeds = ["What is the", "Write a poem about\n", "", "  "]
    synthesize(target, tokenizer, path, 12, seeds=seeds, **SETTINGS)
    users = [chat["messages"][0]["content"] for chat in lines_of(path)]
    assert all(user.startswith(("What is the", "Write a poem about")) for user in users)
    assert len({user[:5] for user in users}) == 2


def test_empty_user_turns_are_drawn_again(tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    target = target_that_ends(tokenizer, 7.5)
    lengths = []
    generate = target.generate
    target.generate = lambda ids, **kwargs: lengths.append(len(ids)) or generate(ids, **kwargs)
    synthesize(target, tokenizer, path, 4, **SETTINGS)
    assert len(lengths) > 2, "no user turn was empty: the test shows nothing"
    assert all(chat["messages"][0]["content"] for chat in lines_of(path))


def test_a_target_without_user_turns(tokenizer, tmp_path):
    target = target_that_ends(tokenizer, 1000.0)
    path = tmp_path / "chats.jsonl"
    with pytest.raises(RuntimeError, match="empty user turn 20 consecutive times.*seed phrases"):
        synthesize(target, tokenizer, path, 4, **SETTINGS)
    # A seed phrase alone is a user turn.
    synthesize(target, tokenizer, path, 4, seeds=["Write a poem."], **SETTINGS)
    assert {chat["messages"][0]["content"] for chat in lines_of(path)} == {"Write a poem."}


def test_a_user_turn_that_no_special_token_ends(tokenizer, tmp_path):
    """The mark that a template puts behind the user's text is cut off wherever the target writes it."""
    plain = chat_tokenizer()
    plain.chat_template = "{% for m in messages %}{{ '[INST]' + m.content }}{% endfor %}[/INST]"
    path = tmp_path / "chats.jsonl"
    target = target_that_ends(plain, 0.0)
    target.generate = lambda ids, **kwargs: torch.cat(
        [
            ids,
            torch.tensor(plain("The sea[/INST]is wide", add_special_tokens=False)["input_ids"]).expand(len(ids), -1),
        ],
        1,
    )
    synthesize(target, plain, path, 2, **SETTINGS)
    assert [chat["messages"][0]["content"] for chat in lines_of(path)] == ["The sea"] * 2


def test_the_callers_state_is_left_alone(target, tokenizer, tmp_path):
    target.train()
    state = torch.get_rng_state()
    synthesize(target, tokenizer, tmp_path / "chats.jsonl", 2, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)
    assert target.training
    target.eval()


def test_the_targets_generation_settings_do_not_bend_its_words(
    target, tokenizer, tmp_path, uninterrupted, monkeypatch
):
    monkeypatch.setattr(target.generation_config, "top_k", 1)
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 3.0)
    monkeypatch.setattr(target.generation_config, "temperature", 0.1)
    for name, value in {"min_p": 0.9, "typical_p": 0.1, "epsilon_cutoff": 0.5, "eta_cutoff": 0.5}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    monkeypatch.setattr(target.generation_config, "return_dict_in_generate", True)
    path = tmp_path / "chats.jsonl"
    synthesize(target, tokenizer, path, 10, **SETTINGS)
    assert path.read_bytes() == uninterrupted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_chats": 0}, "num_chats is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_user_tokens": -1}, "max_user_tokens is -1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"greedy_share": 2}, "greedy_share is 2"),
    ],
)
def test_settings_out_of_range(target, tokenizer, tmp_path, settings, message):
    path = tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match=message):
        synthesize(target, tokenizer, path, **{"num_chats": 4, **settings})
    assert not path.exists()


def test_template_arguments_reach_the_template(target, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    prompts = []
    generate = target.generate

    def recorded(ids, **kwargs):
        prompts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
        return generate(ids, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "generate", recorded)
        synthesize(target, tokenizer, tmp_path / "chats.jsonl", 1, template_kwargs={"mood": "merry"}, **SETTINGS)
    assert all(prompt.startswith("merry") for prompt in prompts)
