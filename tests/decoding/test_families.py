"""The tiny targets are fit for the tests that use them: repeatable, varied, and calm enough for float32."""

import pytest
import torch

from support.families import FAMILIES, VOCAB_SIZE, WINDOW, prompt, tiny


NEW_TOKENS = 32


def longest_run(ids: list[int]) -> int:
    """Length of the longest stretch of one repeated token."""
    longest = current = 1
    for before, after in zip(ids, ids[1:], strict=False):
        current = current + 1 if before == after else 1
        longest = max(longest, current)
    return longest


@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_same_weights(name):
    state = torch.get_rng_state()
    first, again, other = (tiny(name, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_varies_and_rounding_stays_below_a_near_tie(name):
    target = tiny(name)
    runs = []
    for seed in range(2):
        ids = prompt(4 + 27 * seed, seed)
        out = target.generate(ids, max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True)
        stepwise = torch.cat(out.logits)
        with torch.no_grad():
            at_once = target(out.sequences[:, :-1]).logits[0, ids.shape[1] - 1 :]
        assert out.sequences.shape[1] == ids.shape[1] + NEW_TOKENS, "nothing may end the text early"
        torch.testing.assert_close(at_once, stepwise, rtol=0, atol=1e-5 * stepwise.abs().max().item())
        runs.append(longest_run(out.sequences[0, ids.shape[1] :].tolist()))
    assert min(runs) <= NEW_TOKENS // 8, f"longest repetitions {runs}"


def test_shape_of_the_targets():
    for name in FAMILIES:
        config = tiny(name).config
        assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (8, 64, VOCAB_SIZE)
    assert tiny("mistral_sw").config.sliding_window == WINDOW
    assert set(tiny("gemma3").config.layer_types) == {"full_attention", "sliding_attention"}
    assert tiny("gpt_oss", num_hidden_layers=2).config.num_hidden_layers == 2
