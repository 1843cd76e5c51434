"""A run tells documents apart: the same training on every mesh, and another one without masks."""

import pytest

from pyruntime.context import Context
from pyruntime.train.data.batches import Batches
from tests.train import jobs
from tests.train.data.texts import lines_file, words

RECOMPUTED = {"activation_checkpointing": "full"}
JOB = {"steps": 4, "val_every": 2, "batch_size": 4, "micro_batch_size": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job on short documents, and what one rank makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    path = lines_file(folder, words(300, most=5))
    config = jobs.changed(jobs.job(folder, **JOB), "data", paths=(str(path),))
    jobs.prepare(config)
    batch = Batches(jobs.opened(config), 0, 4, 32, 256).read(0)
    assert batch.documents is not None
    return config, ranks.run(jobs.history, 1, config)[0]


@pytest.mark.parametrize(
    ("world", "parallel", "sections"),  # and the rest tensor parallel
    [
        (4, {"dp": 2}, {}),
        (4, {"tp_slices": 2}, {}),
        (4, {"cp": 2, "tp_slices": 2}, {}),
        (4, {"cp": 4, "zero": 3}, {"context": {"layout": "striped", "variant": "all_gather_kv"}}),
        (4, {"cp": 2, "dp": 2}, {"context": {"layout": "contiguous", "variant": "ulysses"}}),
        (4, {"pp": 2}, {"pipeline": {"kind": "zb-h1"}}),
        (4, {"pp": 2}, {"pipeline": {"kind": "seq1f1b", "slices": 3}, "train": RECOMPUTED}),
        (4, {"pp": 2, "cp": 2}, {"pipeline": {"kind": "terapipe", "slices": 2}}),
    ],
)  # fmt: skip
@pytest.mark.second_tier(but=["4-parallel5-sections5"])
def test_loss_curves_equal_those_of_one_rank(ranks, whole, world, parallel, sections):
    config, expected = whole
    config = jobs.changed(config, "parallel", **parallel)
    for section, values in sections.items():
        config = jobs.changed(config, section, **values)
    jobs.check_curves(ranks.run(jobs.history, world, config), expected)


def test_masks_change_what_is_learned(ranks, whole):
    config, expected = whole
    found = ranks.run(jobs.history, 1, jobs.changed(config, "data", document_masks=False))[0]
    assert abs(found[0].loss - expected[0].loss) > 1e-5


def unmasked_rings(group, config):
    with pytest.MonkeyPatch.context() as patch:
        attention = Context.attention
        patch.setattr(Context, "attention", lambda self, q, k, v, *_: attention(self, q, k, v))
        return jobs.history(group, config)


def test_a_ring_that_forgets_the_documents_is_found(ranks, whole):
    config, expected = whole
    found = ranks.run(unmasked_rings, 4, jobs.changed(config, "parallel", cp=2))[0]
    assert abs(found[0].loss - expected[0].loss) > 1e-5
