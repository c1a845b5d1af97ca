"""What is compared: columns from a command line, and how a head gets their settings."""

import pytest
from transformers import GenerationConfig

from eagle3_hf.evaluation.bench import benchmark_columns
from eagle3_hf.evaluation.columns import PLAIN, Column, check_names, parse_column, parse_tree
from support.drafts import new_draft, target_of


@pytest.fixture(scope="module")
def heads():
    return {name: new_draft(target_of("llama")) for name in ("one", "two")}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("15/4/3", {"num_assistant_tokens": 15, "assistant_tree_depth": 4, "assistant_tree_top_k": 3}),
        ("auto", {"num_assistant_tokens": "auto"}),
        ("auto/8/10", {"num_assistant_tokens": "auto", "assistant_tree_depth": 8, "assistant_tree_top_k": 10}),
    ],
)
def test_trees(text, fields):
    assert parse_tree(text) == fields


@pytest.mark.parametrize("text", ["15/4", "15/4/0", "a/b/c", "15,4,3", "", "auto/3", "auto/0/1", "-1/4/4", "1/2/3/4"])
def test_what_is_no_tree(text):
    with pytest.raises(ValueError, match="nodes/depth/top_k"):
        parse_tree(text)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("again:", Column("again")),
        ("again", Column("again")),
        (
            "n:assistant_window=64,num_assistant_tokens=auto",
            Column("n", "one", {"assistant_window": 64, "num_assistant_tokens": "auto"}),
        ),
        ("n:head=two", Column("n", "two")),
        ("n:head=two,tree=5/5/1", Column("n", "two", parse_tree("5/5/1"))),
        ("n:assistant_coupled_sampling=False", Column("n", "one", {"assistant_coupled_sampling": False})),
        ("n:repetition_penalty=1.1", Column("n", "one", call_settings={"repetition_penalty": 1.1})),
        ("n:head=none,repetition_penalty=1.1", Column("n", call_settings={"repetition_penalty": 1.1})),
        ("n:prompt_lookup_num_tokens=6", Column("n", call_settings={"prompt_lookup_num_tokens": 6})),
        ("n:suppress_tokens=[1,2],top_k=3", Column("n", "one", call_settings={"suppress_tokens": [1, 2], "top_k": 3})),
    ],
)
def test_columns_of_a_command_line(text, column, heads):
    assert parse_column(text, heads) == column


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (":tree=1/1/1", "has no name"),
        ("n:tree", "NAME:FIELD=VALUE"),
        ("n:tree=1/1", "nodes/depth/top_k"),
        ("n:assistant_windw=4", "assistant_windw is no setting of decoding; did you mean assistant_window?"),
        ("n:head=three", "there is no head three, but one, two"),
        ("n:max_new_tokens=3", "max_new_tokens is the same for all columns of a table"),
        ("n:temperature=1", "temperature is the same for all columns of a table; set temperatures"),
        ("n:num_return_sequences=2", "num_return_sequences cannot be compared"),
        ("n:head=none,assistant_window=3", "assistant_window is no setting"),
    ],
)
def test_what_is_no_column(text, words, heads):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        parse_column(text, heads)


def test_fields_that_a_head_declares_are_known(heads):
    heads["one"].generation_config.assistant_new_idea = 1
    try:
        assert parse_column("n:assistant_new_idea=2", heads) == Column("n", "one", {"assistant_new_idea": 2})
        with pytest.raises(ValueError, match="assistant_new_idea"):
            parse_column("n:head=two,assistant_new_idea=2", heads)
    finally:
        del heads["one"].generation_config.assistant_new_idea


def test_a_head_has_the_settings_only_for_a_while(heads):
    head = heads["one"]
    kept, before = head.generation_config, head.generation_config.to_dict()
    column = Column("n", "one", {"num_assistant_tokens": 5}, {"top_k": 3})
    with column.applied(heads) as arguments:
        assert arguments == {"assistant_model": head, "top_k": 3}
        assert head.generation_config.num_assistant_tokens == 5
    with pytest.raises(RuntimeError), column.applied(heads):
        raise RuntimeError
    assert head.generation_config is kept
    assert head.generation_config.to_dict() == before
    with PLAIN.applied(heads) as arguments:
        assert arguments == {}


def test_columns_of_a_benchmark(heads):
    assert [column.name for column in benchmark_columns(heads)] == [
        "plain",
        "prompt lookup 10",
        "prompt lookup 4",
        "one",
        "two",
    ]
    chosen = benchmark_columns({"head": heads["one"]}, ["4/2/2", "auto"], ["again:"], prompt_lookup=False)
    assert [column.name for column in chosen] == ["plain", "head 4/2/2", "head auto", "again"]
    typed = benchmark_columns(heads, columns={"narrow": {"assistant_window": 8}}, prompt_lookup=False)
    assert typed[-1] == Column("narrow", "one", {"assistant_window": 8})


def test_names_are_used_once(heads):
    with pytest.raises(ValueError, match="two columns have the name 'plain'"):
        benchmark_columns(heads, columns=["plain:tree=1/1/1"])
    check_names([PLAIN])


def test_only_one_text_at_a_time_is_looked_up():
    lookup = Column("n", call_settings={"prompt_lookup_num_tokens": 6})
    assert lookup.supports(1)
    assert not lookup.supports(2)
    assert PLAIN.supports(2)


def test_settings_without_a_head_are_those_of_transformers():
    """A new version may rename one, and it would then be taken for a head's."""
    assert hasattr(GenerationConfig(), "prompt_lookup_num_tokens")
    assert hasattr(GenerationConfig(), "max_matching_ngram_size")
