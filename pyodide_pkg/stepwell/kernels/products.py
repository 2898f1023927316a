"""The products of a decode step, as their variants name them: which matrix, and how they are tiled."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from stepwell.kernels.tuning import ProductKey, Tiling
from stepwell.step.recorder import Variant

QUAD_THREADS = 4
"""Threads of a workgroup of matmul_quad."""


def is_product(variant: Variant) -> bool:
    """Whether ``variant`` is a product of one row, which can be tiled in several ways."""
    kernel, constants = variant
    return kernel == "matvec" or (kernel == "matmul_quad" and ("tile", 1) in constants)


def key_of(variant: Variant) -> ProductKey:
    """The product that ``variant`` computes."""
    return ProductKey.of(variant.kernel, dict(variant.constants))


def tiling_of(variant: Variant) -> Tiling:
    """How ``variant``, a product, is tiled."""
    constants: dict[str, Any] = {"wide": QUAD_THREADS, "splits": 1} | dict(variant.constants)
    return Tiling(**{field.name: constants[field.name] for field in fields(Tiling) if field.name in constants})


def choices_in_use(variants: Iterable[Variant], tilings: Mapping[ProductKey, Tiling]) -> list[dict[str, Any]]:
    """The products among ``variants`` that are tiled as the table ``tilings`` says, as plain data."""
    rows = []
    for variant in variants:
        if is_product(variant):
            key, tiling = key_of(variant), tiling_of(variant)
            if tilings.get(key) == tiling:
                rows.append({**key._asdict(), **asdict(tiling)})
    return rows
