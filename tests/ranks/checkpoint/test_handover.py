"""A run goes on without a shared disk: rank 0's checkpoint counts, is sent to who lacks it, and is never overtaken."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import CheckpointError, RankFailedError
from evenload.testing import run_ranks
from evenload.training.checkpoint import broadcast, files
from evenload.training.launch.environment import detect


def _train(folders: list[str], num_steps: int) -> tuple[list[int], list[float], str]:
    """Steps with a checkpoint after each; every rank has a folder of its own, as on machines without a shared disk."""
    folder = folders[detect().rank]
    run = evenload.init(project_dir=folder)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64))
    model, loader = run.prepare(torch.nn.Linear(3, 1, dtype=torch.float64), DataLoader(data, batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    before = [int(state["step"]) for state in optimizer.state.values()]
    for done, step in enumerate(loader, start=1):
        step.backward(lambda batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        run.checkpoint(every=1)
        if done == num_steps:
            break
    run.close()
    events = Path(folder, "events.jsonl")
    return before, model.weight.detach().flatten().tolist(), events.read_text() if events.exists() else ""


def test_rank_0s_checkpoint_is_sent_to_who_lacks_it(tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    first = run_ranks(_train, 2, folders, 2)
    assert not Path(folders[1]).exists() and first[0][1] == first[1][1]
    again = run_ranks(_train, 2, folders, 2)
    assert [before for before, _, _ in again] == [[2, 2], [2, 2]] and again[0][1] == again[1][1] != first[0][1]
    assert "resuming at step 2; sent to ranks [1], which can't see rank 0's run folder" in again[0][2]
    (straight,) = run_ranks(_train, 1, [str(tmp_path / "one")], 4)
    assert straight[1] == pytest.approx(again[0][1], rel=1e-12)
    with pytest.raises(RankFailedError, match=r"rank 1 has a newer checkpoint .*\(step 4\) than rank 0 \(none\)"):
        run_ranks(_train, 2, folders[::-1], 1)


def test_another_checkpoint_of_the_same_step_is_not_taken_for_rank_0s(tmp_path):
    """Both machines were the first one once, and have a checkpoint of step 2, of different runs."""
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        run_ranks(_train, 1, [folder], 2)
    skeleton = files.newest(Path(folders[1])) / files.SKELETON
    state = torch.load(skeleton, weights_only=True)
    torch.save(state, skeleton)
    (before, weights, _), (_, others, _) = run_ranks(_train, 2, folders, 1)
    assert before == [2, 2] and weights == others


def test_one_disk_for_all_is_read_by_all(tmp_path):
    folders = [str(tmp_path / "shared")] * 2
    run_ranks(_train, 2, folders, 2)
    before, _, events = run_ranks(_train, 2, folders, 1)[0]
    assert before == [2, 2] and "resuming at step 2" in events and "sent to" not in events


def test_identities_tell_checkpoints_apart(tmp_path):
    assert broadcast.ranks_without([[5.0, 1.0, 2.0]] * 3, tmp_path) == []
    assert broadcast.ranks_without([[5.0, 1.0, 2.0], [5.0, 1.0, 3.0], [-1.0, 0.0, 0.0]], tmp_path) == [1, 2]
    assert broadcast.ranks_without([[-1.0, 0.0, 0.0]] * 2, tmp_path) == []
    with pytest.raises(CheckpointError, match="rank 1 has a newer checkpoint"):
        broadcast.ranks_without([[5.0, 1.0, 2.0], [6.0, 1.0, 2.0]], tmp_path)
