"""`Noise` against `torch.multinomial` itself: equal ids, equal generator state, whatever happens in between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.decoding import coupling as noise_module
from eagle3_hf.decoding.coupling import Noise
from support.threads import another_thread


def choose(noise: Noise, probs: torch.Tensor) -> torch.Tensor:
    """What `torch.multinomial(probs, 1)` would return now; the generator moves as it would."""
    assert noise.fits(probs)
    winners, valid = noise.race(probs, noise.peek(0))
    if not valid:
        return torch.multinomial(probs, 1).squeeze(-1)
    if not noise.claim():
        winners, _ = noise.race(probs, noise.peek(0))
    noise.advance()
    return winners


# What a user's callback or processor may draw between two steps. `randn` of one keeps a spare normal in the state.
FOREIGN = {
    "nothing": lambda: None,
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(1),
    "randperm": lambda: torch.randperm(5),
    "multinomial": lambda: torch.multinomial(torch.ones(4), 1),
    "reseed": lambda: torch.manual_seed(11),
}
STEP = st.tuples(st.sampled_from(["nothing"] * 4 + sorted(FOREIGN)), st.integers(-1, 3), st.integers(-1, 3))


def random_probs(rows, vocab_size, steps, seed, temperature, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, rows, vocab_size, generator=generator) / temperature
    return logits.softmax(-1).to(dtype)


def vanilla(seed, probs, script):
    torch.manual_seed(seed)
    ids = []
    for step, (foreign, _, _) in zip(probs, script, strict=True):
        FOREIGN[foreign]()
        ids.append(torch.multinomial(step, 1).squeeze(-1).tolist())
    return ids, torch.get_rng_state()


def with_look_ahead(seed, probs, script):
    """The same, peeking up to three steps ahead before and after the foreign draw."""
    torch.manual_seed(seed)
    noise = Noise(*probs.shape[1:], "cpu", probs.dtype)
    ids = []
    for step, (foreign, before, after) in zip(probs, script, strict=True):
        if before >= 0:
            noise.peek(before)
        FOREIGN[foreign]()
        if after >= 0:
            noise.peek(after)
        ids.append(choose(noise, step).tolist())
    return ids, torch.get_rng_state()


@settings(deadline=None)
@given(
    is_threaded=st.booleans(),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 3),
    vocab_size=st.sampled_from([1, 2, 7, 16, 33, 300]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    script=st.lists(STEP, min_size=1, max_size=8),
)
def test_ids_and_generator_equal_multinomial(is_threaded, seed, rows, vocab_size, temperature, dtype, script):
    probs = random_probs(rows, vocab_size, len(script), seed % 1000, temperature, dtype)
    expected_ids, expected_state = vanilla(seed, probs, script)
    with another_thread(is_threaded):
        ids, state = with_look_ahead(seed, probs, script)
    assert ids == expected_ids
    assert torch.equal(state, expected_state)


def test_a_real_vocabulary():
    script = [("nothing", 4, 2)] * 6
    probs = random_probs(1, 49152, 6, 0, 0.8, torch.float32)
    expected_ids, expected_state = vanilla(3, probs, script)
    ids, state = with_look_ahead(3, probs, script)
    assert ids == expected_ids
    assert torch.equal(state, expected_state)


def test_most_tokens_cut():
    """Top-k leaves zeros; a zero must never be chosen, not even next to probabilities that underflow."""
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 17, 40]] = torch.tensor([0.0, -0.5, -100.0])
    probs = logits.softmax(-1).expand(200, 1, 50)
    script = [("nothing", -1, -1)] * 200
    ids, _ = with_look_ahead(0, probs, script)
    assert ids == vanilla(0, probs, script)[0]
    assert {row[0] for row in ids} == {3, 17}


def test_peek_is_what_the_step_uses_and_moves_nothing():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    noise = Noise(2, 30, "cpu")
    third, first = noise.peek(2), noise.peek(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert noise.peek(2) is third

    probs = random_probs(2, 30, 3, 1, 1.0, torch.float32)
    assert torch.equal(choose(noise, probs[0]), (probs[0] / first).argmax(-1))
    assert noise.peek(1) is third
    choose(noise, probs[1])
    assert torch.equal(choose(noise, probs[2]), (probs[2] / third).argmax(-1))


def test_peek_after_a_foreign_draw_continues_from_there():
    torch.manual_seed(5)
    noise = Noise(1, 30, "cpu")
    stale = noise.peek(0).clone()
    torch.rand(1)
    expected = torch.empty(1, 30).exponential_(generator=torch.Generator().set_state(torch.get_rng_state()))
    assert torch.equal(noise.peek(0), expected)
    assert not torch.equal(stale, expected)


INVALID = {
    "nan": [0.5, float("nan"), 0.5],
    "inf": [0.5, float("inf"), 0.5],
    "negative": [0.9, -0.1, 0.2],
    "zero": [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("bad_row", [0, 1])
@pytest.mark.parametrize("kind", sorted(INVALID))
def test_what_multinomial_refuses(kind, bad_row, peek):
    probs = torch.full((2, 3), 1 / 3)
    probs[bad_row] = torch.tensor(INVALID[kind])
    torch.manual_seed(2)
    with pytest.raises(RuntimeError) as expected:
        torch.multinomial(probs, 1)
    expected_state = torch.get_rng_state()

    torch.manual_seed(2)
    noise = Noise(2, 3, "cpu")
    if peek:
        noise.peek(1)
    with pytest.raises(RuntimeError) as raised:
        choose(noise, probs)
    assert str(raised.value) == str(expected.value)
    assert torch.equal(torch.get_rng_state(), expected_state)

    # And it is of use afterwards.
    good = torch.full((2, 3), 1 / 3)
    ids = choose(noise, good)
    torch.set_rng_state(expected_state)
    assert torch.equal(ids, torch.multinomial(good, 1).squeeze(-1))


@pytest.mark.parametrize("probs", [torch.ones(1, 4), torch.ones(1, 3).half()], ids=["wider", "half"])
def test_noise_fits_probabilities_of_its_own_kind_only(probs):
    assert Noise(1, 3, "cpu").fits(torch.ones(1, 3))
    assert not Noise(1, 3, "cpu").fits(probs)


# ----- several that draw from one generator --------------------------------------------------------------------------

# Who acts (0 to 2: a `Noise`; 3: plain sampling), how far it looks before, and whether it uses a step.
ACTS = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3), st.booleans()), min_size=2, max_size=24)


def used(noise):
    """The noise of the next step, used as `choose` uses it."""
    noise.peek(0)
    noise.claim()
    values = noise.peek(0)
    assert noise.advance()
    return values


@settings(deadline=None)
@given(acts=ACTS, is_threaded=st.booleans())
def test_nobody_gets_the_numbers_of_another(acts, is_threaded):
    torch.manual_seed(0)
    noises, found = [Noise(1, 9, "cpu") for _ in range(3)], []
    with another_thread(is_threaded):
        for who, step, uses in acts:
            if who == 3:
                found.append(torch.empty(1, 9).exponential_())
            elif uses:
                found.append(used(noises[who]))
            elif step >= 0:
                noises[who].peek(step)
    # So plain sampling would have drawn them, by itself and in this order.
    torch.manual_seed(0)
    assert all(torch.equal(noise, torch.empty(1, 9).exponential_()) for noise in found)


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("looks_again", [False, True])
def test_rows_ahead_are_told_that_somebody_has_drawn_since(is_threaded, looks_again):
    """A row used the next step's noise, somebody drew, and another row is to use it: it is not the same any more."""
    noise = Noise(2, 9, "cpu")
    with another_thread(is_threaded):
        first, second = (values.clone() for values in noise.peek_at([0, 1]))
        assert noise.advance()
        theirs = torch.empty(2, 9).exponential_()
        assert torch.equal(theirs, second)
        if looks_again:
            noise.peek(0)
        assert not noise.advance(), "one row has chosen with what somebody else has used"
        # From here on nobody can take what was looked at.
        coming = [values.clone() for values in noise.peek_at([0, 1, 2])]
        torch.empty(2, 9).exponential_()
        for values in coming:
            assert torch.equal(noise.peek(0), values)
            assert noise.advance()
    numbers = torch.cat([first, theirs, *coming]).flatten()
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("is_threaded", [False, True])
def test_somebody_draws_between_the_look_and_the_use(is_threaded, monkeypatch):
    if not is_threaded:  # whatever other tests have left running
        monkeypatch.setattr("eagle3_hf.decoding.coupling.threading.active_count", lambda: 1)
    noise, theirs = Noise(1, 500, "cpu"), []
    race = noise.race

    def interrupted(*arguments):
        if not theirs:
            theirs.append(int(torch.empty(1, 500).exponential_().argmin()))
        return race(*arguments)

    noise.race = interrupted
    with another_thread(is_threaded):
        chosen = int(choose(noise, torch.full((1, 500), 1 / 500)))
    torch.manual_seed(0)
    drawn = [int(torch.empty(1, 500).exponential_().argmin()) for _ in range(3)]
    assert theirs == drawn[:1]
    assert chosen == drawn[2 if is_threaded else 1], "beside threads, the draw that told of them is lost"


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, 16), (2, 300)])
def test_passing_over_noise_takes_as_many_numbers(is_fast, dtype, shape, monkeypatch):
    if not is_fast:
        monkeypatch.setattr(noise_module, "_is_one_integer_each", lambda dtype: False)
    drawing, passing = torch.Generator(), torch.Generator()
    torch.empty(shape, dtype=dtype).exponential_(generator=drawing)
    noise_module._pass_over(passing, shape, dtype)
    assert torch.equal(drawing.get_state(), passing.get_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_generator(dtype):
    probs = random_probs(2, 5000, 6, 0, 0.8, dtype).cuda()
    torch.cuda.manual_seed(4)
    expected = [torch.multinomial(step, 1).squeeze(-1).tolist() for step in probs]
    state = torch.cuda.get_rng_state()

    torch.cuda.manual_seed(4)
    noise = Noise(2, 5000, "cuda", dtype)
    noise.peek(3)
    assert [choose(noise, step).tolist() for step in probs] == expected
    assert torch.equal(torch.cuda.get_rng_state(), state)
