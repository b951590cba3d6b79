"""What every contender of the recovery benchmark runs: a small MLP, 10 MB with AdamW's moments, steps of a few ms."""

from __future__ import annotations

import torch
from torch import nn

import elastic_runner as er


def main() -> None:
    """Train until somebody ends it."""
    config: er.RunConfig = er.load_config()
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x[:, :64].abs())
    with er.Worker(config) as worker:
        model = worker.prepare(
            nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        state = er.TrainState(model=model, optimizer=optimizer, data=er.ElasticLoader(dataset, config.data, worker))
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for a, b in step.microbatches():
                step.backward(nn.functional.mse_loss(model(a), b))
            step.optimize()
            checkpointer.maybe_save(step)


if __name__ == "__main__":
    main()
