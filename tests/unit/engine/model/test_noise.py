"""Counter-based noise: the published hash, stable for ever, unrelated where it should be, and the fast draw exact."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_engine.sampling.noise import (
    _GOLDEN,
    GumbelDraw,
    Stream,
    gumbel_at,
    gumbel_noise,
    mix,
    row_keys,
    uniforms,
)


def test_noise_is_the_published_splitmix64():
    """The first output for seed 0 is the one that the generator's other implementations give."""

    def reference(seed: int) -> int:
        mask = (1 << 64) - 1
        z = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert reference(0) == 0xE220A8397B1DCDAF
    for seed in (0, 1, 2**63 - 1):
        assert int(mix(np.array([seed + _GOLDEN & (2**64 - 1)], dtype=np.uint64))[0]) == reference(seed)


def test_noise_does_not_change_between_releases():
    """A user's seed should give the same text tomorrow."""
    noise = gumbel_noise([1234, -1, 2**64 - 1], [0, 10, 10], 3)
    known = [-0.12202897954674256, -0.24741313423954583, -0.19230361807603122]
    assert np.allclose(noise[0], known, rtol=0, atol=1e-12)
    assert np.array_equal(noise[1], noise[2])  # Seeds count modulo 2^64.


def test_noise_of_neighbouring_seeds_positions_and_streams_is_unrelated():
    keys = [row_keys([5], [9]), row_keys([6], [9]), row_keys([5], [10])]
    keys += [row_keys([5], [9], stream) for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)]
    noise = gumbel_at(np.concatenate(keys)[:, None], np.arange(20000))
    off_diagonal = np.corrcoef(noise)[~np.eye(len(keys), dtype=bool)]
    assert np.all(np.abs(off_diagonal) < 0.03)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.03  # Euler's constant is the mean of a Gumbel variable.


def test_uniforms_fill_their_interval():
    values = uniforms(row_keys([3] * 20000, range(20000), Stream.ACCEPT))
    assert 0 < values.min() < 0.001
    assert 0.999 < values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert np.all(np.abs(counts - 1000) < 160)  # 5 standard deviations.


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 40.0])
def test_the_fast_draw_is_the_plain_formula(scale):
    vocab_size = 3000
    draw = GumbelDraw(vocab_size)
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((200, vocab_size)) * scale).astype(np.float32)
    x[:, ::7] = -np.inf
    # A few likely tokens over a wide tail, where the winner often comes from far below the maximum.
    x[100:, :3] = 9.0
    keys = row_keys(range(200), range(200))
    plain = (x + gumbel_at(keys[:, None], np.arange(vocab_size))).argmax(-1)
    assert [draw(row, key) for row, key in zip(x, keys, strict=True)] == plain.tolist()
    if scale == 3.0:
        assert len({int(token) for token in plain[100:]} - {0, 1, 2}) > 5
