"""Carrying out several orders of one model, whose encoder is loaded once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cache

from latentmake.caches.encode import Lease, carry_out, load_encoder
from latentmake.caches.encoders import Loaded
from latentmake.caches.job import ExternalEncoder, Say
from latentmake.caches.shortages import Shortages
from latentmake.errors import SourceError
from latentmake.plan.orders import Order


def carry_out_all(
    orders: Iterable[Order],
    *,
    say: Say,
    threads: int,
    may_skip: bool,
    encoder_of: Callable[[Order], Loaded | ExternalEncoder | None],
    lease: Lease,
) -> None:
    """Carry out the orders of a job one after the other, and leave their receipts.

    Args:
        orders: to carry out, read one by one: those of a large dataset are large together.
        say: told of faults and of the outcomes, a line each.
        threads: that read and decode, and on a CPU encode.
        may_skip: whether `on_error: skip` counts.
        encoder_of: returns what is used instead of an order's own encoder, if anything.
        lease: holds a GPU; entered once, when there is something to encode.

    Raises:
        DeviceError: the device is out of memory or in error; the orders that are left wait.
        SourceError: orders had faulty items; all are named, and all orders were carried out.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    loaded: list[Loaded] = []
    made: dict[str, str] = {}
    shortages = Shortages()
    faults: list[SourceError] = []

    def load(order: Order, threads: int, say: Say, alone: bool) -> Loaded:
        loaded.append(load_encoder(order, threads, say, alone))
        return loaded[0]

    with contextlib.ExitStack() as held:
        device = cache(lambda: held.enter_context(lease(say)))
        for order in orders:
            try:
                receipt = carry_out(
                    order,
                    order.receipt,
                    say=say,
                    threads=threads,
                    may_skip=may_skip,
                    alone=True,
                    encoder=loaded[0] if loaded else encoder_of(order),
                    lease=lambda _: contextlib.nullcontext(device()),
                    load=load,
                    before=made,
                    shortages=shortages,
                )
                made |= {str(values[-1]): path for path, values in receipt.targets.items()}
            except SourceError as error:
                faults.append(error)
    if faults:
        raise SourceError(" | ".join(each.what for each in faults), hint=faults[0].hint)
