"""The two-loop recursion of L-BFGS on dot products alone: no vector is touched.

The direction is a combination of the remembered steps s, the changes y of the gradient in them, and
the gradient g. Its coefficients follow from the products of all these vectors with each other, so
ranks that hold slices of the vectors need to add up one small table an iteration, in place of two
scalars for each pair, one after the other. (Nocedal 1980, doi 10.1090/S0025-5718-1980-0572855-7;
on products alone: Chen, Wang and Zhou, Large-scale L-BFGS using MapReduce, NIPS 2014.)
"""

from __future__ import annotations

from collections.abc import Sequence

Table = Sequence[Sequence[float]]


def direction_coefficients(products: Table) -> list[float]:
    """Of s_0 … s_m-1, y_0 … y_m-1 and g, from the table of their products; the oldest first."""
    num_pairs = (len(products) - 1) // 2
    coefficients = [0.0] * (2 * num_pairs) + [-1.0]
    if not num_pairs:
        return coefficients

    def along(index: int) -> float:
        """The product of the direction so far with one of the vectors."""
        return sum(c * row[index] for c, row in zip(coefficients, products, strict=True))

    shares = [0.0] * num_pairs
    for pair in reversed(range(num_pairs)):
        s, y = pair, num_pairs + pair
        shares[pair] = along(s) / products[s][y]
        coefficients[y] -= shares[pair]
    newest_s, newest_y = num_pairs - 1, 2 * num_pairs - 1
    scale = products[newest_s][newest_y] / products[newest_y][newest_y]
    coefficients = [scale * c for c in coefficients]
    for pair in range(num_pairs):
        s, y = pair, num_pairs + pair
        coefficients[s] += shares[pair] - along(y) / products[s][y]
    return coefficients


def combined(coefficients: Sequence[float], products: Table, index: int) -> float:
    """The product of a combination of the vectors with one of them."""
    return sum(c * row[index] for c, row in zip(coefficients, products, strict=True))
