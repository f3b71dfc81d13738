"""A character model from an RDD of text, with its own training loop in `dml.run`.

    SPARKDML_DATA=folder python examples/shakespeare.py

The folder has `tinyshakespeare/input.txt`; without it, the model memorizes a nursery rhyme. The
RDD's rows are cut into shards, one part for each worker; `ctx.batches` gives every worker as many
batches as the others, and `ctx.comm` adds up the gradients.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from pyspark import RDD
from pyspark.sql import SparkSession
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparkdml as dml

LENGTH = 64  # characters that the model sees at once
RHYME = "The grand old duke of York, he had ten thousand men.\n" * 200


class CharacterModel(nn.Module):
    def __init__(self, num_characters: int = 128, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, num_characters)

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, state = self.memory(self.embedding(characters), state)
        return self.head(outputs), state


def cut(text: str) -> list[list[int]]:
    """Pieces of LENGTH + 1 character codes, each overlapping the next by one."""
    codes = [min(ord(character), 127) for character in text]
    return [codes[i : i + LENGTH + 1] for i in range(0, len(codes) - LENGTH, LENGTH)]


def read_pieces(spark: SparkSession, path: Path | None) -> RDD[list[int]]:
    sc = spark.sparkContext
    if path is None:
        return sc.parallelize(cut(RHYME), 4)
    return sc.wholeTextFiles(str(path)).flatMap(lambda file: cut(file[1])).repartition(4)


def train(ctx: dml.Context, epochs: int, batch_size: int) -> dict[str, Any]:
    """Runs in every worker; all start with the same weights, since they have the same seed."""
    torch.manual_seed(ctx.seed)
    model = CharacterModel().to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for batch in ctx.batches(batch_size, epoch):
            # Sums, not means, so that all characters count alike; the last number is their count.
            total = torch.zeros(2)
            optimizer.zero_grad()
            if batch.num_rows:  # a worker without further rows takes part with zeros
                pieces = batch["value"]
                outputs, _ = model(pieces[:, :-1])
                loss = cross_entropy(
                    outputs.flatten(0, 1), pieces[:, 1:].flatten(), reduction="sum"
                )
                loss.backward()
                total = torch.tensor([loss.item(), pieces[:, 1:].numel()])
            ctx.comm.allreduce_(total)
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                ctx.comm.allreduce_(parameter.grad)
                parameter.grad /= total[1]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if ctx.rank == 0:
            ctx.log(epoch=epoch + 1, loss=(total[0] / total[1]).item())
    return model.state_dict() if ctx.rank == 0 else {}


def write(model: CharacterModel, beginning: str, num_characters: int) -> str:
    """Let the model continue a text, always with the most likely character."""
    text, state = beginning, None
    characters = torch.tensor([[ord(character) for character in beginning]])
    with torch.no_grad():
        for _ in range(num_characters):
            outputs, state = model(characters, state)
            characters = outputs[:, -1:].argmax(dim=2)
            text += chr(characters.item())
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--begin", default="The ")
    options = parser.parse_args()
    spark = dml.session_builder("shakespeare").getOrCreate()
    path = options.data and Path(options.data) / "tinyshakespeare" / "input.txt"
    results = dml.run(
        lambda ctx: train(ctx, options.epochs, batch_size=16),
        data=read_pieces(spark, path),
        num_workers=2,
        on_event=lambda rank, event: print(event["values"]) if event["kind"] == "log" else None,
    )
    model = CharacterModel()
    model.load_state_dict(results[0])
    print(write(model, options.begin, 200))
    spark.stop()


if __name__ == "__main__":
    main()
