"""Damaged and contradictory heads: seeded cases, and what may come of loading one.

Run as a script it prints a summary:
`PYTHONPATH=.:tests python -m support.fuzz.cases --count 2000 [--seed 0] [--only 17]`.
Every case is a function of its number, so `--only` repeats one, with the folder's contents left for inspection.

An outcome is right if it is a `HeadFormatError` in plain words, or a head that is what the file says: every tensor bit
for bit, every field that no mutation touched, finite outputs, the same again after saving, and the target's own text.
"""

import argparse
import copy
import faulthandler
import json
import logging
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.model.attention import CachedAttention
from eagle3_hf.model.loading import describe_head
from eagle3_hf.published_formats import HeadFormatError
from support.families import prompt, tiny
from support.fuzz import mutations as fuzz_mutations
from support.fuzz.heads import HEADS, Published, our_name, write


SECONDS = 20
MEMORY = 2**30
LONGEST = 1500
# Words of Python or torch instead of ours: somebody forgot to look before they leapt.
RAW = re.compile(
    r"object has no attribute|NoneType|not subscriptable|unsupported operand|not iterable|unhashable|object at 0x"
    r"|Traceback|unexpected keyword|positional argument|INTERNAL ASSERT|not callable|index out of range"
    r"|list indices|string indices|: '\w+'$|: \d+$|^\W*\w*\W*$|maximum recursion|not supported between"
)
SCREAMS = re.compile(r"newly initialized|were not used|LOAD REPORT|[Mm]ismatch|not initialized|[Dd]eprecat|Error")


class Finding(Exception):
    """An outcome that is not allowed."""


class TooSlow(BaseException):
    """No `except Exception` of the code under test may swallow this."""


@dataclass
class Case:
    """One damaged head. `touched`: fields of the canonical config that a mutation may have changed."""

    number: int
    head: str
    published: Published
    rng: random.Random
    touched: set[str] = field(default_factory=set)
    story: list[str] = field(default_factory=list)


def new_case(number: int, seed: int = 0) -> Case:
    rng = random.Random(seed * 1_000_003 + number)
    head = rng.choice(list(HEADS))
    case = Case(number, head, copy.copy(HEADS[head]()), rng)
    case.published.config = copy.deepcopy(case.published.config)
    case.published.tensors = dict(case.published.tensors)
    case.published.generation = copy.deepcopy(case.published.generation)
    case.published.wanted = {}
    return case


def damage(case: Case, folder: Path) -> None:
    """Write the head to `folder`, changed in one to three ways."""
    kinds = case.rng.choices(fuzz_mutations.KINDS, weights=fuzz_mutations.WEIGHTS, k=case.rng.choice((1, 1, 2, 3)))
    later = []
    for kind in kinds:
        mutate, on_files = kind
        if on_files:
            later.append(mutate)
        else:
            mutate(case)
    write(folder, case.published)
    for mutate in later:
        mutate(case, folder)


# ----- what may come of it -------------------------------------------------------------------------------------------


@cache
def target():
    return tiny("llama")


@cache
def plain_text() -> torch.Tensor:
    return target().generate(prompt(5), max_new_tokens=6, do_sample=False)


def judge(case: Case, folder: Path, decode: bool) -> str:
    """`"refused"` or `"loaded"`.

    Raises:
        Finding: anything else.
    """
    described, refusal = None, None
    try:
        described = describe_head(folder)
    except HeadFormatError as error:
        check_words(folder, str(error))
        refusal = str(error)
    with heard() as lines:
        try:
            draft = Eagle3DraftModel.from_pretrained(folder)
        except HeadFormatError as error:
            check_words(folder, str(error))
            return "refused"
    if refusal is not None:
        raise Finding(f"describe_head refuses it, from_pretrained does not: {refusal}")
    screams = [line for line in lines if SCREAMS.search(line) or len(line) > LONGEST]
    if screams:
        raise Finding(f"loaded with cries: {screams}")
    check_head(case, folder, draft, described)
    if decode:
        check_decoding(draft)
    return "loaded"


def check_words(folder: Path, message: str) -> None:
    if str(folder) not in message:
        raise Finding(f"an error that does not name the folder: {message}")
    if len(message) > LONGEST:
        raise Finding(f"an error of {len(message)} characters: {message[:300]}")
    words = message.replace(str(folder), "FOLDER")
    if (RAW.search(words) and "cannot be read as a weights file" not in words) or len(words.split()) < 4:
        raise Finding(f"an error in raw words: {words}")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by the libraries' own readers and the order of preference that transformers has."""
    for whole, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        files = [folder / whole]
        if not (folder / whole).is_file():
            if not (folder / index).is_file():
                continue
            files = [
                folder / name for name in sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            ]
        tensors = {}
        for file in files:
            safe = file.suffix == ".safetensors"
            tensors.update(load_file(file) if safe else torch.load(file, weights_only=True, map_location="cpu"))
        return tensors
    raise Finding("loaded, but there are no weights")


@torch.no_grad()
def check_head(case: Case, folder: Path, draft: Eagle3DraftModel, described) -> None:
    check_tensors(read_tensors(folder), draft)
    check_fields(case, draft)
    if described.fields.get("num_hidden_layers", 1) != draft.config.num_hidden_layers:
        raise Finding("describe_head and the head disagree")
    config = draft.config
    width = config.num_captured_layers * config.target_hidden_size
    generator = torch.Generator().manual_seed(case.number)
    features = torch.randn(1, 7, width, generator=generator)
    embeds = torch.randn(1, 7, config.hidden_size, generator=generator)
    positions = torch.arange(7)[None]
    hidden = draft.run_layers(draft.fuse(features), embeds, positions, CachedAttention())
    outputs = [hidden, draft.feedback(hidden)]
    if config.own_lm_head:
        outputs.append(draft.compute_logits(hidden))
    sane = all(float(t.detach().abs().max()) < 1e6 for t in draft.parameters())  # flipped bits can make any number
    if sane and not all(bool(output.isfinite().all()) for output in outputs):
        raise Finding("outputs that are not finite")
    check_saved(folder / "again", draft)


def check_tensors(file: dict[str, torch.Tensor], draft: Eagle3DraftModel) -> None:
    state = draft.state_dict()
    seen = set()
    for name, tensor in file.items():
        ours = our_name(str(name))
        if ours is None:
            continue
        seen.add(ours)
        if ours not in state:
            raise Finding(f"loaded without {name}")
        if ours == "d2t":
            check_map(tensor, draft)
        elif not torch.equal(tensor.to(state[ours].dtype), state[ours]):
            raise Finding(f"{name} is not as in the file")
    lost = set(state) - seen - {"d2t", "t2d"}
    if lost or not ({"d2t"} <= seen or draft.config.draft_vocab_size == draft.config.vocab_size):
        raise Finding(f"parameters that no file filled: {sorted(lost) or 'd2t'}")


def check_map(stored: torch.Tensor, draft: Eagle3DraftModel) -> None:
    ids = draft.draft_vocab_ids()
    stored = stored.long()
    readings = (stored + torch.arange(len(stored)), stored)
    if not any(torch.equal(ids, reading) for reading in readings) or draft.d2t.dtype != torch.int64:
        raise Finding("d2t is not as in the file")
    inside = bool((ids >= 0).all() and (ids < draft.config.vocab_size).all())
    if (
        not inside
        or len(ids.unique()) != len(ids)
        or int(draft.t2d.sum()) != len(ids)
        or not bool(draft.t2d[ids].all())
    ):
        raise Finding("a vocabulary map that no head can have")


def check_fields(case: Case, draft: Eagle3DraftModel) -> None:
    for name, value in case.published.expected.items():
        found = getattr(draft.config, name)
        if name not in case.touched and (found != value or type(found) is not type(value)):
            raise Finding(f"{name} is {found!r}, and {value!r} was published")
    for name, value in case.published.wanted.items():
        found = getattr(draft.config, name)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            raise Finding(f"{name} is {found!r}, and the file says {value!r}")


def check_saved(folder: Path, draft: Eagle3DraftModel) -> None:
    draft.save_pretrained(folder)
    again = Eagle3DraftModel.from_pretrained(folder)
    mine, theirs = draft.state_dict(), again.state_dict()
    if mine.keys() != theirs.keys() or not all(torch.equal(t, theirs[name]) for name, t in mine.items()):
        raise Finding("tensors change when it is saved and loaded")
    before, after = draft.config.to_dict(), again.config.to_dict()
    for own in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        before.pop(own, None), after.pop(own, None)
    if before != after:
        changed = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
        raise Finding(f"fields change when it is saved and loaded: {[k for k, (a, b) in changed.items() if a != b]}")


def check_decoding(draft: Eagle3DraftModel) -> None:
    with heard():
        try:
            text = target().generate(prompt(5), assistant_model=draft, max_new_tokens=6, do_sample=False)
        except ValueError as error:
            if RAW.search(str(error)) or len(str(error).split()) < 5:
                raise Finding(f"generate refuses in raw words: {error}") from error
            return
    if not torch.equal(text, plain_text()):
        raise Finding("the text is not the target's")


class heard(logging.Handler):
    """What is logged or warned inside, kept instead of printed."""

    def __init__(self):
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.loggers = [logging.getLogger(name) for name in ("transformers", "py.warnings")]
        self.catcher = warnings.catch_warnings(record=True)
        self.caught = self.catcher.__enter__()
        warnings.simplefilter("always")
        for logger in self.loggers:
            logger.addHandler(self)
        return self.lines

    def __exit__(self, *exc_info):
        for logger in self.loggers:
            logger.removeHandler(self)
        self.lines += [str(warning.message) for warning in self.caught]
        self.catcher.__exit__(*exc_info)


# ----- the loop ------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """A bit more than a gigabyte above what is in use now; beyond it, allocations fail."""
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def alarm(signum, frame):
    raise TooSlow(f"more than {SECONDS} seconds")


def run_case(number: int, seed: int, decode: bool, keep: bool = False) -> tuple[str, str]:
    """Outcome and story of one case; a finding's outcome begins with `"FINDING"`."""
    case = new_case(number, seed)
    folder = Path(tempfile.mkdtemp(prefix=f"head{number}-"))
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # where not even the alarm is heard
    try:
        damage(case, folder)
        outcome = judge(case, folder, decode)
    except (Exception, TooSlow) as error:
        words = str(error).replace(str(folder), "FOLDER")
        outcome = f"FINDING {type(error).__name__}: {words[:600]}"
        if keep:
            raise
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        if not keep:
            shutil.rmtree(folder)
    return outcome, f"{number} {case.head}: {'; '.join(case.story)}"


def prepare() -> None:
    """Make this process ready for cases: it stays so."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, alarm)
    library = logging.getLogger("transformers")  # ours hang under it
    library.propagate = False
    library.handlers.clear()
    library.addHandler(logging.NullHandler())
    plain_text()


def run_cases(count: int, seed: int, decode_every: int, verbose: bool = False) -> dict:
    """The number of cases of each outcome, the findings, and what it took, in seconds and bytes."""
    limit_memory()
    start, before, outcomes, findings = time.monotonic(), peak_memory(), Counter(), []
    for number in range(count):
        sys.stderr.write(f"case {number}\n")  # the last one, should the process hang or be killed
        outcome, story = run_case(number, seed, number % decode_every == 0)
        if verbose:
            sys.stdout.write(f"{outcome}: {story}\n")
        if outcome.startswith("FINDING"):
            findings.append(f"{story}\n    {outcome}")
            outcome = "finding"
        outcomes[outcome] += 1
    summary = {**outcomes, "seconds": round(time.monotonic() - start, 1), "grown": peak_memory() - before}
    return {**summary, "findings": findings}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one case, with its traceback, and leave its folder")
    parser.add_argument("--decode-every", type=int, default=3, help="every n-th head that loads also decodes")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    prepare()
    if args.only is not None:
        sys.stdout.write(" ".join(run_case(args.only, args.seed, decode=True, keep=True)) + "\n")
        return
    sys.stdout.write(json.dumps(run_cases(args.count, args.seed, args.decode_every, args.verbose)) + "\n")


if __name__ == "__main__":
    main()
