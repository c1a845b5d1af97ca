"""Looking at a head without its weights: what the report says, and every reason why it does not fit a target."""

import pytest
import torch
from transformers import AutoConfig

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from eagle3_hf.inspection import inspect_head, where
from eagle3_hf.published_formats import HeadFormatError
from support.families import tiny
from support.heads import new_head, write_folder
from support.published import config_of, shape_only, tiny_folder, tiny_tensors
from support.published.rows import INDICES, REFUSED, ROWS


def the(name: str):
    return next(row for row in ROWS if row.name == name)


@pytest.fixture(scope="module")
def target():
    return tiny("llama")


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory):
    """A target's config and nothing else."""
    folder = tmp_path_factory.mktemp("target")
    target.config.save_pretrained(folder)
    return folder


def line(report: str, title: str) -> str:
    return next(text for text in report.splitlines() if text.startswith(title)).removeprefix(title).strip()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_published_head_can_be_looked_at(row, tmp_path):
    found = inspect_head(shape_only(row, tmp_path))
    report = str(found)
    assert found.problems == []
    assert line(report, "format") == found.described.format_name
    assert all(note in report for note in found.described.notes)
    assert all(name in report for name in row.dropped)
    assert f"draft_vocab_size = {row.shape.draft_vocab}" in report
    for index in row.ids or []:
        assert f"hidden_states[{index}]" in report
    assert "names no layers" in report or row.ids
    theta, kind = row.rope["rope_theta"], row.rope["rope_type"]
    assert line(report, "rope").startswith(f"base {theta}, {'no scaling' if kind == 'default' else kind}")
    lent = line(report, "borrows")
    assert ("embedding" in lent) is not row.embed
    assert ("output layer" in lent) is not row.lm_head
    assert (lent == "nothing") is (row.embed and row.lm_head)


NO_MAP = "A draft vocabulary without its map"


@pytest.mark.parametrize("row", [row for row in REFUSED if row.name != NO_MAP], ids=lambda row: row.name)
def test_what_is_no_head_is_refused_here_too(row, tmp_path):
    with pytest.raises(HeadFormatError, match=row.refusal):
        inspect_head(shape_only(row, tmp_path))


def test_a_head_that_lacks_a_tensor_can_still_be_looked_at(tmp_path):
    [problem] = inspect_head(shape_only(next(row for row in REFUSED if row.name == NO_MAP), tmp_path)).problems
    assert "d2t" in problem


def test_the_report_in_full(tmp_path):
    report = str(inspect_head(shape_only(the("SpecForge, outputs of blocks"), tmp_path)))
    assert report.splitlines()[2:11] == [
        "parameters     308 M in the file, bfloat16",
        "borrows        embedding (579 M parameters)",
        "drafts         32000 tokens of a vocabulary of 201088",
        "rope           base 10000.0, no scaling",
        "reads          3 states of a target of width 2880",
        "      id  index                block",
        "       2  hidden_states[2]     output of block 1, input of block 2",
        "      18  hidden_states[18]    output of block 17, input of block 18",
        "      34  hidden_states[34]    output of block 33, input of block 34",
    ]
    assert line(report, "problems") == "none"


def test_indices_in_words(target):
    states, seen = None, []
    for block in target.model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        states = target(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    for block in target.model.layers:
        block._forward_hooks.clear()
    assert where(3, 8) == "output of block 2, input of block 3"
    assert states[3].equal(seen[2][1])
    assert states[3].equal(seen[3][0])
    assert where(0, 8) == "output of the embedding, input of block 0"
    assert states[0].equal(seen[0][0])
    assert "block 7, the last, before the final norm" in where(8, 8)
    assert not states[8].equal(seen[7][1])
    assert "after the final norm" in where(-1)
    assert where(8) == "output of block 7, input of block 8"  # of a target that nobody named


def test_a_target_that_fits_is_known_by_its_config_alone(tmp_path, target_folder):
    found = inspect_head(tiny_folder(the("SpecForge, outputs of blocks"), tmp_path), target_folder)
    assert (found.problems, found.target_layers) == ([], 8)
    assert line(str(found), "fits") == f"{target_folder} (8 blocks)"


def test_layer_ids_are_settled_with_the_target(tmp_path, target_folder):
    named = inspect_head(tiny_folder(the("SafeAILab"), tmp_path / "none"), target_folder)
    assert named.config.target_layer_ids == INDICES
    assert "names no layers: the reference's rule for 8 blocks is used" in line(str(named), "reads")
    taken_back = inspect_head(tiny_folder(the("ModelOpt, gpt-oss v3"), tmp_path / "v3"), target_folder)
    assert taken_back.config.target_layer_ids == [4, 6, 8]
    assert "[5, 7, 9]" in line(str(taken_back), "reads")
    assert "no entry of hidden_states" in str(taken_back)
    guess = inspect_head(tiny_folder(the("Ids of unknown meaning"), tmp_path / "guess"))
    assert "guess" in line(str(guess), "reads")


def test_every_misfit_is_listed(tmp_path, target_folder):
    found = inspect_head(shape_only(the("MLA, TorchSpec"), tmp_path), target_folder)
    width, vocabulary, depth = found.problems
    assert "7168" in width
    assert "64" in width
    assert "163840" in vocabulary
    assert "320" in vocabulary
    assert "58" in depth
    assert "8 layers" in depth
    report = str(found)
    assert "fits  " not in report
    assert all(problem in report for problem in found.problems)
    assert Eagle3DraftModel.from_pretrained  # looking loads nothing: the file is a hole


def test_a_head_made_for_another_depth(tmp_path, target_folder):
    draft = new_head(target_num_hidden_layers=5, target_layer_ids=[1, 2, 4])
    draft.save_pretrained(tmp_path)
    [problem] = inspect_head(tmp_path, target_folder).problems
    assert "5 layers" in problem
    assert "8" in problem


def test_a_model_serves_as_target_and_lends_what_it_has(tmp_path, target):
    folder = tiny_folder(the("MLA, NVIDIA without output layer"), tmp_path)
    assert inspect_head(folder, target).problems == []
    [problem] = inspect_head(folder, target.model).problems
    assert "output layer" in problem


def test_missing_and_strange_tensors_are_problems_of_the_head(tmp_path, target_folder):
    row = the("SpecForge")
    tensors = tiny_tensors(row)
    del tensors["midlayer.mlp.up_proj.weight"], tensors["d2t"]
    tensors["stray"] = torch.ones(3)
    folder = write_folder(tmp_path, config_of(row, True), tensors)
    for found in (inspect_head(folder), inspect_head(folder, target_folder)):
        said = "\n".join(found.problems)
        assert all(name in said for name in ("layers.0.mlp.up_proj.weight", "d2t", "stray"))
        assert len(found.problems) == 3
        assert said.splitlines()[0] in str(found)


def test_overrides_are_looked_at_as_they_would_be_loaded(tmp_path, target_folder):
    folder = tiny_folder(the("Ids of unknown meaning"), tmp_path)
    given = inspect_head(folder, target_folder, target_layer_ids=[1, 2, 8], rope_parameters={"rope_theta": 7.0})
    assert given.config.target_layer_ids == [1, 2, 8]
    assert given.described.notes == []
    assert line(str(given), "rope").startswith("base 7.0, no scaling")


def test_the_command(tmp_path, target_folder, capsys):
    command = ["inspect", str(tiny_folder(the("Ids of unknown meaning"), tmp_path)), "--target", str(target_folder)]
    assert main(command) == 0
    assert "[3, 5, 6] do not say" in capsys.readouterr().out
    assert main([*command, "--set", "target_layer_ids=[1,2,8]"]) == 0
    report = capsys.readouterr().out
    assert line(report, "notes") == "none"
    assert "hidden_states[1] " in report
    assert main([*command, "--set", "target_layer_ids=[1,2,9]"]) == 1
    assert "does not run with" in capsys.readouterr().out


def test_no_weights_are_read(tmp_path, target_folder, monkeypatch):
    monkeypatch.setattr(Eagle3DraftModel, "from_pretrained", None)
    assert not list(target_folder.glob("*.safetensors"))
    assert AutoConfig.from_pretrained(target_folder).num_hidden_layers == 8
    found = inspect_head(shape_only(the("AQ-MedAI"), tmp_path), target_folder)
    assert found.own_parameters > 10**9
    assert str(found)
