"""Which device a rank gets, for every way in which ranks and GPUs can come together."""

import pytest
import torch

from pyruntime.comm.devices import SHARE, Host, place


def host(local_rank=0, ranks=1, gpus=0, may_share=False) -> Host:
    return Host(local_rank, ranks, gpus, may_share)


def test_auto_takes_gpus_only_where_every_rank_has_one():
    for rank in range(4):
        placed = place("auto", host(rank, ranks=4, gpus=4))
        assert placed.device == torch.device("cuda", rank) and placed.backend == "cpu:gloo,cuda:nccl"
    alone = place("auto", host(gpus=8))
    assert alone.device == torch.device("cuda", 0)
    fewer = place("auto", host(ranks=4, gpus=3, may_share=True))
    assert (fewer.device.type, fewer.backend, fewer.why) == (
        "cpu",
        "gloo",
        "3 GPU(s) for 4 rank(s) of this host",
    )
    none = place("auto", host(ranks=2))
    assert none.device.type == "cpu" and none.why.startswith("no GPU that torch can use")


def test_the_cpu_is_taken_where_it_is_asked_for():
    assert place("cpu", host(gpus=8)).device == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_a_sentence():
    with pytest.raises(ValueError, match=r"cuda was asked for, and this torch .*; use cpu, or auto"):
        place("cuda", host())
    with pytest.raises(ValueError, match="is none of auto, cpu, cuda"):
        place("tpu", host())


def test_ranks_share_a_gpu_only_where_torch_is_told_so():
    with pytest.raises(ValueError, match=rf"3 ranks .* it has 2 GPU.*{SHARE}=1"):
        place("cuda", host(ranks=3, gpus=2))
    placed = [place("cuda", host(rank, ranks=3, gpus=2, may_share=True)) for rank in range(3)]
    assert [each.device.index for each in placed] == [0, 1, 0]
    assert {each.backend for each in placed} == {"gloo"}  # NCCL refuses two ranks on one device


def test_a_rank_knows_its_host_from_torchrun(monkeypatch):
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4"), ("WORLD_SIZE", "16"), (SHARE, "1")):
        monkeypatch.setenv(name, value)
    here = Host.here()
    assert (here.local_rank, here.ranks, here.may_share) == (3, 4, True)
    assert here.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
