"""`diagnose` names each fault that is planted in a sound head, and is silent on the sound head itself."""

import json
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from eagle3_hf import (
    Eagle3Candidate,
    Eagle3DraftModel,
    EncodingOptions,
    LookupDraft,
    SpeculationStats,
    diagnose,
)
from eagle3_hf.cli import main
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.evaluation.diagnosis.findings import Fault
from eagle3_hf.evaluation.diagnosis.reading import read_head, read_target
from eagle3_hf.evaluation.diagnosis.result import Diagnosis
from eagle3_hf.evaluation.diagnosis.rounds import rounds_of
from eagle3_hf.evaluation.diagnosis.settings import LAYER_IDS, ROPE, HeadSetting, with_setting
from eagle3_hf.evaluation.diagnosis.sweep import judge, p_of_gain
from eagle3_hf.evaluation.diagnosis.texts import load_texts
from eagle3_hf.evaluation.misses import Cause
from eagle3_hf.model.tree_settings import TreeSettings, measured_alone, tree_settings
from support.chats import TEMPLATES
from support.drafts import half_vocabulary, set_tree, target_of
from support.families import prompt
from support.heads import VARIANTS
from support.sound_heads import FEW_STEPS, NEW_TOKENS, Pair, sound_pair
from support.tokenizers import words


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


def diagnosed(pair: Pair, **options) -> Diagnosis:
    return diagnose(pair.target, pair.draft, pair.answered, pair.tokenizer, **{"rounds": 40, **options})


def diagnosed_on_chats(pair: Pair, **options) -> Diagnosis:
    """The same with answers that the target writes again."""
    options = {"answers": "own", "max_new_tokens": NEW_TOKENS, "rounds": 40, **options}
    return diagnose(pair.target, pair.draft, pair.chats, pair.tokenizer, **options)


# ----- the faults ----------------------------------------------------------------------------------------------------


def layer_ids_off_by_one(pair: Pair) -> None:
    ids = [each + 1 for each in pair.draft.config.target_layer_ids]
    pair.draft = with_setting(pair.draft, HeadSetting(LAYER_IDS, ids))


def another_rope_base(pair: Pair) -> None:
    assert pair.draft.config.rope_parameters["rope_theta"] == 10_000
    rope = {**pair.draft.config.rope_parameters, "rope_theta": 1e6}
    pair.draft = with_setting(pair.draft, HeadSetting(ROPE, rope))


def permuted_map(pair: Pair) -> None:
    size = len(pair.draft.d2t)
    pair.draft.d2t.copy_(torch.randperm(size, generator=torch.Generator().manual_seed(0)) - torch.arange(size))


def another_template(pair: Pair) -> None:
    pair.tokenizer.chat_template = TEMPLATES["chatml"]


def overflow(pair: Pair) -> None:
    """All that writes to the residual stream is scaled, which the norms undo: only float16 cannot hold the stream."""
    layer = pair.draft.layers[0]
    with torch.no_grad():
        for module in (pair.draft.fc, layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight.mul_(4000.0)
    pair.draft.half()


FAULTS: dict[Fault, Callable[[Pair], None]] = {
    Fault.LAYER_IDS: layer_ids_off_by_one,
    Fault.ROPE: another_rope_base,
    Fault.VOCABULARY_MAP: permuted_map,
    Fault.TEMPLATE: another_template,
    Fault.OVERFLOW: overflow,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_a_planted_fault_is_named(fault, seed):
    pair = sound_pair(seed).copied()
    FAULTS[fault](pair)
    found = diagnosed_on_chats(pair) if fault is Fault.TEMPLATE else diagnosed(pair)
    assert [each.fault for each in found.findings] == [fault], str(found)
    assert fault.value in found.conclusion
    assert str(found).endswith(found.conclusion)


@pytest.mark.parametrize("seed", SEEDS)
def test_too_little_training_is_named(seed):
    found = diagnosed(sound_pair(seed, FEW_STEPS))
    assert [each.fault for each in found.findings][:1] == [Fault.TRAINING], str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_head_has_no_fault(seed):
    found = diagnosed_on_chats(sound_pair(seed))
    assert found.findings == [], str(found)
    assert found.conclusion.startswith("No fault")


# ----- the figures ---------------------------------------------------------------------------------------------------


@cache
def half_sound(noise: float = 0.4) -> Pair:
    """A head that misses sometimes, for every reason: its input is noisy, and it lacks a sixth of the text's words."""
    pair = sound_pair().copied()
    words = sorted({token for row in pair.answered for token in row["input_ids"]})
    kept = torch.tensor([token for token in range(len(pair.tokenizer)) if token not in words[::6]])
    draft = Eagle3DraftModel.from_target(pair.target, draft_vocab=kept, target_layer_ids=[2, 4, 6]).eval()
    weights = pair.draft.state_dict()
    own = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    with torch.no_grad():
        draft.load_state_dict(own, strict=False)
        draft.lm_head.weight.copy_(weights["lm_head.weight"][kept])
        drawn = torch.randn(draft.fc.weight.shape, generator=torch.Generator().manual_seed(0))
        draft.fc.weight.add_(noise * draft.fc.weight.std() * drawn)
    pair.draft = set_tree(draft, (6, 4, 3))
    return pair


def test_causes_add_up_to_all_misses():
    found = diagnosed(half_sound(), rounds=1000, sweep=False)
    assert sum(found.causes.values()) == found.misses > 0
    assert sum(1 for number in found.causes.values() if number) >= 3, found.causes
    assert found.stats.histogram[0] == found.stats.rounds - found.stats.accepted[0]
    assert found.tree == "6/4/3"


def test_rounds_are_those_of_generate(monkeypatch):
    """On the target's own greedy text each round accepts what it accepts in decoding, up to the end of the text."""
    pair = half_sound()
    told: list[int] = []
    record = SpeculationStats.record
    monkeypatch.setattr(SpeculationStats, "record", lambda stats, *args: (told.append(args[0]), record(stats, *args)))
    compared = 0
    for text in load_texts(pair.answered, pair.tokenizer, EncodingOptions()):
        reading = read_target(pair.target, text, pair.draft.config.captured_layer_ids)
        told.clear()
        with measured_alone(pair.draft, pair.target):
            tree = tree_settings(pair.draft, pair.target)
            prompt = text.ids[None, : text.roots[0]]
            options = {
                "attention_mask": torch.ones_like(prompt),
                "do_sample": False,
                "max_new_tokens": NEW_TOKENS + 10,
            }
            pair.target.generate(prompt, assistant_model=pair.draft, **options)
            features = reading.joined(pair.draft.config.captured_layer_ids)
            rounds = [*rounds_of(pair.target, pair.draft, tree, text, features, reading.choices, 1000)]
        whole = [each.accepted for each in rounds if each.root + each.accepted + 1 < len(text.ids) - 1]
        assert whole == told[: len(whole)]
        compared += len(whole)
    assert compared > 40


def test_first_choices_are_those_of_drafting():
    """At each depth, the parallel pass gives the chain that drafting gives behind the text's tokens."""
    pair = half_sound()
    text = load_texts(pair.answered, pair.tokenizer, EncodingOptions())[0]
    reading = read_target(pair.target, text, pair.draft.config.captured_layer_ids)
    features = reading.joined(pair.draft.config.captured_layer_ids)
    depths = read_head(pair.draft, pair.draft.borrow(pair.target), text, features, reading.choices, 2)
    candidate = Eagle3Candidate(pair.target, pair.draft, TreeSettings(1, 1, 1))
    fed, ids = 0, text.ids[None]
    for position, first in zip(depths[0].positions.tolist(), depths[0].first_token.tolist(), strict=True):
        tree = candidate.draft_tree(DraftInputs(features[:, fed:position], ids[:, fed + 1 : position + 1]))
        fed = position
        assert tree.tokens[0].tolist() == [text.ids[position], first]
    assert len(depths[1].positions) == len(depths[0].positions) - len(text.roots)


def test_nothing_is_changed():
    pair = sound_pair()
    before = {name: tensor.clone() for name, tensor in pair.draft.state_dict().items()}
    config, tree = pair.draft.config.to_dict(), pair.draft.generation_config.to_dict()
    diagnosed(pair, rounds=3)
    assert pair.draft.config.to_dict() == config
    assert pair.draft.generation_config.to_dict() == tree
    assert all(torch.equal(tensor, before[name]) for name, tensor in pair.draft.state_dict().items())


@pytest.mark.each_choice
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])
def test_every_kind_of_head_and_target(family, variant):
    """Heads of all kinds can be diagnosed, and the causes add up."""
    target = target_of(family)
    torch.manual_seed(0)
    draft = Eagle3DraftModel.from_target(
        target, draft_vocab=half_vocabulary(), **(VARIANTS[variant] if variant else {})
    )
    ids = prompt(24, 0)[0].tolist()
    found = diagnose(target, draft.eval(), [{"input_ids": ids, "labels": [-100] * 8 + ids[8:]}], words(), rounds=6)
    assert sum(found.causes.values()) == found.misses
    assert found.causes[Cause.OUTSIDE_VOCABULARY] > 0
    assert found.record.recorded_vocab is None
    assert all(each.setting.field == ROPE for each in found.sweep) == (variant == "final output alone")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_diagnosed_and_other_drafts_rejected():
    pair = sound_pair()
    adapted = get_peft_model(pair.copied().draft, LoraConfig(r=2, target_modules=["fc"]))
    found = diagnose(pair.target, adapted, pair.answered, pair.tokenizer, rounds=4, sweep=False)
    assert found.accuracy > 0.9
    with pytest.raises(TypeError, match="draft must be an Eagle3DraftModel, got a LookupDraft"):
        diagnose(pair.target, LookupDraft(), pair.answered, pair.tokenizer)


def test_tasks_lengths_and_temperatures():
    pair = sound_pair()
    rows = pair.answered
    found = diagnose(
        pair.target,
        pair.draft,
        {"one": rows[:1], "three": rows[1:]},
        pair.tokenizer,
        rounds=20,
        temperatures=[0, 0.7],
        sweep=False,
    )
    assert [(group.name, group.texts) for group in found.by_task] == [("one", 1), ("three", len(rows) - 1)]
    assert sum(group.positions for group in found.by_task) == found.positions
    assert [group.name for group in found.by_prompt_length] == ["0 to 127"]
    greedy, sampled = found.by_temperature
    assert greedy.first == greedy.overlap == pytest.approx(found.accuracy)
    assert greedy.first < greedy.children <= 1
    assert 0 < sampled.first <= sampled.children <= 1
    assert sum(each.count for each in found.calibration.bins) == found.positions
    assert json.loads(json.dumps(found.as_dict()))["by_task"][1]["name"] == "three"


def test_an_unfitting_vocabulary_is_named():
    found = diagnosed(half_sound(noise=0.0), rounds=200)
    assert Fault.COVERAGE in [each.fault for each in found.findings], str(found)
    assert found.coverage.of_choices < 0.9
    assert found.missing_words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answers": "mine"}, 'answers must be "given" or "own", got \'mine\''),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        diagnosed(sound_pair(0, FEW_STEPS), **options)


def test_chats_without_answers_are_rejected():
    pair = sound_pair(0, FEW_STEPS)
    chats = [{"messages": [{"role": "user", "content": "the sea"}]}]
    with pytest.raises(ValueError, match="chats: none of 1 chats has an answer to draft"):
        diagnose(pair.target, pair.draft, chats, pair.tokenizer)


# ----- statistics ----------------------------------------------------------------------------------------------------


def test_gains_by_chance_are_not_significant():
    """Of 30 sweeps over settings that differ by chance alone, none names a winner."""
    chance = np.random.default_rng(0)
    winners = 0
    for seed in range(30):
        hits = [chance.random(80) < 0.6 for _ in range(4)]
        others = [
            (
                HeadSetting(LAYER_IDS, [number]),
                [np.where(chance.random(80) < 0.3, chance.random(80) < 0.6, own) for own in hits],
            )
            for number in range(10)
        ]
        winners += any(tried.is_better for tried in judge(hits, others, seed))
    assert winners == 0


def test_a_real_gain_is_significant():
    chance = np.random.default_rng(0)
    hits = [chance.random(80) < 0.5 for _ in range(4)]
    better = (HeadSetting(LAYER_IDS, [1]), [own | (chance.random(80) < 0.3) for own in hits])
    (tried,) = judge(hits, [better])
    assert tried.is_better
    assert tried.accuracy - tried.gain == pytest.approx(np.mean(hits))


def test_many_blocks_give_the_p_value_of_few():
    gains = np.tile([1, -1, 2, 0, 1, -2], 66)
    assert p_of_gain(gains) == pytest.approx(p_of_gain(gains[:198]) ** 1.9, abs=0.1)
    assert p_of_gain(np.zeros(5)) == 1.0


# ----- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Target, head and chats on disk."""
    pair, folder = sound_pair(), tmp_path_factory.mktemp("diagnose")
    pair.target.save_pretrained(folder / "target")
    pair.tokenizer.save_pretrained(folder / "target")
    pair.draft.save_pretrained(folder / "head")
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, pair.answered)), encoding="utf-8")
    return folder


def test_the_command_reports_and_writes_a_page(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    places = [str(folder / "target"), str(folder / "head")]
    files = ["--json", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html")]
    assert main(["diagnose", *places, "--data", str(folder / "chats.jsonl"), "--rounds", "20", *files]) == 0
    shown = capsys.readouterr().out
    assert "misses by cause" in shown
    assert shown.rstrip().splitlines()[-1].startswith("No fault was found.")
    kept = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert kept["conclusion"] in shown
    page = (tmp_path / "d.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_field_of_the_head_can_be_overridden(folder, capsys):
    places = [str(folder / "target"), str(folder / "head"), "--data", str(folder / "chats.jsonl")]
    assert main(["diagnose", *places, "--rounds", "4", "--set", "target_layer_ids=[3,5,7]"]) == 0
    assert "wrong layer ids (with layer ids [2, 4, 6] the accuracy rises from" in capsys.readouterr().out


def test_two_tasks_of_one_name_are_rejected(folder, capsys):
    twice = [str(folder / "chats.jsonl"), str(folder / "chats.json")]
    assert main(["diagnose", str(folder / "target"), str(folder / "head"), "--data", *twice]) == 1
    assert "two tasks have the name chats" in capsys.readouterr().err
