"""What MFU is a share of."""

import dataclasses

import pytest
import torch

from pyruntime.train.config import RunConfig, Train
from pyruntime.train.watching import peak
from pyruntime.train.watching.peak import amount, gemm_flops, peak_of
from tests.train import jobs


def peaks(group, dtype, stated):
    config = RunConfig(train=Train(dtype=dtype, peak_flops=stated))
    before = torch.random.get_rng_state()
    found = peak_of(config, jobs.runtime(group, config))
    assert torch.equal(torch.random.get_rng_state(), before)  # the run's own draws are as without
    return dataclasses.astuple(found)


def test_ranks_on_cpus_agree_on_the_gemms_that_they_measured(ranks):
    first, second = ranks.run(peaks, 2, "fp32", None)
    assert first == second
    flops, words = first
    assert 1e8 < flops < 1e14
    assert f"{amount(flops / 2)} a rank" in words and "measured just now: fp32 GEMMs of 512" in words


def test_a_stated_peak_is_taken_and_nothing_measured(ranks):
    assert ranks.run(peaks, 2, "bf16", 2e12) == [(4e12, "2.0 TFLOP/s a rank, as train.peak_flops states")] * 2


def test_the_rate_is_the_median_of_gemms_that_begin_together(monkeypatch):
    now, waited = 0.0, []
    seconds = iter([9.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 7.0])  # the first one warms up

    def linear(x, w):
        nonlocal now
        assert x.shape == w.shape == (64, 64) and x.dtype == torch.bfloat16
        now += next(seconds)

    monkeypatch.setattr(peak, "linear", linear)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: now)
    assert gemm_flops(64, torch.bfloat16, lambda: waited.append(1)) == pytest.approx(2 * 64**3 / 2.0)
    assert len(waited) == 7
