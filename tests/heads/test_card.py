"""Model cards: what they say, and that nobody's words are ever written over."""

import logging
import os
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig

from eagle3_hf.export import ENGINES, card_text, write_card
from eagle3_hf.export.card import is_replaceable, looks_like_hub_id
from support.heads import new_head


REPOSITORY = Path(__file__).resolve().parents[2]
TREE = GenerationConfig(num_assistant_tokens=11, assistant_tree_depth=3, assistant_tree_top_k=4)
TARGET = {"target_name_or_path": "org/Model-1B", "target_model_type": "llama", "target_num_hidden_layers": 8}


def config_of(**overrides):
    return new_head(**{**TARGET, **overrides}).config


def text_of(**overrides) -> str:
    return card_text(config_of(**overrides), TREE)


def empty_template() -> str:
    """What a push writes where there is no card (transformers.utils.hub.create_and_tag_model_card)."""
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    metadata = ModelCardData(tags=["mine"], library_name="transformers")
    return str(ModelCard.from_template(metadata, model_description=description))


# ----- what is said --------------------------------------------------------------------------------------------------


def test_metadata():
    data = ModelCard(text_of()).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert data.base_model == "org/Model-1B"
    assert data.base_model_relation == "adapter"
    assert data.tags == ["eagle3", "speculative-decoding", "draft-model"]


@pytest.mark.parametrize("name", [None, "/home/me/model", "./model", "a/b/c", "model folder/x"])
def test_no_base_model_but_a_hub_id(name):
    text = text_of(target_name_or_path=name)
    assert ModelCard(text).data.base_model is None
    assert "# EAGLE-3 head for a llama model" in text
    assert name is None or name not in text


def test_a_folder_of_that_name_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert looks_like_hub_id("org/model")
    monkeypatch.chdir(tmp_path)
    assert not looks_like_hub_id("org/model")


def test_facts():
    text = card_text(config_of(norm_output=True, target_layer_ids=[0, 2, 8]), TREE, coverage=0.9684)
    for words in (
        "# EAGLE-3 head for Model-1B",
        "0, 2, 8 as `hidden_states` indices: the embedding's output, the output of block 1, the output of block 7",
        "of 8 (counted from 0)",
        "128 of 320 tokens, 96.8% of the training targets",
        "| embedding | the target's, borrowed |",
        "| RoPE | default, base 10000 |",
        "norm_output (EAGLE-3.1)",
        "11 / 3 / 4 (drafted nodes / levels / children per node)",
        'AutoModelForCausalLM.from_pretrained("org/Model-1B")',
    ):
        assert words in text
    assert "Acceptance" not in text


def test_heads_that_say_less():
    text = card_text(config_of(target_layer_ids=None, draft_vocab_size=320, own_lm_head=False))
    assert "not recorded; they follow from the target" in text
    assert "the target's, 320 tokens" in text
    assert "| output layer | the target's, borrowed |" in text
    assert "tree saved with it" not in text
    assert "| tree | the size that pays, chosen round by round |" in text
    some = card_text(config_of(), GenerationConfig(num_assistant_tokens=20))
    assert "| tree saved with it | 20 / 8 / 10 (drafted" in some
    assert "after its final norm, alone" in text_of(use_aux_hidden_state=False, target_layer_ids=[-1])


def test_acceptance_table():
    rows = {"HumanEval": {"tau": 2.45, "speed-up": "1.56x"}, "GSM8K": {"tau": 2.16}}
    text = card_text(config_of(), TREE, acceptance=rows)
    assert "| task | tau | speed-up |\n|---|---|---|\n| HumanEval | 2.45 | 1.56x |\n| GSM8K | 2.16 |  |" in text


def test_how_to_serve_or_why_not():
    text = text_of()
    assert "cannot run it" not in text
    assert text.count("eagle3-hf convert THIS_HEAD OUT --to ") == 3
    assert """vllm serve org/Model-1B --speculative-config '{"method": "eagle3", "model": "OUT",""" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path OUT" in text
    text = text_of(norm_before_residual=True, fc_bias=True)
    assert text.count("cannot run it") == 3
    assert "- norm_before_residual=True" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_card_of_an_export(engine):
    text = card_text(config_of(), TREE, engine=engine)
    assert ModelCard(text).data.library_name == engine
    assert "eagle3-hf convert" not in text
    assert "THIS_HEAD" in text


# ----- whose card it is ----------------------------------------------------------------------------------------------


def write(folder: Path, **overrides) -> Path | None:
    return write_card(folder, config_of(**overrides), TREE)


def read(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_an_untouched_card_is_renewed(tmp_path):
    assert write(tmp_path) == tmp_path / "README.md"
    first = read(tmp_path)
    assert write(tmp_path, norm_output=True) == tmp_path / "README.md"
    assert read(tmp_path) != first
    assert write(tmp_path) is not None
    assert read(tmp_path) == first


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\nTrained on my own chats.\n",
        lambda text: text.replace("drafts", "proposes"),
        lambda text: text.replace("---\nbase_model", "---\nlicense: mit\nbase_model", 1),
        lambda text: text.replace("- eagle3\n", "- eagle3\n- math\n", 1),
        lambda text: "My own words.",
        lambda text: "",
    ],
    ids=["added", "changed", "license", "tag", "own", "emptied"],
)
def test_an_edited_card_is_kept(tmp_path, edit):
    write(tmp_path)
    edited = edit(read(tmp_path))
    assert edited != read(tmp_path)
    (tmp_path / "README.md").write_text(edited, encoding="utf-8")
    assert write(tmp_path, norm_output=True) is None
    assert read(tmp_path) == edited


def test_what_tools_do_to_a_card_is_no_edit(tmp_path):
    """The Hub's library writes metadata in its own order and style; version control may change line ends."""
    write(tmp_path)
    ModelCard.load(tmp_path / "README.md").save(tmp_path / "README.md")
    assert is_replaceable(read(tmp_path))
    assert is_replaceable(read(tmp_path).replace("\n", "\r\n"))


def test_the_empty_template_of_a_push_gives_way(tmp_path):
    (tmp_path / "README.md").write_text(empty_template(), encoding="utf-8")
    assert write(tmp_path) is not None
    assert "EAGLE-3 head for Model-1B" in read(tmp_path)
    assert ModelCard(read(tmp_path)).data.tags[-1] == "mine"
    filled = empty_template().replace("[More Information Needed]", "me", 1)
    (tmp_path / "README.md").write_text(filled, encoding="utf-8")
    assert write(tmp_path) is None


def test_the_demo_head_s_card_is_a_person_s():
    cards = sorted((REPOSITORY / "examples" / "heads").glob("*/README.md"))
    assert cards
    assert not any(is_replaceable(card.read_text(encoding="utf-8")) for card in cards)


def test_a_card_never_breaks_a_save(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("eagle3_hf.export.card.logger", logging.getLogger("card"))
    assert write(tmp_path / "no such folder") is None
    (tmp_path / "README.md").write_bytes(b"\xff\xfe not utf-8")
    assert write(tmp_path) is None
    assert (tmp_path / "README.md").read_bytes() == b"\xff\xfe not utf-8"
    assert write_card(tmp_path / os.devnull, object()) is None
    assert caplog.text.count("No model card was written") == 3


def test_metadata_that_does_not_parse_is_a_person_s(tmp_path):
    (tmp_path / "README.md").write_text("---\n: [\n---\nwords", encoding="utf-8")
    assert write(tmp_path) is None
    assert read(tmp_path) == "---\n: [\n---\nwords"
