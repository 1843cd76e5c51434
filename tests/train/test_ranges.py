"""A profile of the trainer says which part of a step is which."""

from torch.profiler import ProfilerActivity, profile

from tests.train import jobs


def ranges(group, config) -> dict[str, int]:
    """How often each range of the trainer's own stands in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        jobs.history(group, config)
    names = [event.key for event in found.key_averages() for _ in range(event.count)]
    return {name: names.count(name) for name in ("step 1", "step 2", "forward", "backward", "update")}


def test_steps_and_their_parts_show_in_a_profile(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=2, val_every=0, batch_size=4, micro_batch_size=2)
    jobs.prepare(config)
    expected = {"step 1": 1, "step 2": 1, "forward": 4, "backward": 4, "update": 2}
    assert ranks.run(ranges, 2, config) == [expected] * 2
