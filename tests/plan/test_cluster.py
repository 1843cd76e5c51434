"""Clusters are files; a wrong one is a sentence that names the key."""

import pytest

from pyruntime.plan.cluster import cluster_names, find_cluster, to_toml
from pyruntime.plan.measured import cluster_of, fit_alpha_beta


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_is_read_from_its_file_and_written_back(name, tmp_path):
    cluster = find_cluster(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(to_toml(cluster))
    assert find_cluster(str(path)) == cluster
    assert 0 < cluster.efficiency < 1 and cluster.memory_bytes > 1e10


def test_a_group_of_one_needs_no_link():
    assert find_cluster("frontier").bandwidth(8, 1) == float("inf")


def test_rings_between_nodes_share_the_adapters():
    cluster = find_cluster("dgx-h100")
    assert cluster.bandwidth(1, 16) == 8 * cluster.bandwidth(8, 16) == 8 * cluster.bandwidth(64, 2)


def test_an_unknown_cluster_is_refused_with_the_nearest_one():
    with pytest.raises(
        ValueError, match="There is no cluster 'fronteer', and no such file; the nearest is frontier"
    ):
        find_cluster("fronteer")


def broken(tmp_path, change):
    path = tmp_path / "mine.toml"
    path.write_text(change(to_toml(find_cluster("dgx-h100"))))
    with pytest.raises(ValueError) as refused:
        find_cluster(str(path))
    return str(refused.value)


def without(key):
    return lambda text: "\n".join(line for line in text.splitlines() if not line.startswith(key))


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    sentence = broken(tmp_path, without("peak_flops"))
    assert "mine.toml lacks peak_flops" in sentence
    assert "no key peak_flop; the nearest is peak_flops" in broken(
        tmp_path, lambda text: text.replace("peak_flops", "peak_flop")
    )
    assert "gpus_per_node must be above 0, found 0" in broken(
        tmp_path, lambda text: text.replace("gpus_per_node = 8", "gpus_per_node = 0")
    )
    assert "core_share must be above 0 and at most 1, found 2" in broken(
        tmp_path, lambda text: text.replace("core_share = 1.0", "core_share = 2")
    )
    assert "between must be a number, found 'fast'" in broken(
        tmp_path, lambda text: text.replace("between = 360000000000.0", 'between = "fast"')
    )
    assert "a row of inside has inner, size; it needs inner, size, bandwidth" in broken(
        tmp_path, lambda text: text.replace(", bandwidth = 3.8e+11", "")
    )
    assert "rings must be orders of the 8 GPUs of a node such as '0-1-2', found '0-1'" in broken(
        tmp_path, lambda text: text.replace("rings = []", 'rings = ["0-1"]')
    )
    assert "cannot be read" in broken(tmp_path, lambda text: text + "[")


def test_alpha_and_beta_are_found_again():
    sizes = [2**power for power in range(12, 26, 2)]
    seconds = [3 * 20e-6 + 3 / 4 * size / 5e9 for size in sizes]
    found = fit_alpha_beta(sizes, seconds, 4)
    assert found.alpha == pytest.approx(20e-6) and found.bandwidth == pytest.approx(5e9)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_noise_never_makes_a_negative_latency():
    found = fit_alpha_beta([1e3, 1e6, 1e7], [1e-7, 1.1e-3, 0.9e-2], 2)
    assert found.alpha == 0 and found.bandwidth > 0


@pytest.mark.parametrize(
    ("sizes", "seconds", "ranks", "sentence"),
    [
        ([1e6], [1e-3], 2, "need two sizes"),
        ([1e6, 2e6], [1e-3, 2e-3], 1, "2 ranks or more, found 1"),
        ([1e6, 2e6], [1e-3, 0.0], 2, "above 0 seconds, found 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sizes, seconds, ranks, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit_alpha_beta(sizes, seconds, ranks)


def test_a_measured_machine_is_a_cluster(tmp_path):
    link = fit_alpha_beta([1e6, 2e6], [1e-3 + 1e-5, 2e-3 + 1e-5], 2)
    cluster = cluster_of(
        "mine",
        "two ranks",
        flops=1e11,
        attention_flops=2e10,
        memory_bytes=8e9,
        memory_bandwidth=1e10,
        ranks_per_host=2,
        inside=link,
        between=None,
    )
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(cluster))
    found = find_cluster(str(path))
    assert found.bandwidth(1, 2) == pytest.approx(0.5e9, rel=1e-3)
    assert found.flops == 1e11 and found.attention_flops == 2e10
