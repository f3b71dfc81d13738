"""A Horovod script as they are written for `horovodrun -np 2 python horovod_before.py`."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, kernel_size=3)
        self.fc1 = nn.Linear(144, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load_images():
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images, torch.tensor(digits.target))


def shard(dataset, batch_size):
    # Horovod: each rank reads its own part.
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return sampler, DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(args):
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        # Horovod: one GPU for each local rank.
        torch.cuda.set_device(hvd.local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    dataset = load_images()
    train_sampler, train_loader = shard(Subset(dataset, range(1500)), args.batch_size)
    _, test_loader = shard(Subset(dataset, range(1500, len(dataset))), 1000)

    model = Net().to(device)
    # Horovod: the learning rate grows with the global batch.
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    # Horovod: all ranks begin alike.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: gradients are averaged as they come out of backward.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

    model.eval()
    right = total = 0
    for images, labels in test_loader:
        right += (model(images.to(device)).argmax(dim=1).cpu() == labels).sum().item()
        total += len(labels)
    # Horovod: the mean over all ranks.
    accuracy = hvd.allreduce(torch.tensor(right / total), name="accuracy").item()
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    args = parser.parse_args()
    train(args)
