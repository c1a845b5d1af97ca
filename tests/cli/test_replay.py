"""Records and replays: a fixed tree has the rounds that decoding had, any policy is walked along the text."""

import itertools
import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.decoding.coupling import Noise
from eagle3_hf.decoding.draft.candidate import Eagle3Candidate
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.decoding.tree import HostTree
from eagle3_hf.evaluation.costs import COSTS, CostTable, costs_of
from eagle3_hf.evaluation.record import Record, RecordedText, RecordError, RecordWriter
from eagle3_hf.evaluation.recording import TextRecorder, write_record
from eagle3_hf.evaluation.replay import FixedTree, PlainSteps, Replay, ReplayResult, ReplayRound, markdown_table
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.tree_settings import TreeSettings
from support.drafts import set_tree
from support.families import tiny


VOCAB = 12  # so small that a random head is often right
NEW_TOKENS = 32
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 0.9},
    "warped": {"do_sample": True, "top_k": 5, "top_p": 0.9},
}
TREES = [(5, 5, 1), (11, 3, 4), (59, 8, 10), (20, 6, 7)]


@cache
def target(vocab: int = VOCAB):
    return tiny("llama", num_hidden_layers=4, vocab_size=vocab)


@cache
def head(seed: int, vocab: int = VOCAB) -> Eagle3DraftModel:
    torch.manual_seed(100 + seed)
    return Eagle3DraftModel.from_target(target(vocab)).eval()


def prompt_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, (1, 9), generator=torch.Generator().manual_seed(seed))


@cache
def recorded(seed: int, mode: str, **options) -> tuple[TextRecorder, RecordedText]:
    recorder = TextRecorder(target(), head(seed), max_new_tokens=NEW_TOKENS, **MODES[mode], **options)
    return recorder, recorder.record(prompt_of(seed), "talk", seed)


def written(path, *texts: tuple[TextRecorder, RecordedText]) -> Record:
    with RecordWriter(path, texts[0][0].header(("target", "head"))) as writer:
        for seed, (_, text) in enumerate(texts):
            writer.add(text, seed)
    return Record.load(path)


def counters(stats):
    return stats.rounds, stats.emitted, stats.reached, stats.accepted


def decoded(seed: int, mode: str, tree: tuple[int, int, int], **options):
    """The counters of a call with this tree, and its new tokens."""
    ids, draft = prompt_of(seed), set_tree(head(seed), tree)
    draft.generation_config.assistant_lookup = False
    torch.manual_seed(seed)
    out = target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        max_new_tokens=NEW_TOKENS,
        **MODES[mode],
        **options,
    )
    return counters(draft.stats), out[0, ids.shape[1] :].tolist()


# ----- a replay is what decoding does --------------------------------------------------------------------------------


@pytest.mark.each_choice
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replay_of_a_fixed_tree_has_the_rounds_of_decoding(seed, mode, tmp_path):
    replay = Replay(written(tmp_path / "record.npz", recorded(seed, mode)), COSTS["cpu"])
    accepted = 0
    for tree in TREES:
        expected, text = decoded(seed, mode, tree)
        assert replay.texts[0].text.tolist() == text
        (result,) = replay.run(FixedTree(*tree))
        assert counters(result.stats) == expected, tree
        accepted += sum(expected[3])
    assert accepted > NEW_TOKENS // 2, "little was accepted, so little was tested"


def test_texts_that_end_inside_a_round(tmp_path):
    ends = 0
    for seed in range(3):
        _, text = recorded(seed, "sampled")
        eos = int(text.text[NEW_TOKENS // 2])
        short = recorded(seed, "sampled", eos_token_id=eos)
        assert 1 <= len(short[1].text) <= NEW_TOKENS // 2 + 1
        replay = Replay(written(tmp_path / "record.npz", short), COSTS["cpu"])
        for tree in TREES:
            expected, tokens = decoded(seed, "sampled", tree, eos_token_id=eos)
            assert replay.texts[0].text.tolist() == tokens
            (result,) = replay.run(FixedTree(*tree))
            assert counters(result.stats) == expected, tree
            ends += sum(result.stats.accepted) + result.stats.rounds > result.stats.emitted
    assert ends, "no text ended at an accepted draft"


def test_without_coupling_the_warped_probabilities_rank(tmp_path):
    head(0).generation_config.assistant_coupled_sampling = False
    try:
        recorder = TextRecorder(target(), head(0), max_new_tokens=NEW_TOKENS, **MODES["sampled"])
        text = recorder.record(prompt_of(0), "talk", 0)
        assert text.log_z is None
        (result,) = Replay(written(tmp_path / "record.npz", (recorder, text)), COSTS["cpu"]).run(FixedTree(11, 3, 4))
        assert counters(result.stats) == decoded(0, "sampled", (11, 3, 4))[0]
    finally:
        del head(0).generation_config.assistant_coupled_sampling


@pytest.mark.parametrize("mode", MODES)
def test_pools_reduce_to_what_fewer_levels_and_children_grow(mode):
    """Each reduction against the growth itself, at every position."""
    draft, prompt = head(0, 320), prompt_of(0, 320)
    recorder = TextRecorder(target(320), draft, max_new_tokens=10, **MODES[mode])
    text = recorder.record(prompt, "talk", 1)
    if mode == "greedy":
        assert max(text.sizes) > 10 + 7 * 100, "else narrow growths never expand what the widest does not"
    ids = torch.from_numpy(np.concatenate([text.prompt, text.text]).astype(np.int64))[None]
    with torch.no_grad(), FeatureReader(target(320), draft.config.captured_layer_ids) as reader:
        target(320)(ids[:, :-1])
        features = reader.take()
    _, warpers = recorder._generate(prompt)
    torch.manual_seed(1)
    noise = None if mode == "greedy" else Noise(1, 320, "cpu")
    for depth, top_k in itertools.product((1, 3, 8), range(1, 11)):
        settings = TreeSettings(10_000, depth, top_k)
        candidate = Eagle3Candidate(target(320), draft, settings, noise, warpers)
        fed = 0
        for position in range(1, len(text.text)):
            end = len(text.prompt) + position - 1
            inputs = DraftInputs(features[:, fed:end], ids[:, fed + 1 : end + 1])
            fed = end
            candidate.feed_later(inputs)
            tokens, parents, scores, _ = candidate.draft_pool(settings, [position]).joined()
            expected = paths_of(tokens[0].tolist(), parents[0].tolist(), scores[0].tolist())
            pool = text.pool(position).reduced(depth, top_k)
            found = paths_of(pool.tokens.tolist(), pool.parents.tolist(), pool.scores.tolist())
            assert found.keys() == expected.keys(), (position, depth, top_k)
            assert list(found.values()) == pytest.approx([expected[path] for path in found], rel=2e-3, abs=1e-3)
            assert list(found.values()) == sorted(found.values(), reverse=True)


def paths_of(tokens, parents, scores) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {path: score for path, score in zip(paths, scores, strict=True) if score > -np.inf}


# ----- noise ---------------------------------------------------------------------------------------------------------


def test_log_z_and_noise_give_the_drafts_probabilities():
    """`log q = increment + log Z + log e`, and with all tokens as children the `q` of a node sum up to 1."""
    recorder = TextRecorder(target(), head(0), 2, VOCAB, max_new_tokens=NEW_TOKENS, **MODES["sampled"])
    text = recorder.record(torch.arange(VOCAB)[None], "talk", 0)
    checked = 0
    for position in range(1, len(text.text)):
        pool = text.pool(position)
        for node in (-1, *np.flatnonzero(pool.has_children)):
            children = np.flatnonzero(pool.parents == node)
            level = 0 if node < 0 else int(pool.depths[node])
            noise = [text.log_noise_of(position + level, int(token)) for token in pool.tokens[children]]
            if None in noise:
                continue
            q = np.exp(pool.increments[children] + pool.log_z_of(node) + np.array(noise))
            assert q.sum() == pytest.approx(1.0, abs=0.02)  # in half precision
            checked += 1
    assert checked > 12 * len(text.text)


def test_the_recorded_noise_chooses_the_text():
    _, text = recorded(2, "sampled")
    ids = torch.from_numpy(np.concatenate([text.prompt, text.text]).astype(np.int64))[None]
    with torch.no_grad():
        logits = target()(ids).logits[0, len(text.prompt) - 1 : -1].float() / 0.9
    race = logits[:, text.noise_ids.tolist()].log_softmax(-1).numpy() - text.log_noise[: len(text.text)]
    right = text.noise_ids[race.argmax(-1)] == text.text
    assert right.mean() > 0.95  # in half precision, of few ids


# ----- policies ------------------------------------------------------------------------------------------------------


class Oracle:
    """Knows the text, and drafts `length` tokens of it as a chain, without the head."""

    def __init__(self, text: list[int], length: int):
        self.text, self.length = text, length
        self.seen: list[int] = []
        self.prompts: list[list[int]] = []

    def begin(self, prompt):
        self.prompts.append(list(prompt))

    def propose(self, context: ReplayRound) -> HostTree:
        assert context.ids[context.prompt_length :] == self.text[: context.position]
        known = self.text[context.position :][: min(self.length, context.depth_left)]
        return HostTree([context.root, *known], list(range(-1, len(known))))

    def observe(self, context, tree, path, tokens):
        assert len(path) == len(tokens)
        self.seen += tokens


def test_a_policy_sees_the_text_and_is_told_what_was_chosen(tmp_path):
    replay = Replay(written(tmp_path / "record.npz", recorded(0, "greedy")), COSTS["cpu"])
    text = replay.texts[0].text.tolist()
    policy = Oracle(text, 3)
    (result,) = replay.run(policy)
    assert policy.prompts == [prompt_of(0)[0].tolist()]
    assert policy.seen == text[1:]
    assert result.stats.rounds == -(-(NEW_TOKENS - 1) // 4)
    assert result.levels == [0] * result.stats.rounds
    assert result.plain_seconds == pytest.approx(31 * 0.0236)
    verify = [COSTS["cpu"].verify_ms(1 + nodes) for nodes in result.nodes]
    assert result.seconds == pytest.approx(sum(verify) / 1e3)


def test_plain_steps_cost_what_ordinary_decoding_costs(tmp_path):
    for costs in COSTS.values():
        replay = Replay(written(tmp_path / "record.npz", recorded(0, "greedy")), costs)
        (result,) = replay.run(PlainSteps())
        assert result.stats.tau == 1.0
        assert result.speedup == pytest.approx(1.0)


def test_a_policy_pays_for_the_deepest_level_that_it_asked_for(tmp_path):
    class Looks(PlainSteps):
        def propose(self, context):
            for depth in (1, 4, 2):
                context.pool(depth, 3)
            return super().propose(context)

    costs = COSTS["gpu-eager"]
    (result,) = Replay(written(tmp_path / "record.npz", recorded(0, "greedy")), costs).run(Looks())
    assert set(result.levels) == {4}
    assert result.seconds == pytest.approx(31 * (25.0 + 1.4 + 3 * 1.6 + 3.0) / 1e3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: HostTree([c.root + 1], [-1]), "must begin with the root"),
        (lambda c: HostTree([c.root, 1], [-1]), "must begin with the root"),
        (lambda c: HostTree([c.root, 1, 2], [-1, 2, 0]), "node 1 has the parent 2"),
        (lambda c: HostTree([0] * 0, []), "must begin with the root"),
        (lambda c: HostTree([c.root, *[1] * 40], list(range(-1, 40))), "40 levels where 30 tokens can follow"),
    ],
)
def test_what_is_no_tree_is_rejected(make, message, tmp_path):
    class Wrong(PlainSteps):
        def propose(self, context):
            return make(context)

    replay = Replay(written(tmp_path / "record.npz", recorded(0, "greedy")), COSTS["cpu"])
    with pytest.raises(ValueError, match=message):
        replay.run(Wrong())


def test_a_tree_larger_than_the_record_is_rejected(tmp_path):
    replay = Replay(written(tmp_path / "record.npz", recorded(0, "greedy")), COSTS["cpu"])
    for tree in ((20, 9, 4), (20, 3, 11)):
        with pytest.raises(RecordError, match="8 levels and 10 children, too few for"):
            replay.run(FixedTree(*tree))


def test_totals_and_table(tmp_path):
    texts = [recorded(seed, "greedy") for seed in (0, 1)]
    other = replace(recorded(2, "greedy")[1], task="code")
    replay = Replay(written(tmp_path / "record.npz", *texts, (texts[0][0], other)), COSTS["cpu"])
    single = replay.run(FixedTree(11, 3, 4))
    tasks = replay.by_task(FixedTree(11, 3, 4))
    assert list(tasks) == ["talk", "code"]
    assert tasks["talk"].stats.rounds == single[0].stats.rounds + single[1].stats.rounds
    assert tasks["talk"].stats.accepted == [
        a + b for a, b in zip(single[0].stats.accepted, single[1].stats.accepted, strict=True)
    ]
    assert tasks["talk"].speedup == pytest.approx(
        (single[0].plain_seconds + single[1].plain_seconds) / (single[0].seconds + single[1].seconds)
    )
    assert ReplayResult.total("all", single).nodes == single[0].nodes + single[1].nodes + single[2].nodes
    table = markdown_table({"11/3/4": tasks}).splitlines()
    assert table[0] == "| policy | talk | code | mean | nodes | levels |"
    assert table[2].startswith(f"| 11/3/4 | {tasks['talk'].stats.tau:.2f} / {tasks['talk'].speedup:.2f} |")


# ----- costs ---------------------------------------------------------------------------------------------------------


def test_costs_are_interpolated():
    costs = CostTable(plain=10.0, verify={1: 10.0, 5: 14.0, 9: 30.0}, draft_first=3.0, draft_further=2.0, other=1.0)
    assert [costs.verify_ms(n) for n in (1, 3, 5, 7, 9, 11)] == [10.0, 12.0, 14.0, 22.0, 30.0, 38.0]
    assert [costs.draft_ms(n) for n in (0, 1, 3)] == [0.0, 3.0, 7.0]
    assert costs.round_ms(1, 0) == 10.0
    assert costs.round_ms(1, 1) == 14.0
    assert costs.round_ms(5, 3) == 22.0
    assert CostTable(plain=1.0, verify={4: 2.0}, draft_first=0, draft_further=0).verify_ms(60) == 2.0


def test_costs_from_a_file(tmp_path):
    path = tmp_path / "costs.json"
    fields = {"plain": 20, "verify": {"1": 21, "11": 31}, "draft_first": 2, "draft_further": 1}
    path.write_text(json.dumps(fields))
    assert costs_of(path) == CostTable(20.0, {1: 21.0, 11: 31.0}, 2.0, 1.0)
    assert costs_of("cpu") is COSTS["cpu"]
    for change, message in [
        ({"plain": -1}, "plain must be a number of milliseconds of at least 0, got -1"),
        ({"plain": 0}, "plain must be greater than 0"),
        ({"verify": {}}, "verify must map numbers of tokens"),
        ({"verify": {"0": 1}}, "verify must map numbers of tokens"),
        ({"verify": [1]}, "no table of costs"),
        ({"walk": 3}, "walk"),
    ]:
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=r"costs\.json.*" + message):
            costs_of(path)
    path.write_text(json.dumps({name: cost for name, cost in fields.items() if name != "verify"}))
    with pytest.raises(ValueError, match="lacks 'verify'"):
        costs_of(path)
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        costs_of(tmp_path / "nowhere.json")


# ----- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_record_is_read_as_it_was_written(mode, tmp_path):
    recorder, text = recorded(0, mode)
    record = written(tmp_path / "record.npz", (recorder, text), recorded(1, mode))
    assert len(record) == 2
    assert record.header.tasks == ["talk", "talk"]
    assert record.header.seeds == [0, 1]
    assert record.header.max_new_tokens == NEW_TOKENS
    assert record.header.options == ({} if mode == "greedy" else MODES[mode])
    for name, value in vars(text).items():
        read = getattr(record[0], name)
        assert np.array_equal(read, value) if isinstance(value, np.ndarray) else read == value, name
    assert [one.text.tolist() for one in record] == [record[0].text.tolist(), record[1].text.tolist()]
    with pytest.raises(IndexError, match="1 to 31 of this text, not at 32"):
        text.pool(32)
    assert "2 texts" in record.describe()
    assert os.listdir(tmp_path) == ["record.npz"]


def test_prompts_are_recorded_with_consecutive_seeds(tmp_path):
    recorder, text = recorded(1, "sampled")
    write_record(recorder, [("a", prompt_of(0)), ("b", prompt_of(1))], tmp_path / "record.npz", ("t", "h"))
    record = Record.load(tmp_path / "record.npz")
    assert (record.header.tasks, record.header.seeds) == (["a", "b"], [0, 1])
    assert (record.header.target, record.header.head) == ("t", "h")
    assert record[1].text.tolist() == text.text.tolist()


def test_a_text_of_one_token_has_no_rounds(tmp_path):
    recorder = TextRecorder(target(), head(0), max_new_tokens=1)
    record = written(tmp_path / "record.npz", (recorder, recorder.record(prompt_of(0))))
    (result,) = Replay(record, COSTS["cpu"]).run(FixedTree(11, 3, 4))
    assert result.stats.rounds == 0
    assert result.speedup == 1.0


KILLED = """
import os, signal, sys
from pathlib import Path
from eagle3_hf.evaluation.record import Record, RecordWriter
record = Record.load(sys.argv[1])
with RecordWriter(sys.argv[2], record.header) as writer:
    writer.add(record[0], 0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_record_whose_writer_was_killed_is_named(tmp_path):
    whole, path = tmp_path / "whole.npz", tmp_path / "record.npz"
    written(whole, recorded(0, "greedy"))
    run = subprocess.run([sys.executable, "-c", KILLED, str(whole), str(path)], check=False)
    assert run.returncode == -signal.SIGKILL
    with pytest.raises(RecordError, match=r"record\.npz is not a file: .*record\.npz\.part is a record that was not"):
        Record.load(path)
    with pytest.raises(RecordError, match=r"record\.npz\.part is not a complete record"):
        Record.load(tmp_path / "record.npz.part")


def test_a_failed_recording_leaves_no_file(tmp_path):
    recorder, text = recorded(0, "greedy")
    writer = RecordWriter(tmp_path / "record.npz", recorder.header())

    def fail():
        with writer:
            writer.add(text, 0)
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, fail)
    assert os.listdir(tmp_path) == []


def test_damaged_records_are_named(tmp_path):
    path = tmp_path / "record.npz"
    written(path, recorded(0, "greedy"))
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match=r"record\.npz is not a complete record"):
            Record.load(path)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    with pytest.raises(RecordError, match=r"record\.npz is damaged in text 0"):
        list(Record.load(path))
    with pytest.raises(RecordError, match=r"nowhere\.npz is not a file$"):
        Record.load(tmp_path / "nowhere.npz")


def test_records_of_another_kind_are_named(tmp_path):
    path = tmp_path / "record.npz"
    written(path, recorded(0, "greedy"))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(entries["header.json"])

    def write(changed):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in changed.items():
                archive.writestr(name, content)

    for changes, message in [
        ({"header.json": json.dumps({**header, "format": 99})}, "has the record format 99, expected 1"),
        ({"header.json": json.dumps([1])}, "has the record format None"),
        ({"header.json": json.dumps({"format": 1, "pages": 3})}, "header that is not one of a record"),
        ({"header.json": json.dumps({**header, "tasks": ["a", "b"]})}, r"lacks 1/increments\.npy"),
    ]:
        write(entries | changes)
        with pytest.raises(RecordError, match=message):
            Record.load(path)
    np.savez(path, tokens=np.arange(3))
    with pytest.raises(RecordError, match="is not a complete record"):
        Record.load(path)


def test_what_cannot_be_recorded_is_rejected():
    with pytest.raises(ValueError, match="needs max_new_tokens"):
        TextRecorder(target(), head(0))
    recorder = TextRecorder(target(), head(0), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"expected one prompt, of shape \(1, P\), got \(2, 9\)"):
        recorder.record(prompt_of(0).expand(2, -1))
