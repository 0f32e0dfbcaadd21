"""Secure aggregation: the sum is exact, one message tells nothing, and who drops out stops nobody."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Set
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.arithmetic import (
    PRIME,
    decode,
    default_threshold,
    encode,
    join,
    limit,
    split,
)
from holdfast.privacy.aggregation.keys import Announcement, Secrets, agreed, mask, unseal
from holdfast.privacy.aggregation.protocol import Client, among, pair_mask, total

NAMES = ("ant", "bee", "cat", "dog", "eel")


def clients(threshold: int, context: bytes = b"round 1", names=NAMES) -> dict[str, Client]:
    secrets = {name: Secrets(hashlib.sha256(name.encode()).digest(), context) for name in names}
    announced = {name: own.announcement() for name, own in secrets.items()}
    return {name: Client(name, secrets[name], announced, threshold) for name in names}


def aggregated(
    values: dict[str, Tensor], threshold: int, dealt: Set[str], arrived: Set[str], revealing: Set[str]
) -> Tensor:
    """All four phases, with who is still there in each."""
    there = clients(threshold)
    sealed = {name: there[name].deal() for name in dealt}
    masked = {name: there[name].masked(values[name], dealt) for name in dealt}
    got = {name: masked[name] for name in NAMES if name in arrived}
    revealed = {
        name: there[name].reveal({other: sealed[other][name] for other in dealt}, dealt, arrived, arrived)
        for name in revealing
    }
    return total(got, dealt, there["ant"].announced, revealed, threshold, b"round 1")


def some_values(seed: int = 0, size: int = 7) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=draw, dtype=torch.float64) for name in NAMES}


def subsets(names, least: int):
    for size in range(least, len(names) + 1):
        yield from (set(chosen) for chosen in itertools.combinations(names, size))


def test_the_sum_is_exact_whoever_drops_out_in_any_phase() -> None:
    values = {name: encode(part, len(NAMES)) for name, part in some_values().items()}
    cases = 0
    for dealt in subsets(NAMES, 3):
        for arrived in subsets(sorted(dealt), 3):
            for revealing in subsets(sorted(arrived), 3):
                cases += 1
                got = aggregated(values, 3, dealt, arrived, revealing)
                assert torch.equal(got, sum(values[name] for name in arrived))
    assert cases == 106  # of each client: gone in phase 2, 3 or 4, or there to the end, and three are


def test_the_mean_is_the_plain_one_to_the_stated_precision() -> None:
    values = some_values()
    n = len(NAMES)
    coded = {name: encode(part, n) for name, part in values.items()}
    everybody = set(NAMES)
    got = decode(aggregated(coded, 4, everybody, everybody, everybody)) / n
    error = (got - sum(values.values()) / n).abs().max()
    assert 0 < error <= 2.0**-33  # as the documentation says


def test_fewer_than_the_threshold_learn_nothing_and_stop_the_round() -> None:
    values = {name: encode(part, 5) for name, part in some_values().items()}
    everybody = set(NAMES)
    with pytest.raises(HoldfastError, match="2 clients revealed their shares, 3 are needed"):
        aggregated(values, 3, everybody, everybody, {"ant", "bee"})
    with pytest.raises(HoldfastError, match="only 2 clients sent a message"):
        aggregated(values, 3, everybody, {"ant", "bee"}, {"ant"})
    with pytest.raises(HoldfastError, match="only 2 clients dealt shares"):
        aggregated(values, 3, {"ant", "bee"}, {"ant", "bee"}, {"ant"})


def test_what_the_server_has_of_one_client_is_uniform() -> None:
    """The masked message of many rounds, always of the same values: bytes are even, bits independent."""
    values, everybody = encode(torch.full((256,), 3.25, dtype=torch.float64), 5), set(NAMES)
    said = torch.stack(
        [clients(3, f"round {r}".encode())["bee"].masked(values, everybody) for r in range(64)]
    )
    counts = torch.bincount(torch.from_numpy(said.numpy().view("uint8").ravel()).long(), minlength=256)
    expected = said.numel() * 8 / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert 170 < chi < 355  # 255 degrees of freedom: outside with a probability of 1e-5
    bits = torch.stack([said >> k & 1 for k in range(64)]).double().flatten(1) - 0.5
    correlation = bits @ bits.T / bits.shape[1] * 4 - torch.eye(64)
    assert float(correlation.abs().max()) < 6 / bits.shape[1] ** 0.5


def test_plain_messages_would_not_pass_for_uniform() -> None:
    values = encode(torch.full((256 * 64,), 3.25, dtype=torch.float64), 5)
    counts = torch.bincount(torch.from_numpy(values.numpy().view("uint8").ravel()).long(), minlength=256)
    expected = values.numel() * 8 / 256
    assert float(((counts - expected) ** 2 / expected).sum()) > 355


def test_dropped_clients_stay_hidden() -> None:
    """Its message came too late; with everything that was revealed, its own mask is still on it."""
    there, everybody = clients(3), set(NAMES)
    values = encode(torch.full((4096,), 3.25, dtype=torch.float64), 5)
    sealed = {name: there[name].deal() for name in NAMES}
    late = there["eel"].masked(values, everybody)
    arrived = everybody - {"eel"}
    revealed = {
        name: there[name].reveal({other: sealed[other][name] for other in NAMES}, everybody, arrived, arrived)
        for name in arrived
    }
    key = join({x: revealed[name]["eel"] for x, name in enumerate(NAMES, 1) if name in arrived}, 3)
    assert key == there["eel"].secrets.masks  # so all masks of pairs can be taken off
    secrets = there["eel"].secrets
    view = among(there["eel"].roster, everybody)
    for name in arrived:
        announced = there["eel"].announced[name]
        late = late - pair_mask("eel", key, name, announced.masks, view, len(late))
    assert torch.equal(late, values + mask(secrets.own, len(late)))  # nothing else hides it now
    counts = torch.bincount(torch.from_numpy(late.numpy().view("uint8").ravel()).long(), minlength=256)
    expected = late.numel() * 8 / 256
    assert 170 < float(((counts - expected) ** 2 / expected).sum()) < 355


def test_a_killed_client_says_the_same_again_and_another_round_is_another() -> None:
    values, everybody = encode(torch.ones(5), 5), set(NAMES)
    first, again, other = clients(3)["ant"], clients(3)["ant"], clients(3, b"round 2")["ant"]
    assert first.deal() == again.deal()
    assert first.deal() != other.deal()
    assert torch.equal(first.masked(values, everybody), again.masked(values, everybody))
    assert not torch.equal(first.masked(values, everybody), other.masked(values, everybody))
    assert not set(first.secrets.announcement()) & set(other.secrets.announcement())


def test_a_server_that_changes_what_it_passes_on_is_found_out() -> None:
    there, everybody = clients(3), set(NAMES)
    sealed = {name: there[name].deal() for name in NAMES}
    to_ant = {name: sealed[name]["ant"] for name in NAMES}
    swapped = to_ant | {"bee": sealed["bee"]["cat"]}
    with pytest.raises(HoldfastError, match="what bee dealt was changed"):
        there["ant"].reveal(swapped, everybody, everybody, everybody)
    mine = there["ant"]
    other = dict(mine.announced) | {"ant": Announcement(bytes(32), bytes(32), bytes(32))}
    with pytest.raises(HoldfastError, match="another key than this client's"):
        replace(mine, announced=other)
    with pytest.raises(HoldfastError, match="clients that did not take part"):
        mine.reveal(to_ant, everybody - {"eel"}, everybody, everybody)


def test_a_wrong_share_shows() -> None:
    there, everybody = clients(5), set(NAMES)
    values = {name: encode(part, 5) for name, part in some_values().items()}
    sealed = {name: there[name].deal() for name in NAMES}
    masked = {name: there[name].masked(values[name], everybody) for name in NAMES}
    revealed = {
        name: there[name].reveal(
            {other: sealed[other][name] for other in NAMES}, everybody, everybody, everybody
        )
        for name in NAMES
    }
    wrong = bytearray(revealed["cat"]["dog"])
    wrong[-1] ^= 1
    revealed["cat"]["dog"] = bytes(wrong)
    with pytest.raises(HoldfastError, match="the shares of dog's secret do not fit"):
        total(masked, everybody, there["ant"].announced, revealed, 5, b"round 1")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
def test_what_does_not_fit_is_refused(value: float) -> None:
    with pytest.raises(HoldfastError, match="finite numbers up to"):
        encode(torch.tensor([0.0, value]), 5)


def test_the_limit_holds_for_numbers_of_any_type() -> None:
    beyond = torch.tensor([limit(3)], dtype=torch.float32)  # rounded up
    assert float(beyond) > limit(3)
    with pytest.raises(HoldfastError, match="finite numbers up to"):
        encode(beyond, 3)


def test_the_largest_numbers_of_all_do_not_overflow() -> None:
    largest = torch.tensor([limit(5)], dtype=torch.float64)
    for sign in (1, -1):
        assert decode(5 * encode(sign * largest, 5)) == 5 * sign * largest


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (2, 3), (5, 7)])
def test_shares(threshold: int, holders: int) -> None:
    secret, random = bytes(range(32)), hashlib.shake_256(b"x").digest(66 * (threshold - 1))
    shares = dict(enumerate(split(secret, threshold, holders, random), 1))
    for chosen in itertools.combinations(shares, threshold):
        assert join({x: shares[x] for x in chosen}, threshold) == secret
    for chosen in itertools.combinations(
        shares, threshold - 1
    ):  # a polynomial of a lower degree does not fit
        assert join({x: shares[x] for x in chosen} | {99: bytes(66)}, threshold) != secret


def test_fewer_shares_than_the_threshold_do_not_give_the_secrets() -> None:
    """As dealt: the polynomials have the full degree, and those of the two secrets nothing in common."""
    there = clients(4)
    ant, sealed = there["ant"], there["ant"].deal()
    shares = []
    for name in NAMES:
        use = b"seal\0ant\0" + name.encode()
        key = agreed(there[name].secrets.seals, ant.announced["ant"].seals, ant.roster, use)
        opened = unseal(key, sealed[name], ant.roster)
        assert opened is not None
        shares.append((opened[:66], opened[66:]))
    secrets = (ant.secrets.masks, ant.secrets.own)
    for kind, secret in enumerate(secrets):
        for fewer in (1, 2, 3):
            for chosen in itertools.combinations(range(5), fewer):
                assert join({i + 1: shares[i][kind] for i in chosen}, fewer) != secret
    apart = {(int.from_bytes(key) - int.from_bytes(own)) % PRIME for key, own in shares}
    assert len(apart) == len(NAMES)
    assert (int.from_bytes(secrets[0]) - int.from_bytes(secrets[1])) % PRIME not in apart


def test_the_secrets_of_a_client_have_nothing_in_common() -> None:
    own = Secrets(bytes(32), b"round 1")
    assert len({own.masks, own.seals, own.own, own.randomness(32, b""), *own.announcement()}) == 7


def test_more_than_half_must_hold_together() -> None:
    assert [default_threshold(n) for n in (1, 2, 3, 4, 5, 10)] == [1, 2, 3, 3, 4, 7]
    with pytest.raises(HoldfastError, match="more than half"):
        clients(2, names=NAMES[:4])


# --- a server that tells clients different things ----------------------------------------------------------


def test_a_server_that_tells_clients_of_different_sets_is_told_no_share() -> None:
    """Without phase 4, these sets would unmask ant: all revealed shares of one kind, bee's and cat's keys."""
    there, everybody = clients(3), set(NAMES)
    sealed = {name: there[name].deal() for name in NAMES}
    told = {
        "ant": ({"ant", "bee", "cat"}, {"ant", "bee", "cat"}),
        "bee": (everybody, everybody - {"cat"}),
        "cat": (everybody, everybody - {"bee"}),
        "dog": (everybody, everybody - {"bee", "cat"}),
        "eel": (everybody, everybody - {"bee", "cat"}),
    }
    said = {name: there[name].confirm(*sets) for name, sets in told.items()}
    for name, (dealt, arrived) in told.items():
        confirmed = {other for other in NAMES if said[other] == said[name]}
        to_it = {other: sealed[other][name] for other in dealt}
        with pytest.raises(HoldfastError, match="clients confirm whose messages arrived, and 3 are needed"):
            there[name].reveal(to_it, dealt, arrived, confirmed)


def test_confirmations_of_others_than_who_arrived_do_not_count() -> None:
    there, everybody = clients(3), set(NAMES)
    sealed = {name: there[name].deal()["ant"] for name in NAMES}
    arrived = {"ant", "bee", "cat"}
    with pytest.raises(HoldfastError, match="2 clients confirm"):
        there["ant"].reveal(sealed, everybody, arrived, {"ant", "bee", "dog", "eel"})


def test_what_is_confirmed_names_all_that_a_client_was_told() -> None:
    everybody, fewer = set(NAMES), set(NAMES[:4])
    said = [
        clients(3)["ant"].confirm(everybody, everybody),
        clients(3)["ant"].confirm(everybody, fewer),
        clients(3)["ant"].confirm(fewer, fewer),
        clients(4)["ant"].confirm(everybody, everybody),
        clients(3, b"round 2")["ant"].confirm(everybody, everybody),
        clients(3, names=NAMES[:4])["ant"].confirm(fewer, fewer),
    ]
    assert len(set(said)) == len(said)
    assert said[0] == clients(3)["eel"].confirm(everybody, everybody)


def test_clients_that_were_told_different_things_share_no_mask() -> None:
    """What one adds for the other cancels only if both were told of the same clients, keys and dealers."""
    nothing = torch.zeros(8, dtype=torch.int64)

    def added(client: Client, dealt: Set[str]) -> Tensor:
        view = among(client.roster, dealt)
        other = {"ant": "bee", "bee": "ant"}[client.name]
        key = client.announced[other].masks
        return pair_mask(client.name, client.secrets.masks, other, key, view, 8)

    everybody, fewer = set(NAMES), set(NAMES[:4])
    ant = clients(3)["ant"]
    assert torch.equal(added(ant, everybody) + added(clients(3)["bee"], everybody), nothing)
    others = [
        (clients(3)["bee"], fewer),
        (clients(4)["bee"], everybody),
        (clients(3, names=NAMES[:4])["bee"], everybody),
    ]
    for bee, dealt in others:
        assert bool((added(ant, everybody) + added(bee, dealt) != 0).all())


def test_shares_for_other_clients_are_other_shares_under_other_keys() -> None:
    """A round dealt twice, to different clients, would give a holder two points of one polynomial."""
    first, second = clients(3)["ant"], clients(3, names=NAMES[:4])["ant"]
    assert first.secrets.randomness(66, first.roster) != second.secrets.randomness(66, second.roster)
    assert not set(first.deal().values()) & set(second.deal().values())
    bee = clients(3, names=NAMES[:4])["bee"]
    sealed = {name: first.deal()["bee"] for name in NAMES[:4]}
    with pytest.raises(HoldfastError, match="dealt was changed"):
        bee.reveal(sealed, set(NAMES[:4]), set(NAMES[:4]), set(NAMES[:4]))


def test_who_announces_the_key_of_another_takes_no_mask_away() -> None:
    """Two of five conspire. Theirs would cancel the masks that cat shares with the two honest ones."""
    secrets = {name: Secrets(hashlib.sha256(name.encode()).digest(), b"round 1") for name in NAMES}
    announced = {name: own.announcement() for name, own in secrets.items()}
    announced["ant"] = announced["ant"]._replace(masks=announced["dog"].masks)
    announced["bee"] = announced["bee"]._replace(masks=announced["eel"].masks)
    cat = Client("cat", secrets["cat"], announced, 4)
    values = encode(torch.full((64,), 3.25, dtype=torch.float64), 5)
    said = cat.masked(values, set(NAMES)) - mask(secrets["cat"].own, 64)
    assert bool((said != values).all())


def test_a_client_whose_message_has_changed_since_it_announced_goes_no_further() -> None:
    there = clients(3)["ant"]
    with pytest.raises(HoldfastError, match="computed another message since it announced"):
        replace(there, secrets=Secrets(bytes(32), b"round 1"))
