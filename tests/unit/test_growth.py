"""Growing a tree: the same as a slow reference that keeps no cache, and the draft's state is the committed text's."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3_hf import Eagle3Candidate, Eagle3DraftModel
from eagle3_hf.decoding import loop
from eagle3_hf.decoding.coupling import Noise
from eagle3_hf.decoding.draft.growth import CoupledRanking, greedy_ranking
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.tree_settings import TreeSettings
from support.drafts import ForetellingDraft, draft_of, half_vocabulary, new_draft, set_tree, target_of
from support.families import prompt
from support.trees import assert_valid


TREES = [(59, 8, 10), (15, 4, 4), (6, 3, 5), (4, 4, 1), (1, 1, 1), (3, 8, 2), (500, 2, 3), (60, 1, 40)]
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
VARIANTS = {
    "plain": {},
    "half vocabulary": {"draft_vocab": half_vocabulary()},
    "norms": {"norm_output": True, "norm_before_residual": True, "norm_before_fc": True, "qk_norm": True},
    "two layers, biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "narrow": {"hidden_size": 32, "own_embeddings": True, "intermediate_size": 48, "head_dim": 16},
    "borrowed head": {"own_lm_head": False, "fc_norm": True},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 3},
    "window of one": {"layer_types": ["sliding_attention"], "sliding_window": 1},
    "window beyond the text": {"layer_types": ["sliding_attention"], "sliding_window": 64},
    "window in one of two layers": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    | {"num_hidden_layers": 2},
    "latent": LATENT,
    "latent with a window": {**LATENT, "layer_types": ["sliding_attention"], "sliding_window": 4, "q_lora_rank": 20},
    "final output alone": {"use_aux_hidden_state": False, "final_norm": False},
    "half of the head rotated": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
}


def variant(name: str) -> Eagle3DraftModel:
    torch.manual_seed(3)
    draft = Eagle3DraftModel.from_target(target_of("llama"), **VARIANTS[name]).eval()
    for parameter in draft.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return draft


@torch.no_grad()
def features_of(ids: torch.Tensor, draft: Eagle3DraftModel) -> torch.Tensor:
    target = target_of("llama")
    with FeatureReader(target, draft.config.target_layer_ids) as reader:
        target(ids)
        return reader.take()


# ----- the slow reference --------------------------------------------------------------------------------------------


@torch.no_grad()
def slow_logits(draft, features, tokens, fed_back: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft over a whole sequence at once: the last `fed_back` rows read its own output of the row before.

    Returns the last row's output before the final norm, and its logits.
    """
    hidden = draft.fuse(features)
    length = tokens.shape[1]
    for row in range(length - fed_back, length):
        output = slow_pass(draft, hidden[:, :row], tokens[:, :row])
        hidden = torch.cat([hidden[:, :row], draft.feedback(output[:, -1:])], dim=1)
    last = slow_pass(draft, hidden, tokens)[:, -1:]
    return last, draft.compute_logits(last, draft.borrow(target_of("llama")))[0, 0]


def slow_pass(draft, hidden, tokens):
    from eagle3_hf.model.attention import CachedAttention

    embeds = draft.borrow(target_of("llama")).embed(tokens)
    return draft.run_layers(hidden, embeds, torch.arange(tokens.shape[1])[None], CachedAttention())


def slow_tree(draft, ids: torch.Tensor, rank, settings) -> list[tuple[tuple[int, ...], float]]:
    """The paths of the kept nodes with their scores, in pool order, by the algorithm's own words.

    Args:
        ids: (1, T) with the root last.
        rank: from logits (D,) and level to increments (D,).
    """
    nodes, depth, top_k = settings
    top_k = min(top_k, draft.config.draft_vocab_size)
    to_target = draft.draft_vocab_ids().tolist()
    features = features_of(ids[:, :-1], draft)
    pool: list[tuple[tuple[int, ...], float]] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(depth):
        children = []
        for path, score in frontier:
            tokens = torch.cat([ids[:, 1:], torch.tensor([path], dtype=torch.int64)], dim=1)
            _, logits = slow_logits(draft, features, tokens, fed_back=len(path))
            best = rank(logits, level).topk(top_k)
            for increment, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children.append(((*path, to_target[index]), score + increment))
        pool += children
        frontier = sorted(children, key=lambda child: -child[1])[:top_k]
    kept = sorted(range(len(pool)), key=lambda i: -pool[i][1])[:nodes]
    return [pool[i] for i in sorted(kept)]


def paths_of(tree) -> list[tuple[tuple[int, ...], float]]:
    tokens = tree.host()[0].tokens
    scores = tree.scores[0].tolist()
    paths = [tree.path(0, node)[1:] for node in range(1, len(tokens))]
    return [(tuple(tokens[i] for i in path), scores[path[-1]]) for path in paths]


def assert_same_tree(tree, expected) -> None:
    assert_valid(tree)
    found = paths_of(tree)
    # The likeliest path comes first; the order of the other nodes is that of the pool.
    found, expected = sorted(found), sorted(expected)
    assert [path for path, _ in found] == [path for path, _ in expected]
    torch.testing.assert_close(
        torch.tensor([score for _, score in found]),
        torch.tensor([score for _, score in expected]),
        rtol=1e-4,
        atol=1e-4,
    )


def grow(draft, ids: torch.Tensor, settings, **kwargs):
    candidate = Eagle3Candidate(target_of("llama"), draft, TreeSettings(*settings), **kwargs)
    return candidate, candidate.draft_tree(DraftInputs(features_of(ids[:, :-1], draft), ids[:, 1:]))


@pytest.mark.parametrize("settings", TREES, ids=str)
def test_the_tree_of_a_slow_reference(settings):
    draft, ids = variant("half vocabulary"), prompt(9, 1)
    _, tree = grow(draft, ids, settings)
    assert_same_tree(tree, slow_tree(draft, ids, lambda logits, level: logits.log_softmax(-1), settings))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_head_grows_the_reference_tree(name):
    draft, ids = variant(name), prompt(7, 2)
    _, tree = grow(draft, ids, (12, 4, 3))
    assert_same_tree(tree, slow_tree(draft, ids, lambda logits, level: logits.log_softmax(-1), (12, 4, 3)))


def test_an_eager_draft_grows_the_same_tree():
    ids, trees = prompt(9, 1), []
    for attention in ("sdpa", "eager"):
        draft = variant("half vocabulary")
        draft.set_attn_implementation(attention)
        trees.append(grow(draft, ids, (15, 4, 4))[1])
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.9)])


@pytest.mark.parametrize("warpers", [LogitsProcessorList(), WARPERS], ids=["T=1", "warped"])
@pytest.mark.parametrize("settings", [(15, 4, 4), (4, 4, 1)], ids=str)
def test_the_noise_ranks_the_tree(warpers, settings):
    draft, ids = variant("half vocabulary"), prompt(9, 1)
    torch.manual_seed(5)
    noise = [torch.empty(1, 320).exponential_() for _ in range(4)]

    def rank(logits, level):
        warped = warpers(None, logits[None])[0].log_softmax(-1)
        return (warped - noise[level][0, draft.draft_vocab_ids()].log()).log_softmax(-1)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    _, tree = grow(draft, ids, settings, noise=Noise(1, 320, "cpu"), warpers=list(warpers))
    assert torch.equal(torch.get_rng_state(), state), "looking ahead moves nothing"
    expected = slow_tree(draft, ids, rank, settings)
    assert_same_tree(tree.trimmed(), [node for node in expected if node[1] > -torch.inf])


def test_without_the_noise_the_warped_probabilities_rank():
    draft, ids = variant("half vocabulary"), prompt(9, 1)
    _, tree = grow(draft, ids, (15, 4, 4), noise=Noise(1, 320, "cpu"), warpers=list(WARPERS), coupled=False)
    expected = slow_tree(draft, ids, lambda logits, level: WARPERS(None, logits[None])[0].log_softmax(-1), (15, 4, 4))
    assert_same_tree(tree.trimmed(), [node for node in expected if node[1] > -torch.inf])


# ----- rankings ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0, 30.0, 1e4]), st.booleans())
def test_increments_are_never_positive_and_parents_are_kept(seed, scale, sampled):
    """Ties (scale 0), certainty (log p = 0) and noise: a kept node's parent is kept, or `validate` says so."""
    draft, ids = copy.copy(variant_of_the_session()), prompt(5, seed)
    draft.compute_logits = lambda hidden, borrowed=None: (
        scale * Eagle3DraftModel.compute_logits(draft, hidden, borrowed)
    )
    torch.manual_seed(seed)
    noise = Noise(1, 320, "cpu") if sampled else None
    _, tree = grow(draft, ids, (15, 4, 4), noise=noise)
    assert_valid(tree)
    parents = tree.parents[0, 1:]
    assert bool((tree.scores[0, 1:] <= tree.scores[0, parents]).all())
    ranking = greedy_ranking if noise is None else CoupledRanking(noise, draft.draft_vocab_ids(), [])
    _, increments, log_probs = ranking(scale * torch.randn(1, 3, 160), 0, 10)
    assert increments.dtype == log_probs.dtype == torch.float32
    assert increments.max() <= 0


_KEPT: list[Eagle3DraftModel] = []


def variant_of_the_session() -> Eagle3DraftModel:
    if not _KEPT:
        _KEPT.append(variant("half vocabulary"))
    return _KEPT[0]


def test_scores_are_float32_in_half_precision():
    draft, ids = variant("half vocabulary").to(torch.bfloat16), prompt(9, 1)
    _, tree = grow(draft, ids, (15, 4, 4))
    assert tree.scores.dtype == tree.log_probs.dtype == torch.float32
    # Two logits may be the same number in half precision, but sums of them are not rounded to it.
    assert len(set(tree.scores[0].tolist())) >= 14, "sums of half precision numbers would tie"


class KnowsTheTarget(ForetellingDraft):
    """A head that is told the target's own logits: its `q` is the target's `p`, wherever it stays on the text."""

    def _guess(self, row, place, logits):
        logits[:] = self.known[min(place, len(self.known) - 1)]


def test_known_noise_foretells_what_a_good_head_would_miss():
    target = target_of("llama")
    draft = set_tree(new_draft(target, half=False), (4, 4, 1))
    draft.__class__ = KnowsTheTarget
    texts, accepted = [], {}
    for known in (True, False):
        draft.generation_config.assistant_coupled_sampling = known
        torch.manual_seed(0)
        vanilla = target.generate(
            prompt(8), do_sample=True, top_k=0, max_new_tokens=40, return_dict_in_generate=True, output_logits=True
        )
        draft.known = [logits[0] for logits in vanilla.logits]
        draft.foretell(vanilla.sequences[0, 8:])
        torch.manual_seed(0)
        ours = target.generate(prompt(8), do_sample=True, top_k=0, max_new_tokens=40, assistant_model=draft)
        assert torch.equal(ours, vanilla.sequences)
        texts.append(ours)
        accepted[known] = draft.stats.mean_accepted
    assert accepted[True] > 3.5, "q = p and e known: every token is foreseen"
    assert accepted[False] < 1.5


# ----- settings ------------------------------------------------------------------------------------------------------


def test_settings_are_capped_by_depth_and_pool():
    assert TreeSettings(59, 8, 10).capped(8) == TreeSettings(59, 8, 10)
    assert TreeSettings(59, 8, 10).capped(2) == TreeSettings(59, 2, 10)
    assert TreeSettings(59, 8, 10).capped(1) == TreeSettings(10, 1, 10)
    assert TreeSettings(500, 3, 2).capped(8) == TreeSettings(10, 3, 2)
    assert TreeSettings(8, 8, 1).capped(3) == TreeSettings(3, 3, 1)


def test_more_children_than_the_draft_has_words():
    target = target_of("llama")
    draft = Eagle3DraftModel.from_target(target, draft_vocab=[5, 9, 200]).eval()
    _, tree = grow(draft, prompt(5), (59, 3, 10))
    assert_valid(tree.trimmed())
    assert len(tree.host()[0].tokens) - 1 == 3 + 9 + 9


def test_depth_left_decides():
    draft, ids = draft_of("llama"), prompt(6)
    for depth, deepest in ((0, 0), (1, 1), (2, 2), (50, 4)):
        candidate = Eagle3Candidate(target_of("llama"), draft.foretell([]), TreeSettings(4, 4, 1))
        tree = candidate.draft_tree(DraftInputs(features_of(ids[:, :-1], draft), ids[:, 1:]), max_depth=depth)
        assert tree.max_depth == deepest


# ----- the state between rounds --------------------------------------------------------------------------------------


def cached(candidate) -> list[torch.Tensor]:
    length = candidate._cache.length
    return [states[:, :, :length] for buffers in candidate._cache._buffers for states in buffers]


@pytest.mark.parametrize(
    "name", ["half vocabulary", "two layers, biases", "window in one of two layers", "latent with a window"]
)
@pytest.mark.parametrize("cuts", [[], [1], [4, 5, 9], list(range(1, 11))], ids=str)
def test_rows_fed_in_pieces_with_trees_between(name, cuts):
    """However the text came, the draft's cache is that of true features alone, and no tree leaves a trace in it."""
    draft, ids = variant(name), prompt(12, 4)
    features = features_of(ids[:, :-1], draft)
    whole, expected = grow(draft, ids, (15, 4, 4))
    pieces = Eagle3Candidate(target_of("llama"), draft, TreeSettings(15, 4, 4))
    for start, end in zip([0, *cuts], [*cuts, 11], strict=True):
        tree = pieces.draft_tree(DraftInputs(features[:, start:end], ids[:, start + 1 : end + 1]))
    assert pieces._cache.length == 11
    for mine, theirs in zip(cached(pieces), cached(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert torch.equal(tree.tokens, expected.tokens)
    assert torch.equal(tree.parents, expected.parents)


@pytest.mark.parametrize("tree", ["paper", "cpu", "chain"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_round_starts_from_the_true_features_of_the_whole_text(family, tree, monkeypatch):
    """After accepted paths of all shapes, the draft's row equals one computed from scratch over the text so far."""
    target, draft = target_of(family), set_tree(draft_of(family, half=False), tree)
    ids = prompt(9, 2)
    text = target.generate(ids, max_new_tokens=30)
    rows = []

    class Watching(Eagle3Candidate):
        def extend(self, inputs):
            super().extend(inputs)
            rows.append((self._cache.length, self._last, inputs.tokens))

    monkeypatch.setattr(loop, "Eagle3Candidate", Watching)
    target.generate(ids, max_new_tokens=30, assistant_model=draft.foretell(text[0, 9:]))
    assert draft.stats.mean_accepted > 0.5
    with torch.no_grad(), FeatureReader(target, draft.config.target_layer_ids) as reader:
        target(text)
        hidden = draft(text, reader.take()).hidden_states
    for length, last, tokens in rows:
        assert tokens[0, -1] == text[0, length], "a row's token is the one after its feature's"
        torch.testing.assert_close(last[0, 0], hidden[0, length - 1], rtol=0, atol=1e-4)


def test_a_call_leaves_the_draft_as_it_was():
    target, draft = target_of("llama"), new_draft(target_of("llama"), dtype=torch.bfloat16)
    draft.train()
    draft.fc.weight.requires_grad_(False)
    before = copy.deepcopy(draft.state_dict())
    flags = [(name, p.requires_grad, p.dtype, p.device) for name, p in draft.named_parameters()]
    target.generate(prompt(6), max_new_tokens=8, assistant_model=draft.foretell([]))
    assert draft.training
    assert [(name, p.requires_grad, p.dtype, p.device) for name, p in draft.named_parameters()] == flags
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert all(p.grad is None for p in draft.parameters())
