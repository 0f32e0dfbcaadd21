"""The global generators while a batch is read: nobody else in the process draws from them, or seeds them."""

from __future__ import annotations

import threading

import torch

from holdfast.core.generators import generators_kept, seed_generators


def test_readers_in_threads_take_turns() -> None:
    inside, go_on, second = threading.Event(), threading.Event(), threading.Event()
    drawn: list[float] = []

    def first_reader() -> None:
        with generators_kept():
            seed_generators((1, 2, 3, 4))
            inside.set()
            go_on.wait(10)
            drawn.append(float(torch.rand(())))

    def second_reader() -> None:
        with generators_kept():
            second.set()
            seed_generators((5, 6, 7, 8))

    threads = [threading.Thread(target=first_reader), threading.Thread(target=second_reader)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not second.wait(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert second.is_set()
    with generators_kept():
        seed_generators((1, 2, 3, 4))
        assert drawn == [float(torch.rand(()))]
