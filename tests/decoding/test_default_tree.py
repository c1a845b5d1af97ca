"""The settings of a head's trees: limits by the device of the target where nothing is set; what is set is kept."""

import copy
import logging

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.evaluation.columns import Column, parse_tree, tree_in_words
from eagle3_hf.model.tree_settings import TreeSettings, tree_settings
from support.drafts import NEW_TOKENS, new_draft, set_tree, target_of
from support.families import prompt
from support.heads import new_head, published, write_folder


CPU, PAPER = TreeSettings(31, 8, 4, True, 16), TreeSettings(59, 8, 10, True, 16)
FIXED = TreeSettings(59, 8, 10, lookup_levels=16)
# An accelerator's stand-in: weights that are not on a CPU.
ELSEWHERE = "meta"


@pytest.fixture
def target():
    return target_of("llama")


@pytest.fixture(scope="module")
def elsewhere():
    return copy.deepcopy(target_of("llama")).to(ELSEWHERE)


@pytest.fixture
def said():
    """What the library says at level info, as if nothing had been said before."""

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    lines: list[str] = []
    handler, logger = Lines(logging.INFO), logging.getLogger("eagle3_hf.model.tree_settings")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.Logger.info_once.cache_clear()
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def verified(target, draft, **kwargs) -> int:
    """The most nodes that a pass of the target checked; the text is compared with the plain one."""
    sizes = []
    told = target.generate(prompt(7), max_new_tokens=NEW_TOKENS)
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ours = target.generate(prompt(7), max_new_tokens=NEW_TOKENS, assistant_model=draft.foretell(told[0, 7:]), **kwargs)
    handle.remove()
    assert torch.equal(ours, told)
    return max(sizes[1:]) - 1  # without the prefill, and the root


def test_a_head_without_settings_sizes_its_trees_within_limits_of_the_device(target, elsewhere, said):
    draft = new_draft(target, half=False)
    assert tree_settings(draft, target) == CPU
    assert tree_settings(draft, elsewhere) == PAPER
    assert [line.split(":")[0] for line in said] == [
        "The draft head does not set its number of nodes and its target is on a CPU",
        "The draft head does not set its number of nodes and its target is on an accelerator",
    ]
    assert "what pays, at most 31 / 8 / 4 (nodes / levels / children)" in said[0]
    assert "what pays, at most 59 / 8 / 10 (nodes / levels / children)" in said[1]


def test_a_call_drafts_the_default_and_says_so_once(target, said):
    draft = new_draft(target, half=False)
    assert 0 < verified(target, draft) <= 31
    verified(target, draft)
    assert len(said) == 1
    assert draft.stats.plain_rounds < draft.stats.rounds
    assert draft.generation_config.num_assistant_tokens is None, "a call leaves the head as it was"


def test_no_clock_decides_where_results_must_be_the_same(target, elsewhere):
    draft = new_draft(target, half=False)
    torch.use_deterministic_algorithms(True)
    try:
        assert tree_settings(draft, target) == TreeSettings(11, 3, 4, lookup_levels=16)
        assert tree_settings(draft, elsewhere) == FIXED
        assert verified(target, draft, assistant_lookup=False) == 11
    finally:
        torch.use_deterministic_algorithms(False)
    assert draft.generation_config.num_assistant_tokens is None, "a call leaves the head as it was"


def test_a_part_on_an_accelerator_is_enough(target):
    """A target spread over devices decodes at the accelerator's price."""
    spread = copy.deepcopy(target)
    spread.model.layers[2].to(ELSEWHERE)
    assert tree_settings(new_draft(target), spread) == PAPER


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((59, 8, 10), FIXED),
        ((5, 5, 1), TreeSettings(5, 5, 1, lookup_levels=16)),
        ((20, None, None), TreeSettings(20, 8, 10, lookup_levels=16)),
    ],
)
def test_what_is_set_is_kept_on_every_device(target, elsewhere, given, expected, said):
    """Where the number of nodes is set, the other fields are the paper's, unless they are set too."""
    draft = set_tree(new_draft(target), given)
    assert tree_settings(draft, target) == tree_settings(draft, elsewhere) == expected
    assert not said


@pytest.mark.parametrize("number", [None, "auto"])
def test_levels_and_children_alone_are_limits(target, elsewhere, number):
    draft = set_tree(new_draft(target), (number, None, 1))
    assert tree_settings(draft, target) == TreeSettings(31, 8, 1, True, 16)
    assert tree_settings(draft, elsewhere) == TreeSettings(59, 8, 1, True, 16)


def test_a_calls_own_number_of_nodes_and_lookup(target, elsewhere):
    draft = new_draft(target, half=False)
    expected = TreeSettings(30, 8, 10, lookup_levels=16)
    assert tree_settings(draft, target, 30) == tree_settings(draft, elsewhere, 30) == expected
    assert tree_settings(draft, target, 30, False) == TreeSettings(30, 8, 10)
    assert verified(target, draft, num_assistant_tokens=30) == 30
    draft.generation_config.assistant_lookup = False
    assert tree_settings(draft, target, 30) == TreeSettings(30, 8, 10)
    with pytest.raises(ValueError, match="assistant_lookup must be True or False, got 3"):
        tree_settings(draft, target, 30, 3)


def test_published_heads_have_no_settings_and_saved_ones_keep_theirs(target, elsewhere, tmp_path):
    config, tensors = published(new_head(target_layer_ids=None))
    head = Eagle3DraftModel.from_pretrained(write_folder(tmp_path / "published", config, tensors))
    assert tree_settings(head, target) == CPU
    head.save_pretrained(tmp_path / "unset")
    assert tree_settings(Eagle3DraftModel.from_pretrained(tmp_path / "unset"), elsewhere) == PAPER
    set_tree(head, (59, 8, 10)).save_pretrained(tmp_path / "set")
    assert tree_settings(Eagle3DraftModel.from_pretrained(tmp_path / "set"), target) == FIXED
    head.generation_config.assistant_lookup = False
    head.save_pretrained(tmp_path / "off")
    assert tree_settings(Eagle3DraftModel.from_pretrained(tmp_path / "off"), target) == TreeSettings(59, 8, 10)


def test_a_report_tells_a_default_from_a_setting(target):
    heads = {"head": new_draft(target)}
    column = Column("head", "head")
    assert tree_in_words(column, heads, target) == ("auto/8/4 (the default on cpu)", False)
    assert tree_in_words(Column("wide", "head", parse_tree("15/4/4")), heads, target) == ("15/4/4", False)
    assert tree_in_words(Column("chain", "head", parse_tree("5/5/1")), heads, target) == ("5/5/1", True)
    assert tree_in_words(Column("auto", "head", parse_tree("auto/4/4")), heads, target) == ("auto/4/4", False)
    assert tree_in_words(column, heads, target) == ("auto/8/4 (the default on cpu)", False)
