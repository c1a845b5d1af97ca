"""`diagnose` names each fault that is planted in a sound head, and is silent on the sound head itself."""

from collections.abc import Callable

import pytest
import torch

from eagle3_hf.evaluation.diagnosis.diagnose import diagnose
from eagle3_hf.evaluation.diagnosis.findings import Fault
from eagle3_hf.evaluation.diagnosis.result import Diagnosis
from eagle3_hf.evaluation.diagnosis.settings import LAYER_IDS, ROPE, HeadSetting, with_setting
from support.chats import TEMPLATES
from support.sound_heads import FEW_STEPS, NEW_TOKENS, Pair, sound_pair


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
