"""The 8×8 digits of scikit-learn, for flax_dense.py and nnx_linear.py: batches and a table."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table
from sklearn.datasets import load_digits

CLASSES, BATCH = 10, 64

Images = npt.NDArray[np.float32]  # (n, 64), zero mean
Labels = npt.NDArray[np.int32]  # (n,), 0 to 9


@dataclass(frozen=True)
class Digits:
    """1797 handwritten digits, three quarters of them to learn from."""

    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[Images, Labels]]:
        """Shuffled batches of one size; the same ones for the same seed."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                picked = order[start : start + BATCH]
                yield self.images[picked], self.labels[picked]


def load() -> Digits:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16 - np.mean(pixels / 16)).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = np.split(order, [3 * len(order) // 4])
    labels = labels.astype(np.int32)
    return Digits(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Result:
    """What one training run ended with, on the test images."""

    name: str
    loss: float
    accuracy: float
    step_ms: float


def table_of(results: list[Result], title: str) -> Table:
    table = Table("arithmetic", title=title)
    for heading in ("test loss", "accuracy", "time of a step"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row.name, f"{row.loss:.4f}", f"{100 * row.accuracy:.1f} %", f"{row.step_ms:.1f} ms"
        )
    return table


def arguments_of(description: str | None, epochs: int) -> argparse.Namespace:
    """The command line of both examples, described by the first line of a docstring."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=epochs, help=f"default: {epochs}")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1")
    return arguments
