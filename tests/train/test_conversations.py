"""A run on conversations: its loss is the mean over all targets of a step, on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from pyruntime.llama.hf import save_hf
from pyruntime.train import checkpoint_folder
from pyruntime.train.data.batches import IGNORED, Batches
from pyruntime.train.model_of_run import make_model
from tests.train import jobs

CHATML = """{%- for message in messages %}
{{- '<' + message['role'][0] + '>' + message['content'] + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}
"""
"""ChatML in fewer bytes."""


def job(folder: Path, **train):
    """Samples whose numbers of targets are very unequal: answers of 2 bytes, and of 58."""
    config = jobs.job(
        folder, **{"steps": 3, "val_every": 2, "batch_size": 8, "micro_batch_size": 2, "seq_len": 64} | train
    )
    turns = [("q" * 50, "a"), ("q", "answer" * 9), ("what", "a" * 12), ("who", "me"), ("q" * 40, "c")] * 12
    lines = [{"prompt": f"{number}{asked}", "completion": said} for number, (asked, said) in enumerate(turns)]
    path, template = folder / "chats.jsonl", folder / "template.jinja"
    path.write_text("\n".join(map(json.dumps, lines)))
    template.write_text(CHATML)
    config = jobs.changed(config, "data", paths=(str(path),), chat_template=str(template), val_fraction=0.2)
    return jobs.changed(config, "optimizer", clip_grad_norm=0.0)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job, and what one rank makes of it."""
    config = job(tmp_path_factory.mktemp("whole"))
    jobs.prepare(config)
    return config, ranks.run(jobs.history, 1, config)[0]


def save_first_weights(group, config, folder):
    save_hf(make_model(jobs.resolved(config), jobs.runtime(group, config)), folder)


@pytest.fixture(scope="module")
def reference(ranks, whole, tmp_path_factory):
    """Loss and norm of the gradient of the first step, in fp64, by transformers: each conversation by itself,
    all targets in one mean. And the mean of the micro-batches' means."""
    from transformers import LlamaForCausalLM

    config, _ = whole
    folder = tmp_path_factory.mktemp("hf")
    ranks.run(save_first_weights, 1, config, folder)
    model = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float64)
    batch = Batches(jobs.opened(config), config.train.seed, 8, 64, 256).read(0)
    assert batch.documents is not None
    sums, counts = [], []
    for ids, labels, documents in zip(batch.ids, batch.labels, batch.documents, strict=True):
        logits = torch.cat([model(ids[None, documents == each]).logits[0] for each in documents.unique()])
        sums.append(cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED))
        counts.append(int((labels != IGNORED).sum()))
    loss = torch.stack(sums).sum() / sum(counts)
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    pairs = [(sums[n] + sums[n + 1]) / (counts[n] + counts[n + 1]) for n in range(0, 8, 2)]
    assert max(counts) > 4 * min(counts)
    return loss.item(), norm.item(), torch.stack(pairs).mean().item()


def test_the_loss_is_the_mean_over_all_targets_of_a_step(whole, reference):
    first = whole[1][0]
    loss, norm, of_means = reference
    assert first.loss == pytest.approx(loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(norm, rel=1e-5)
    assert abs(of_means - loss) > 1e-4 * loss  # else the test could not tell


MESHES = {  # the rest of four ranks is tensor parallel
    "zero 1": {"parallel": {"dp": 2, "zero": 1}},
    "tp": {"train": {"micro_batch_size": 4}},
    "zero 3": {"parallel": {"dp": 2, "zero": 3}, "train": {"micro_batch_size": 1}},
    "zero 3 and cp": {"parallel": {"dp": 2, "cp": 2, "zero": 3}},
    "hybrid": {"parallel": {"dp": 4, "dp_replicate": 2}, "train": {"micro_batch_size": 1}},
    "cp": {"parallel": {"cp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "pp and cp": {"parallel": {"pp": 2, "cp": 2}, "pipeline": {"kind": "seq1f1b", "slices": 2}},
    "pp and dp": {"parallel": {"pp": 2, "dp": 2}, "pipeline": {"kind": "zb-h1"}},
    "placed": {"parallel": {"cp": 4, "zero": 2}, "context": {"layout": "placed"}},
    "placed and tp": {
        "parallel": {"cp": 2},
        "context": {"layout": "placed"},
        "train": {"micro_batch_size": 1},
    },
    "unequal": {"parallel": {"dp": 2}, "train": {"micro_batch_size": 1, "micro_batches": (6, 2)}},
    "unequal and cp": {"parallel": {"dp": 2, "cp": 2, "zero": 2}, "train": {"micro_batches": (1, 3)}},
    "routed": {
        "parallel": {"pp": 2, "dp": 2, "zero": 2},
        "train": {"micro_batch_size": 1},
        "pipeline": {"speeds": (1.0, 0.5, 0.6, 1.0)},
    },
    "unequal replicas": {
        "parallel": {"dp": 4, "dp_replicate": 2, "zero": 2},
        "train": {"micro_batch_size": 1, "micro_batches": (1, 3, 2, 2)},
    },
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(but=["pp and cp", "zero 3 and cp", "unequal", "placed"])
def test_every_mesh_learns_the_same(ranks, whole, reference, name, tmp_path):
    config, expected = whole
    moments = {}
    for section, values in MESHES[name].items():
        config = jobs.changed(config, section, **values)
    config = jobs.changed(config, "output", run_dir=str(tmp_path))
    found = ranks.run(jobs.history, 4, config)
    jobs.check_curves(found, expected)
    assert found[0][0].loss == pytest.approx(reference[0], rel=1e-6)
    assert found[0][0].grad_norm == pytest.approx(reference[1], rel=1e-5)
    for run_dir in (str(tmp_path), whole[0].output.run_dir):
        folder = checkpoint_folder.newest(Path(run_dir))
        state = ranks.run(jobs.full_state, 1, whole[0], folder)[0]
        moments[run_dir] = {key: value for key, value in state.items() if key.startswith("exp_avg.")}
    found_moments, expected_moments = moments.values()
    assert len(found_moments) > 10
    for key, value in found_moments.items():  # gradients, averaged over the steps
        norm = expected_moments[key].norm()
        assert (value - expected_moments[key]).norm() < 1e-3 * norm, key
