"""The same with `dml.run`."""

import os

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from torch.nn.parallel import DistributedDataParallel

import sparkdml as dml


def create_model():
    return torch.nn.Linear(8, 1)


def create_dataset():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def train(learning_rate, use_gpu):
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = int(os.environ["LOCAL_RANK"]) if use_gpu else "cpu"
    model = DistributedDataParallel(create_model().to(device))
    dataset = create_dataset()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    loss = dml.run(lambda ctx: train(1e-1, False), num_workers=2)[0]
    print(f"loss: {loss:.4f}")
