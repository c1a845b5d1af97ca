"""Every kind of published head (`published.rows`): understood at its published size, loaded and run in small."""

import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.loading import canonical_config, describe_head
from eagle3_hf.published_formats import HeadFormatError
from support.families import prompt, tiny
from support.heads import write_folder
from support.published import (
    canonical,
    config_of,
    file_tensors,
    own_tensors,
    parameters,
    renamed,
    shape_only,
    tiny_folder,
    tiny_tensors,
)
from support.published.rows import INDICES, LLAMA3_ROPE, REFUSED, ROWS, nested


load = Eagle3DraftModel.from_pretrained
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def the(name: str):
    return next(row for row in [*ROWS, *REFUSED] if row.name == name)


@pytest.fixture(scope="module")
def target():
    return tiny("llama")


@pytest.fixture
def warned(caplog):
    """What loading warned about; transformers' own report of tensors that it did not find counts too."""
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING)

    def messages() -> list[str]:
        records = [(record.name, record.getMessage()) for record in caplog.records]
        return [said for name, said in records if name.startswith("eagle3_hf") or "LOAD REPORT" in said]

    return messages


def assert_notes(notes: list[str], row) -> None:
    assert len(notes) == len(row.notes), notes
    for words in row.notes:
        assert any(words in note for note in notes), f"{words!r} is in none of {notes}"


def assert_fields(config, wanted: dict) -> None:
    found = {name: getattr(config, name) for name in wanted}
    assert found == wanted


# ----- as published, shapes only -------------------------------------------------------------------------------------


@every_row
def test_published_size_is_understood(row, tmp_path):
    described = describe_head(shape_only(row, tmp_path))
    config = canonical_config(tmp_path, described)
    assert_fields(config, canonical(row))
    assert row.rope.items() <= config.rope_parameters.items()
    assert described.renamed == renamed(row)
    assert sorted(described.dropped) == sorted(row.dropped)
    assert_notes(described.notes, row)
    assert "architectures" in described.ignored


@every_row
def test_published_size_is_the_head_that_is_built(row, tmp_path):
    config = canonical_config(tmp_path, describe_head(shape_only(row, tmp_path)))
    with torch.device("meta"):
        draft = Eagle3DraftModel(config)
    built = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    in_file = {name: size for name, (size, _) in own_tensors(row).items()}
    for name in ("d2t", "t2d"):
        assert built.pop(name) == in_file.pop(name, ((config.draft_vocab_size,), (config.vocab_size,))[name == "t2d"])
    assert built == in_file
    assert sum(p.numel() for p in draft.parameters()) == round(parameters(row) * 1e9)


@pytest.mark.parametrize("row", [row for row in ROWS if row.parameters], ids=lambda row: row.name)
def test_sizes_are_those_that_pages_state(row):
    assert parameters(row) == pytest.approx(row.parameters, rel=0.01)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
@pytest.mark.parametrize("make", [shape_only, tiny_folder], ids=["published", "tiny"])
def test_refused_by_name(row, make, tmp_path):
    with pytest.raises(HeadFormatError, match=row.refusal) as caught:
        load(make(row, tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_an_ordinary_model_is_no_head(tmp_path, target):
    target.save_pretrained(tmp_path)
    with pytest.raises(HeadFormatError, match="ordinary model"):
        load(tmp_path)


# ----- in small ------------------------------------------------------------------------------------------------------


@every_row
def test_loads_bit_equal_and_says_what_it_must(row, tmp_path, warned):
    draft = load(tiny_folder(row, tmp_path))
    assert_notes(warned(), row)
    assert_fields(draft.config, canonical(row, tiny=True))
    written, state, names = tiny_tensors(row), draft.state_dict(), renamed(row, tiny=True)
    assert all(torch.equal(state[ours], written[name]) for name, ours in names.items())
    assert set(names.values()) | {"d2t", "t2d"} == set(state)
    assert draft.has_draft_vocab
    ids = torch.arange(draft.config.draft_vocab_size) + draft.d2t
    assert draft.t2d.nonzero().flatten().equal(ids.sort().values)


CALL = {
    "inputs": prompt(9, seed=3),
    "attention_mask": torch.ones(1, 9, dtype=torch.int64),
    "max_new_tokens": 10,
    "do_sample": False,
}


@pytest.fixture(scope="module")
def own_text(target) -> list[list[int]]:
    return target.generate(**CALL).tolist()


@every_row
def test_text_with_it_is_the_targets_own(row, tmp_path, target, own_text):
    draft = load(tiny_folder(row, tmp_path))
    assert target.generate(**CALL, assistant_model=draft).tolist() == own_text
    assert draft.config.target_layer_ids == (row.bound_ids or row.tiny_ids or INDICES)
    assert draft.stats.rounds > 0


@every_row
def test_saved_and_loaded_again_it_is_the_same(row, tmp_path, target, warned):
    draft = load(tiny_folder(row, tmp_path / "published")).bind(target)
    count = len(warned())
    draft.save_pretrained(tmp_path / "own")
    again = load(tmp_path / "own").bind(target)
    assert len(warned()) == count  # what was settled is written down
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())
    skipped = {"_name_or_path", "transformers_version", "architectures"}
    before, after = draft.config.to_dict(), again.config.to_dict()
    assert {key: before[key] for key in before.keys() - skipped} == {key: after[key] for key in after.keys() - skipped}


@pytest.mark.parametrize("name", ["SpecForge", "speculators 0.9", "MLA, TorchSpec", "NeMo AutoModel, EAGLE-3.1"])
def test_pickled_files_load_too(name, tmp_path):
    row = the(name)
    state, written = load(tiny_folder(row, tmp_path, file="pytorch_model.bin")).state_dict(), tiny_tensors(row)
    assert all(torch.equal(state[ours], written[there]) for there, ours in renamed(row, tiny=True).items())


@pytest.mark.parametrize("name", ["SafeAILab", "SpecForge, whole vocabulary", "speculators 0.9", "ModelOpt 2026"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vocabulary_maps_stay_what_they_are_in_any_dtype(name, dtype, tmp_path):
    folder = tiny_folder(the(name), tmp_path)
    exact = load(folder)
    for draft in (load(folder, dtype=dtype), load(folder).to(dtype)):
        assert (draft.dtype, draft.d2t.dtype, draft.t2d.dtype) == (dtype, torch.int64, torch.bool)
        assert draft.d2t.equal(exact.d2t)
        assert draft.t2d.equal(exact.t2d)
        assert draft.rotary_emb.inv_freq.equal(exact.rotary_emb.inv_freq)


def test_a_map_of_32_bits_and_one_of_absolute_ids(tmp_path, warned):
    row, tensors = the("ModelOpt 2025"), tiny_tensors(the("ModelOpt 2025"))
    offsets = tensors["d2t"]
    narrow = load(write_folder(tmp_path / "i32", config_of(row, True), {**tensors, "d2t": offsets.int()}))
    assert narrow.d2t.dtype == torch.int64
    assert narrow.d2t.equal(offsets)
    assert not warned()
    absolute = offsets + torch.arange(len(offsets))
    converted = load(write_folder(tmp_path / "ids", config_of(row, True), {**tensors, "d2t": absolute}))
    assert converted.d2t.equal(offsets)
    [said] = warned()
    assert "d2t" in said


def test_an_embedding_of_another_dtype(tmp_path):
    """One published head holds float16 weights and a bfloat16 embedding."""
    row = the("SpecForge, with embedding")
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in tiny_tensors(row).items()}
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].bfloat16()
    draft = load(write_folder(tmp_path, config_of(row, True), tensors))
    assert draft.dtype == torch.float16
    assert draft.embed_tokens.weight.equal(tensors["embed_tokens.weight"].half())


# ----- layer ids -----------------------------------------------------------------------------------------------------


def features(draft, target) -> torch.Tensor:
    with FeatureReader(target, draft.bind(target).config.target_layer_ids) as reader, torch.no_grad():
        target(prompt(11, seed=5))
        return reader.take()


def test_every_convention_reaches_the_same_tensor(tmp_path, target):
    row = the("SpecForge, outputs of blocks")
    top = {"eagle_aux_hidden_state_layer_ids": INDICES, "eagle_config": ...}
    both = {"eagle_aux_hidden_state_layer_ids": INDICES, **nested(1, 3, 4)}
    spellings = {"outputs": nested(1, 3, 4), "indices": nested(*INDICES), "top": top, "both": both}
    read = {}
    for name, ids in spellings.items():
        config = {key: value for key, value in {**config_of(row, True), **ids}.items() if value is not ...}
        read[name] = features(load(write_folder(tmp_path / name, config, tiny_tensors(row))), target)
    with torch.no_grad():
        states = target(prompt(11, seed=5), output_hidden_states=True).hidden_states
    assert read["outputs"].equal(torch.cat([states[i] for i in INDICES], dim=-1))
    assert all(tensor.equal(read["outputs"]) for tensor in read.values())


def test_ids_that_were_indices_after_all_are_taken_back_aloud(tmp_path, target, warned):
    row = the("ModelOpt, gpt-oss v3")
    draft = load(tiny_folder(row, tmp_path))
    before = len(warned())
    seen = features(draft, target)
    [said] = warned()[before:]
    assert "[5, 7, 9]" in said
    assert "[4, 6, 8]" in said
    block = target.model.layers[-1]
    last = []
    handle = block.register_forward_hook(lambda module, args, output: last.append(output))
    with torch.no_grad():
        target(prompt(11, seed=5))
    handle.remove()
    assert seen[..., -target.config.hidden_size :].equal(last[0])


def test_a_head_without_features_reads_the_normed_end(tmp_path, target):
    seen = features(load(tiny_folder(the("NVIDIA without auxiliary features"), tmp_path)), target)
    with torch.no_grad():
        end = target(prompt(11, seed=5), output_hidden_states=True).hidden_states[-1]
    assert seen.equal(end)


@pytest.mark.parametrize(
    "name", ["Ids of unknown meaning", "SpecForge, outputs of blocks", "Four layers read, none named"]
)
def test_given_ids_win_over_the_files(name, tmp_path, target, warned):
    row = the(name)
    given = [1, 3, 6, 8][: row.shape.captured]
    draft = load(tiny_folder(row, tmp_path), target_layer_ids=given)
    assert draft.bind(target).config.target_layer_ids == given
    assert not warned()


def test_overrides_of_flags(tmp_path):
    specforge = tiny_folder(the("SpecForge, EAGLE-3.1"), tmp_path / "31")
    assert not load(specforge, norm_output=False).config.norm_output
    plain = tiny_folder(the("SpecForge, norm_output false"), tmp_path / "false")
    assert not load(plain, final_norm=False).config.final_norm
    assert "norm.weight" not in load(plain, final_norm=False).state_dict()
    speculators = tiny_folder(the("speculators, no norm_before_residual"), tmp_path / "speculators")
    assert load(speculators, norm_before_residual=True).config.norm_before_residual


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("SpecForge, EAGLE-3.1", {"norm_output": False}),
        ("SpecForge, norm_output false", {"final_norm": False}),
        ("speculators, no norm_before_residual", {"norm_before_residual": False}),
    ],
)
def test_an_override_settles_what_was_open(name, override, tmp_path, warned):
    load(tiny_folder(the(name), tmp_path), **override)
    assert not warned()


# ----- nothing in silence --------------------------------------------------------------------------------------------


def may_be_left_out(row, name: str) -> str | None:
    """The documented use of a tiny file without this tensor; `None`: it must be an error that names the tensor."""
    shape = row.shape.tiny()
    whole = shape.draft_vocab == shape.vocab
    if name in row.dropped:
        return "dropped"
    if name == "t2d":
        return "rebuilt"
    if name == "d2t" and whole:
        return "identity"
    if name.endswith("embed_tokens.weight") and shape.target_hidden is None:
        return "borrowed"
    if name == "lm_head.weight" and whole and not (row.config.get("tie_word_embeddings") and row.embed):
        return "borrowed"
    return None


@every_row
def test_without_any_one_tensor(row, tmp_path, target):
    tensors, names = tiny_tensors(row), renamed(row, tiny=True)
    for number, name in enumerate(tensors):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        folder = write_folder(tmp_path / str(number), config_of(row, True), rest)
        if may_be_left_out(row, name) is None:
            with pytest.raises(HeadFormatError) as caught:
                load(folder)
            said = str(caught.value).replace(str(folder), "")
            known = {spelling.removesuffix(".weight") for spelling in (name, names[name])}
            assert any(spelling in said for spelling in known), f"without {name}: {said}"
            continue
        draft = load(folder)
        state = draft.state_dict()
        assert all(torch.equal(state[names[other]], rest[other]) for other in rest if other in names)
        assert name not in ("t2d", "d2t") or state[name].equal(tensors[name])
        with torch.no_grad():  # what is borrowed is found
            lent = draft.bind(target).borrow()
            assert draft.compute_logits(lent.embed(prompt(3)), lent).shape[-1] == draft.config.draft_vocab_size


STRAYS = ("stray.weight", "layers.0.self_attn.rotary.weight", "layers.7.mlp.up_proj.weight", "input_norm.bias")


@every_row
@pytest.mark.parametrize("stray", STRAYS)
def test_with_one_tensor_too_many(row, stray, tmp_path):
    tensors = {**tiny_tensors(row), stray: torch.ones(64)}
    with pytest.raises(HeadFormatError) as caught:
        load(write_folder(tmp_path, config_of(row, True), tensors))
    said = str(caught.value)
    assert stray in said or (stray.startswith("layers.7.") and "7]: layer" in said)


@pytest.mark.parametrize("name", ["SpecForge", "speculators 0.9", "ModelOpt 2026", "MLA, TorchSpec"])
@pytest.mark.parametrize(
    ("tensor", "size"), [("fc_norm.0.weight", (64,)), ("input_norm.weight", (192,)), ("aux_norm_low.weight", (64,))]
)
def test_a_norm_without_its_flag(name, tensor, size, tmp_path):
    row = the(name)
    tensors = {**tiny_tensors(row), tensor: torch.ones(size)}
    with pytest.raises(HeadFormatError, match="fc_norm|norm_before_fc"):
        load(write_folder(tmp_path, config_of(row, True), tensors))


@pytest.mark.parametrize("name", ["SpecForge", "speculators 0.9", "NeMo AutoModel"])
@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc", "attention_bias", "mlp_bias"])
def test_a_flag_without_its_tensor(name, flag, tmp_path):
    row, config = the(name), config_of(the(name), True)
    place = config.get("transformer_layer_config", config) if flag.endswith("bias") else config
    place[flag] = True
    missing = {"attention_bias": "q_proj.bias", "mlp_bias": "gate_proj.bias"}
    with pytest.raises(HeadFormatError, match=missing.get(flag, f"`{flag}: true`")):
        load(write_folder(tmp_path, config, tiny_tensors(row)))


@pytest.mark.parametrize("name", ["SpecForge", "ModelOpt 2025"])
def test_two_tensors_for_one(name, tmp_path):
    tensors = tiny_tensors(the(name))
    tensors["layers.0.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].clone()
    with pytest.raises(HeadFormatError, match=r"midlayer\.mlp\.up_proj\.weight"):
        load(write_folder(tmp_path, config_of(the(name), True), tensors))


# ----- rope ----------------------------------------------------------------------------------------------------------

DIM = 16  # rotary width of the tiny heads


def plain_frequencies(theta: float, dim: int = DIM) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def linear(theta: float, factor: float) -> list[float]:
    return [f / factor for f in plain_frequencies(theta)]


def dynamic(theta: float, factor: float, longest: int, length: int) -> list[float]:
    """Base stretched once a sequence is longer than the head was trained on (NTK by length)."""
    stretch = (factor * max(length, longest) / longest - (factor - 1)) ** (DIM / (DIM - 2))
    return plain_frequencies(theta * stretch)


def yarn(theta: float, factor: float, original: int, fast: float = 32, slow: float = 1) -> list[float]:
    """YaRN (Peng et al. 2023): high frequencies stay, low ones are interpolated, a ramp between."""

    def pair(turns: float) -> float:
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), DIM - 1)
    high = high + 0.001 if low == high else high
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(DIM // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain_frequencies(theta), ramp, strict=True)]


def llama3(theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    found = []
    for f in plain_frequencies(theta):
        turns = original * f / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0), 1)
        found.append((1 - smooth) * f / factor + smooth * f)
    return found


SHORT, LONG = [1.0 + 0.1 * i for i in range(DIM // 2)], [2.0 + 0.5 * i for i in range(DIM // 2)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512}
YARN_NUMBERS = {"factor": 8.0, "original_max_position_embeddings": 1024}
LLAMA3_NUMBERS = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"}
THETA = 500000.0
GOLDEN = {
    "default": ({}, plain_frequencies(THETA)),
    "linear": ({"factor": 4.0}, linear(THETA, 4.0)),
    "dynamic": ({"factor": 4.0}, plain_frequencies(THETA)),
    "yarn": (YARN_NUMBERS, yarn(THETA, 8.0, 1024)),
    "longrope": (LONGROPE, [f / s for f, s in zip(plain_frequencies(THETA), SHORT, strict=True)]),
    "llama3": (LLAMA3_NUMBERS, llama3(THETA, 8.0, 1.0, 4.0, 8192)),
    "proportional": ({"partial_rotary_factor": 0.5}, [*plain_frequencies(THETA)[: DIM // 4], *[0.0] * (DIM // 4)]),
}


def keys(rope_type: str, numbers: dict, style: str) -> dict:
    five = {"rope_type": rope_type, "rope_theta": THETA, **numbers}
    four = {"rope_theta": THETA, "rope_scaling": {"type": rope_type, **numbers} if rope_type != "default" else None}
    return {"five": {"rope_parameters": five}, "four": four, "both": {**four, "rope_parameters": five}}[style]


def head_with(rope: dict, folder: Path, style: str = "flat", **kwargs):
    row = the("SpecForge, with embedding" if style == "flat" else "speculators 0.9")
    config = config_of(row, True)
    place = config if style == "flat" else config["transformer_layer_config"]
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        place.pop(key, None)
    place |= {"max_position_embeddings": 2048, **rope}
    return load(write_folder(folder, config, tiny_tensors(row)), **kwargs)


def test_every_rope_type_of_transformers_has_its_formula_here():
    assert GOLDEN.keys() >= ROPE_INIT_FUNCTIONS.keys() - {"proportional"}  # the last one is not in every version


@pytest.mark.parametrize("style", ["flat", "speculators"])
@pytest.mark.parametrize("spelling", ["four", "five", "both"])
@pytest.mark.parametrize("rope_type", GOLDEN)
def test_inverse_frequencies_are_the_formulas(rope_type, spelling, style, tmp_path):
    if rope_type not in {"default", *ROPE_INIT_FUNCTIONS}:
        pytest.skip(f"this version of transformers has no {rope_type}")
    numbers, golden = GOLDEN[rope_type]
    draft = head_with(keys(rope_type, numbers, spelling), tmp_path, style)
    torch.testing.assert_close(draft.rotary_emb.inv_freq, torch.tensor(golden), rtol=1e-6, atol=0)


def test_dynamic_frequencies_follow_the_length(tmp_path):
    draft = head_with(keys("dynamic", {"factor": 4.0}, "five"), tmp_path)
    draft.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[3999]]))
    golden = torch.tensor(dynamic(THETA, 4.0, 2048, 4000))
    torch.testing.assert_close(draft.rotary_emb.inv_freq, golden, rtol=1e-6, atol=0)


def test_attention_of_yarn_and_longrope_is_scaled(tmp_path):
    stretched = head_with(keys("yarn", YARN_NUMBERS, "five"), tmp_path / "yarn").rotary_emb
    assert stretched.attention_scaling == pytest.approx(0.1 * math.log(8.0) + 1)
    long = head_with(keys("longrope", LONGROPE, "five"), tmp_path / "long").rotary_emb
    assert long.attention_scaling == pytest.approx(math.sqrt(1 + math.log(2048 / 512) / math.log(512)))


def test_no_word_about_rope_is_base_10000_and_never_the_targets(tmp_path):
    target = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 77777.0})
    draft = head_with({}, tmp_path).bind(target)
    torch.testing.assert_close(draft.rotary_emb.inv_freq, torch.tensor(plain_frequencies(10000.0)), rtol=1e-6, atol=0)


def test_rope_can_be_overridden(tmp_path):
    given = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
    draft = head_with(keys("llama3", LLAMA3_NUMBERS, "four"), tmp_path, rope_parameters=given)
    torch.testing.assert_close(draft.rotary_emb.inv_freq, torch.tensor(linear(300.0, 2.0)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("spelling", ["four", "five"])
def test_an_unknown_rope_type_is_an_error(spelling, tmp_path):
    with pytest.raises(HeadFormatError, match="spiral"):
        head_with(keys("spiral", {"factor": 2.0}, spelling), tmp_path)


@pytest.mark.parametrize(("rope_type", "missing"), [("yarn", "factor"), ("llama3", "low_freq_factor")])
def test_a_rope_type_without_its_numbers_is_an_error(rope_type, missing, tmp_path):
    numbers = {key: value for key, value in GOLDEN[rope_type][0].items() if key != missing}
    with pytest.raises(HeadFormatError, match=missing):
        head_with(keys(rope_type, numbers, "four"), tmp_path)


def test_a_part_of_each_head_can_be_rotated(tmp_path):
    draft = load(tiny_folder(the("speculators, partial rotary"), tmp_path))
    golden = torch.tensor(plain_frequencies(10000.0, dim=DIM // 2))
    torch.testing.assert_close(draft.rotary_emb.inv_freq, golden, rtol=1e-6, atol=0)


def test_latent_attention_rotates_its_own_width(tmp_path):
    draft = load(tiny_folder(the("MLA, queries of full rank"), tmp_path))
    golden = torch.tensor(plain_frequencies(1000000.0, dim=8))
    torch.testing.assert_close(draft.rotary_emb.inv_freq, golden, rtol=1e-6, atol=0)


# ----- the documented table ------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "heads.md"


def documented(heading: str) -> set[tuple[str, ...]]:
    """The rows of the table under a heading: target, repositories, format, peculiarity."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return {tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines}


def as_documented(row) -> tuple[str, ...]:
    return row.target, ", ".join(f"`{repo}`" for repo in row.repos) or "(none public)", row.format, row.peculiarity


@pytest.mark.parametrize(("heading", "rows"), [("Heads that load", ROWS), ("Heads that are rejected", REFUSED)])
def test_the_page_shows_these_rows_and_no_others(heading, rows):
    assert documented(heading) == {as_documented(row) for row in rows}


def test_the_table_means_something(tmp_path):
    names = [row.name for row in [*ROWS, *REFUSED]]
    repos = [repo for row in [*ROWS, *REFUSED] for repo in row.repos]
    assert len(set(names)) == len(names)
    assert len(set(repos)) == len(repos)
    folder = shape_only(the("TorchSpec"), tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 6e9
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 1e6  # a hole costs nothing
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 163840
    assert file_tensors(the("SGLang's first names")).keys() >= {"aux_norm_low.weight", "midlayer.hidden_norm.weight"}
