"""Messages on disk and on the wire: typed headers, raw numbers, and nothing used before it is checked."""

from __future__ import annotations

import asyncio
import resource
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federation_runs import describe
from torch import Tensor

from holdfast.channels import Half
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import ChannelRun
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.links import Dependencies
from holdfast_deploy.storage.messages import (
    CHUNK,
    Header,
    MessageFile,
    expand,
    parse,
    specs,
    squeeze,
    write_message,
)
from holdfast_deploy.wire.receiving import Arrivals, Incoming, check_header, expanded, receive


class Pair(NamedTuple):
    x: Tensor
    v: Tensor


LARGE = 3 * CHUNK // 4 + 1  # float32 numbers in more than three pieces, the last of them short


def header(tree: object, **fields: object) -> Header:
    known = {"federation": "f", "sender": "a", "round": 3, "exchange": 1}
    return Header(**{**known, "tensors": specs(tree), **fields})


def pair() -> Pair:
    generator = torch.Generator().manual_seed(0)
    return Pair(torch.randn(1, LARGE, generator=generator), torch.randn(1, 5, generator=generator))


def test_a_message_is_read_as_it_was_written(tmp_path: Path) -> None:
    sent = pair()
    written = write_message(tmp_path / "m", header(sent), sent)
    written.verify()
    back = MessageFile(tmp_path / "m").read(Pair(sent.x.to("meta"), sent.v.to("meta")), torch.device("cpu"))
    assert torch.equal(back.x, sent.x)
    assert torch.equal(back.v, sent.v)
    total = Pair(torch.ones_like(sent.x), torch.ones_like(sent.v))
    written.add_to(total, weight=0.25)
    assert torch.equal(total.x, torch.ones_like(sent.x).add_(sent.x, alpha=0.25))
    assert (tmp_path / "m").stat().st_size - written.start == 4 * (LARGE + 5)


def test_half_precision_is_refused_where_numbers_are_too_large(tmp_path: Path) -> None:
    channel_run = ChannelRun(Half(), (), 0, 0, torch.tensor([0]), torch.tensor(False))
    channel_run.send(torch.tensor([[1e6]]))
    with pytest.raises(HoldfastError, match="beyond 65504"):
        channel_run.check()
    with pytest.raises(HoldfastError, match="diverged"):
        write_message(tmp_path / "m", header(torch.tensor([[torch.nan]])), torch.tensor([[torch.nan]]))
    assert not (tmp_path / "m").exists()


def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_message(path, header(pair()), pair())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(HoldfastError, match="damaged"):
        MessageFile(path).verify()
    path.write_bytes(content[:-1])
    with pytest.raises(HoldfastError, match="damaged"):
        MessageFile(path)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_compression_is_lossless_and_cannot_be_made_to_explode(itemsize: int) -> None:
    piece = np.random.default_rng(0).standard_normal(1000).astype(f"f{itemsize}").tobytes()
    assert expand(squeeze(piece, itemsize), len(piece), itemsize) == piece
    bomb = zlib.compress(bytes(10**7))
    for squeezed in (bomb, b"", b"garbage", squeeze(piece, itemsize)[:-10]):
        with pytest.raises(HoldfastError, match="a compressed piece"):
            expand(squeezed, len(piece), itemsize)


def frames_of(message: MessageFile) -> list[bytes]:
    return list(message.chunks())


def received(head: Header, frames: list[bytes], path: Path, squeezed: bool = False) -> MessageFile:
    async def stream() -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame

    with ThreadPoolExecutor(1) as pool:
        incoming, coming = Incoming(head, path), stream()
        try:
            coming = expanded(coming, head, 0) if squeezed else coming
            return asyncio.run(receive(coming, incoming, keep=True, pool=pool))
        finally:
            incoming.discard()


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("size", [None, 3001, 1])
def test_what_is_received_is_what_was_sent(size: int | None, squeezed: bool, tmp_path: Path) -> None:
    """However it is cut into pieces on its way, also within a number; ``size``: bytes of a piece."""
    tree = pair() if size != 1 else torch.randn(1, 999)
    sent = write_message(tmp_path / "sent", header(tree), tree)
    frames, body = list(sent.frames(squeezed)), b"".join(sent.frames(squeezed))
    cut = frames if size is None else [body[i : i + size] for i in range(0, len(body), size)]
    got = received(sent.header, cut, tmp_path / "got", squeezed)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "sent").read_bytes()
    assert got.header == sent.header


@pytest.mark.parametrize("breaks", [TimeoutError, asyncio.CancelledError])
def test_what_came_before_a_peer_fell_silent_is_not_asked_for_again(
    breaks: type[BaseException], tmp_path: Path
) -> None:
    federation = make_federation(describe({"name": "local-gecl", "lr": 0.1}), "test")
    sent = write_message(tmp_path / "sent", header(pair(), federation=federation.id), pair())

    asked = []

    async def some(first: int) -> AsyncGenerator[bytes, None]:
        asked.append(first)
        for frame in frames_of(sent)[:2]:
            yield frame
        raise breaks

    async def rest(first: int) -> AsyncGenerator[bytes, None]:
        asked.append(first)
        for frame in sent.chunks(first):
            yield frame

    async def scene() -> MessageFile:
        arrivals = Arrivals(federation, "a", tmp_path, Dependencies("b", "0" * 16, ["a", "b"]))
        with pytest.raises(breaks):
            await arrivals.take(3, 1, sent.header.tensors, sent.header, some)
        got = await arrivals.take(3, 1, sent.header.tensors, sent.header, rest)
        arrivals.close()
        return got

    got = asyncio.run(scene())
    assert asked == [0, 2 * CHUNK]
    assert list(got.chunks()) == frames_of(sent)
    assert not list(tmp_path.glob(".*"))


def test_a_message_for_which_there_is_no_room_leaves_no_trace(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Incoming(header(pair()), tmp_path / "got")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_what_came_before_a_break_is_kept_also_what_nobody_has_looked_at_yet(tmp_path: Path) -> None:
    sent = write_message(tmp_path / "sent", header(pair()), pair())
    frames, looking = frames_of(sent), threading.Event()

    async def broken() -> AsyncIterator[bytes]:
        for frame in frames[:3]:
            yield frame
        looking.set()
        raise ConnectionError

    incoming = Incoming(sent.header, tmp_path / "got")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(looking.wait)  # the first piece waits in the pool until all three are there
        with pytest.raises(ConnectionError):
            asyncio.run(receive(broken(), incoming, keep=True, pool=pool))
    assert incoming.got == 3 * CHUNK
    incoming.discard()


def test_bad_bytes_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    good = write_message(tmp_path / "sent", header(pair()), pair())
    frames = frames_of(good)
    nan = np.frombuffer(frames[0], "<f4").copy()
    nan[7] = np.nan
    flipped = bytearray(frames[1])
    flipped[0] ^= 1
    for bad, complaint in (
        (frames[:-1], "cut off"),
        ([*frames, b"more"], "got more"),
        ([frames[0], frames[1] + b"xx", *frames[2:]], "got more|infinite or NaN"),
        ([nan.tobytes(), *frames[1:]], "infinite or NaN"),
        ([frames[0], bytes(flipped), *frames[2:]], "checksum"),
        ([], "cut off"),
    ):
        with pytest.raises(HoldfastError, match=complaint):
            received(good.header, bad, tmp_path / "got")
    assert [path.name for path in tmp_path.iterdir()] == ["sent"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"federation": "g"}, "federation: expected f, got g"),
        ({"sender": "b"}, "sender: expected a, got b"),
        ({"round": 4}, "round: expected 3, got 4"),
        ({"exchange": 0}, "exchange: expected 1, got 0"),
        ({"tensors": specs(torch.zeros(1, 7))}, "tensors: expected"),
        ({"tensors": specs(tree_map(torch.Tensor.double, pair()))}, "tensors: expected"),
        ({"tensors": specs(torch.zeros(1, 10**7))}, "over the limit"),
        ({"notes": {"a": 1}}, "notes"),
    ],
)
def test_headers_must_be_those_asked_for(change: dict, complaint: str) -> None:
    expected = {"federation": "f", "sender": "a", "round": 3, "exchange": 1, "tensors": specs(pair())}
    check_header(header(pair()), **expected, limit=2**23)
    with pytest.raises(HoldfastError, match=complaint):
        check_header(header(pair(), **change), **expected, limit=2**23)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff",
        b"[]",
        b"null",
        b'{"round": 1}',
        header(pair()).model_dump_json().replace('"round":3', '"round":-3').encode(),
        header(pair()).model_dump_json().replace('"round":3', '"round":3,"more":1').encode(),
        header(pair()).model_dump_json().replace("float32", "object").encode(),
        header(pair()).model_dump_json().replace("[1,5]", "[1,-5]").encode(),
    ],
)
def test_what_is_not_a_header_is_an_error_for_people(text: bytes) -> None:
    with pytest.raises(HoldfastError):
        parse(Header, text)
