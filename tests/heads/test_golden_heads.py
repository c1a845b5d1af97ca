"""Heads that other libraries wrote, one tensor taken away or added, and through our own layout and every engine's.

That they give their libraries' own outputs is in `test_loading`.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from eagle3_hf import Eagle3DraftModel, export_head
from eagle3_hf.export import FORMATS, unsupported_features
from eagle3_hf.model.configuration_eagle3 import FIELDS
from eagle3_hf.published_formats import HeadFormatError
from support.heads import write_folder


# What only the target knows, written down where it was at hand.
RECORDED = {"target_model_type", "target_num_hidden_layers", "target_name_or_path"}
NAMES = [
    *(f"eagle-tiny/{name}" for name in ("base_bin_fp16", "wide_target")),
    *(f"specforge-tiny/{name}" for name in ("base", "eagle31", "full_vocab", "llama3", "with_embed_wide_target")),
    *(f"speculators-tiny/{name}" for name in ("base", "eagle31", "nbr_nbfc", "qwen3arch", "two_layers")),
]
IDS = [2, 4, 5]  # of tiny-target; only speculators' files name their own
every_head = pytest.mark.parametrize("name", NAMES)
load = Eagle3DraftModel.from_pretrained


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "pytorch_model.bin"
    return torch.load(file, weights_only=True) if file.exists() else load_file(folder / "model.safetensors")


def may_be_left_out(draft: Eagle3DraftModel, name: str) -> bool:
    """`t2d` follows from `d2t`, a map of every token from nothing, and what the target has too is borrowed."""
    config = draft.config
    whole = config.draft_vocab_size == config.vocab_size
    borrowed = {"embed_tokens.weight": config.hidden_size == config.target_hidden_size, "lm_head.weight": whole}
    return {"t2d": True, "d2t": whole, **borrowed}.get(name, False)


def test_these_are_all_that_are_there(shared):
    found = {str(path.parent.relative_to(shared / "heads")) for path in (shared / "heads").glob("*/*/config.json")}
    assert found == set(NAMES)


@every_head
def test_without_any_one_tensor(shared, name, tmp_path):
    config, tensors = config_of(shared / "heads" / name), tensors_of(shared / "heads" / name)
    whole = load(shared / "heads" / name)
    for number, lost in enumerate(tensors):
        rest = {other: tensor for other, tensor in tensors.items() if other != lost}
        folder = write_folder(tmp_path / str(number), config, rest)
        ours = lost.replace("midlayer.", "layers.0.")
        if not may_be_left_out(whole, ours):
            with pytest.raises(HeadFormatError) as caught:
                load(folder)
            said = str(caught.value).replace(str(folder), "")
            assert lost in said or ours in said or lost.removesuffix(".weight") in said, f"without {lost}: {said}"
            continue
        draft = load(folder)
        assert ours != "embed_tokens.weight" or not draft.config.own_embeddings
        assert ours != "lm_head.weight" or not draft.config.own_lm_head
        state = whole.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in draft.state_dict().items())


STRAYS = {"fc.bias": 64, "stray.weight": 3, "layers.0.self_attn.v_norm.weight": 16, "norm.bias": 64}
# One more may also be a part of an EAGLE-3 head, if its flag is not denied.
USED = {"fc.bias": "fc_bias"}


@every_head
@pytest.mark.parametrize("stray", STRAYS)
def test_with_one_tensor_too_many(shared, name, stray, tmp_path):
    tensors = {**tensors_of(shared / "heads" / name), stray: torch.full((STRAYS[stray],), 0.5)}
    folder = write_folder(tmp_path, config_of(shared / "heads" / name), tensors)
    if stray in USED:
        draft = load(folder)
        assert getattr(draft.config, USED[stray])
        assert draft.state_dict()[stray].eq(0.5).all()
        return
    with pytest.raises(HeadFormatError) as caught:
        load(folder)
    assert stray in str(caught.value).replace(str(folder), "")


@every_head
def test_saved_exported_and_loaded_again_it_is_the_same(shared, name, tmp_path):
    """load -> save -> load -> export -> load, for each engine that can run the head."""
    verifier = shared / "heads" / "tiny-target"
    target = AutoModelForCausalLM.from_pretrained(verifier)
    ids = {} if name.startswith("speculators") else {"target_layer_ids": IDS}
    first = load(shared / "heads" / name, **ids)
    first.save_pretrained(tmp_path / "own")
    second = load(tmp_path / "own")
    fits = second.config.target_hidden_size == target.config.hidden_size
    formats = {to for to in FORMATS if to == "eagle3-hf" or not unsupported_features(second.config, to)}
    if second.config.own_embeddings and fits:
        formats -= {"sglang"}  # which would replace the embedding by the target's, another one
    assert "vllm" in formats
    copies = [AutoModel.from_pretrained(tmp_path / "own"), second]
    for to in sorted(formats):
        out = export_head(second, tmp_path / to, to, target=target if fits else None, verifier=str(verifier))
        copies.append(load(out))
    for copy in copies:
        state = copy.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in first.state_dict().items())
        assert copy.dtype == first.dtype
        changed = {field for field in FIELDS if getattr(copy.config, field) != getattr(first.config, field)}
        assert changed <= {"own_embeddings", "own_lm_head", *RECORDED}
