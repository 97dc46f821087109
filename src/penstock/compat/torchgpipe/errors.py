"""Errors in the situations in which torchgpipe has them, of the types that its users catch."""

from __future__ import annotations

from penstock.errors import UsageError


class BalanceError(UsageError):
    """A balance that does not fit the model (ValueError); says how to find one that does."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}. To have the layers measured and a balance found: from penstock.compat.torchgpipe.balance "
            f"import balance_by_time; balance = balance_by_time(partitions, model, sample)"
        )


class WrongTypeError(UsageError, TypeError):
    """A model, layer, input or output of another kind than GPipe takes."""


class TooFewDevicesError(UsageError, IndexError):
    """Fewer devices than partitions."""
