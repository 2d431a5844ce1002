"""Data parallel training on two processes equals training on one."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thresher.nn import MsaAttention, collect_kl

HIDDEN, STEPS = 24, 3


class Model(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            MsaAttention(HIDDEN, 4, 2, 8, 2, 1, top_k_blocks=2, block_size=8, mode=mode)
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x, collect_kl(self)


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 40, HIDDEN, generator=g)


def train(model, rows):
    """Weights after some steps on these rows of every batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        y, kl = model(batch(step)[rows])
        optimizer.zero_grad()
        (y.square().mean() + kl).backward()
        optimizer.step()
    return {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}


def work(rank, folder, mode):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    weights = train(DistributedDataParallel(Model(mode)), slice(2 * rank, 2 * rank + 2))
    torch.save(weights, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_two_processes_equal_one(tmp_path, mode):
    torch.multiprocessing.spawn(work, args=(str(tmp_path), mode), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    start = {n: p.detach().clone() for n, p in Model(mode).named_parameters()}
    alone = train(Model(mode), slice(None))
    assert first.keys() == second.keys() == alone.keys()
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, start[name]), f"{name} was not trained"
